"""Pods on the fake cluster against the laws that all backends share.

A pod is a process of its own, forked from one that has imported torch already. It reads its Secret, and answers in the
run's store; network, data and algorithm, which a run's configuration tells pods elsewhere, it gets from the test. The
store is a folder (kubernetes.access=ambient): trying how an S3 server takes uploads is the longest part of a case
otherwise, and test_backend.py has that way.

A pod's device is its node pool's to name, so the cases that differ in nothing but devices run for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.backends.in_process import prepare_process
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.backends.processes import carry_out
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.store import FolderStore
from fl_engine.testing.backends import BackendSuite, Make
from tests.k8s import forked
from tests.k8s.forked import Played

OPTIONS = KubernetesConfig(image="flexfleet:latest", access="ambient", poll_s=0.02, clients_per_pod=2)


def live(algorithm: Algorithm, site: Site, command: list[str]) -> None:
    told = Assignment.read(Path(command[-1]))
    prepare_process((told.device,))
    mailbox = Mailbox(told.open(), key=lambda order: bytes.fromhex(told.keys[order.client]), lengths=told.lengths)
    carry_out(algorithm, site, mailbox, told.round, told.clients, told.device, True, told.evaluates)


LEFT_OUT = {
    **forked.LEFT_OUT,
    "test_two_rounds_end_in_the_same_model": "thirty pods; test_backend.py has runs of several rounds",
}


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
                return Played(opened.enter_context(BACKENDS["kubernetes"](around)), cluster, site, live)

            yield build
