"""Pods that stay, on the fake cluster, against the laws that all backends share.

A pod is a process of its own with the agent's own loop, forked from one that has imported torch already. Network, data
and algorithm, which a run's configuration tells pods elsewhere, it gets from the test; the store is a folder, as in
test_suite.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.backends.in_process import prepare_process
from fl_engine.backends.kubernetes.settings import KubernetesConfig
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import key_of
from fl_engine.storage.store import FolderStore
from fl_engine.testing.backends import BackendSuite, Make
from tests.k8s.fake import telling
from tests.k8s.forked import LEFT_OUT, Played

OPTIONS = KubernetesConfig(image="flexfleet:latest", access="ambient", poll_s=0.02, clients_per_pod=3, lifetime="run")


def live(algorithm: Algorithm, site: Site, command: list[str]) -> None:
    _, _, entry, invitation, stay, *options = command
    assert (entry, stay) == ("flexfleet.steps.client", "--stay")
    from flexfleet.steps import agent

    def prepared(told: Any, *_: Any) -> tuple[Algorithm, Site]:
        prepare_process((told.device,))
        return algorithm, site

    agent.prepared = prepared  # type: ignore[assignment]
    agent.main([f"--invite={invitation}", *options])


class TestPodsThatStay(BackendSuite):
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
        cluster.slots = threading.Semaphore(1000)
        with ExitStack() as opened:

            def build(site: Site, devices: Sequence[str]) -> Backend:
                name = f"run-{next(number)}"
                store = FolderStore(tmp_path / name)
                store.put("site/run.json", b"{}")
                secret = key_of(name.encode()), key_of(name.encode(), "coordinator")
                around = Surroundings(site, Mailbox(store, site.rules, *secret), tuple(devices), name, OPTIONS)
                return Played(opened.enter_context(BACKENDS["kubernetes"](around)), cluster, site, live)

            yield build
        assert not telling(cluster.objects.values()), "nothing is left"
