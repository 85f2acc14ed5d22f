"""Pods on the fake cluster against the laws that all backends share.

A pod is a process of its own, forked from one that has imported torch already. It reads its Secret, and answers in the
run's store; network, data and algorithm, which a run's configuration tells pods elsewhere, it gets from the test. The
store is a folder (kubernetes.access=ambient): trying how an S3 server takes uploads is the longest part of a case
otherwise, and test_backend.py has that way.

A pod's device is its node pool's to name, so the cases that differ in nothing but devices run for one.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.backends.in_process import prepare_process
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.backends.processes import carry_out
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.store import FolderStore
from fl_engine.testing.backends import BackendSuite, Make

OPTIONS = KubernetesConfig(image="flexfleet:latest", access="ambient", poll_s=0.02, clients_per_pod=2)


def live(algorithm: Algorithm, site: Site, assignment: Path, env: Mapping[str, str], log: Path) -> None:
    """A pod, from its start to its end."""
    with log.open("w") as out:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(out.fileno(), stream.fileno())
    os.environ.update(env)
    told = Assignment.read(assignment)
    prepare_process((told.device,))
    mailbox = Mailbox(told.open(), key=lambda order: bytes.fromhex(told.keys[order.client]), lengths=told.lengths)
    carry_out(algorithm, site, mailbox, told.round, told.clients, told.device, really_slow=True)


class Pod:
    """What the kubelet needs of a process."""

    def __init__(self, algorithm: Algorithm, site: Site, command: list[str], env: dict[str, str], log: Path) -> None:
        log.touch()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fl_engine.backends.processes", "flexfleet.steps.answer"])
        told = (algorithm, site, Path(command[-1]), env, log)
        self._process = context.Process(target=live, args=told, daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class Played:
    """A backend whose pods know what is played."""

    def __init__(self, inner: Backend, cluster: Any, site: Site) -> None:
        self._inner, self._cluster, self._site = inner, cluster, site
        self.durable, self.phases = inner.durable, inner.phases

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        self._cluster.start = partial(Pod, algorithm, self._site)
        return self._inner.run(algorithm, plan)


ELSEWHERE = "pods are processes of their own, which reach neither the plan nor this generator nor an earlier update"
LEFT_OUT = {
    "test_the_plan_is_only_read": ELSEWHERE,
    "test_the_global_generator_neither_moves_nor_matters": ELSEWHERE,
    "test_an_outcome_outlives_the_next": ELSEWHERE,
    "test_two_rounds_end_in_the_same_model": "thirty pods; test_backend.py has runs of several rounds",
    "tokens": "every pod would import torch's compiler; test_kinds.py has tokens, in pods that are threads",
    "series-batched": "an LSTM has no form for that: it would be series-single again",
}
"""What would take long and show nothing more here: parts of cases' names, and why."""


class TestPods(BackendSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, request: pytest.FixtureRequest) -> None:
        parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
        if len(parameters.get("devices", ())) > 1:
            pytest.skip("a pod has the device of its node pool")
        for part, why in LEFT_OUT.items():
            if part in request.node.name:
                pytest.skip(why)

    @pytest.fixture
    def make(self, cluster: Any, tmp_path: Path) -> Iterator[Make]:
        number = count()
        with ExitStack() as opened:

            def build(site: Site, devices: Sequence[str]) -> Backend:
                name = f"run-{next(number)}"
                secret = key_of(name.encode()), key_of(name.encode(), "coordinator")
                mailbox = Mailbox(FolderStore(tmp_path / name), site.rules, *secret)
                around = Surroundings(site, mailbox, tuple(devices), name, OPTIONS)
                return Played(opened.enter_context(BACKENDS["kubernetes"](around)), cluster, site)

            yield build
