"""Pods on the fake cluster against the laws that all backends share.

A pod is a process of its own with the worker's own loop, forked from one that has imported torch already. Data and
algorithm, which a run's configuration names for other pods, it gets from the test. The store is a folder: trying out an
S3 server takes longest in a case otherwise, and test_backend.py has that way.
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
from fl_engine.core.contracts import Backend
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of
from fl_engine.remote.settings import KubernetesConfig
from fl_engine.storage.store import FolderStore
from fl_engine.testing.backends import BackendSuite, Make
from tests.k8s.forked import LEFT_OUT, Played
from tests.k8s.pods import LIFETIMES


@pytest.mark.parametrize("lifetime", LIFETIMES)
class TestPods(BackendSuite):
    @pytest.fixture(autouse=True)
    def chosen(self, request: pytest.FixtureRequest) -> None:
        if len(request.node.callspec.params.get("devices", ())) > 1:
            pytest.skip("a pod has the device of its node pool")
        for part, why in LEFT_OUT.items():
            if part in request.node.name:
                pytest.skip(why)

    @pytest.fixture
    def make(self, cluster: Any, tmp_path: Path, lifetime: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
        monkeypatch.setattr("fl_engine.remote.kubernetes.controller.POLL_S", 0.05)
        number, cluster.slots = count(), threading.Semaphore(1000)
        options = KubernetesConfig(image="flexfleet:latest", clients_per_pod=3, lifetime=lifetime)
        with ExitStack() as opened:

            def build(site: Site, devices: Sequence[str]) -> Backend:
                name = f"run-{next(number)}"
                mailbox = Mailbox(FolderStore(tmp_path / name), site.rules, key_of(name.encode()))
                around = Surroundings(site, mailbox, tuple(devices), name, options)
                return Played(opened.enter_context(BACKENDS["kubernetes"](around)), cluster, site)

            yield build
        assert not cluster.objects, "nothing is left"
