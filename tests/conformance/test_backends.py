"""Every backend of the registry against the laws that all of them share."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fl_engine.algorithms import FlexFL
from fl_engine.backends import BACKENDS, InProcess, Processes, Surroundings, processes
from fl_engine.core.contracts import Backend
from fl_engine.core.errors import EnvironmentFailure, Stopped
from fl_engine.core.types import Assignment, ClientFailure, ClientUpdate, LocalTask, TaskContext
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import TRAINING, assert_same_results, first_plan, tiny_site
from fl_engine.training.numerics import Numerics
from tests.conformance.backend_suite import BackendSuite, Make


class TestBackends(BackendSuite):
    @pytest.fixture(params=["in_process", "processes"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
        with ExitStack() as opened:

            def build(site: Site, devices: Sequence[str]) -> Backend:
                around = Surroundings(site, Mailbox(FolderStore(tmp_path), site.rules), tuple(devices))
                return opened.enter_context(BACKENDS[request.param](around))

            yield build


@pytest.mark.parametrize("name", ["warp:9", "meta", "hpu"])  # one that holds no values, one that needs a package
def test_missing_device_is_an_environment_failure(name: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"run.devices.*'{name}'"):
        InProcess(tiny_site(FlexFL()), ("cpu", name))


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[tuple[FlexFL, Processes, Site]]:
    algorithm = FlexFL(training=TRAINING)
    site = tiny_site(algorithm)
    with closing(Processes(site, ("cpu", "cpu"))) as backend:
        yield algorithm, backend, site


def test_killed_worker_is_replaced(workers: tuple[FlexFL, Processes, Site], caplog: pytest.LogCaptureFixture) -> None:
    algorithm, backend, site = workers
    plan = first_plan(algorithm, site)
    expected = sorted(InProcess(site).run(algorithm, plan), key=lambda o: o.client)
    os.kill(backend._workers[0].process.pid or 0, signal.SIGKILL)
    found = sorted(backend.run(algorithm, plan), key=lambda o: o.client)
    assert_same_results(found, expected)
    assert "signal 9" in caplog.text


@dataclass(frozen=True)
class Deadly(FlexFL):
    """Ends the worker process that trains this client."""

    victim: int = -1

    def task(self, assignment: Assignment, ctx: TaskContext) -> LocalTask:
        if assignment.client == self.victim and multiprocessing.parent_process() is not None:
            os._exit(7)
        return super().task(assignment, ctx)


def test_assignment_that_kills_every_worker_is_a_failure(workers: tuple[FlexFL, Processes, Site]) -> None:
    algorithm, backend, site = workers
    plan = first_plan(algorithm, site)
    victim = plan.assignments[1].client
    found = {o.client: o for o in backend.run(Deadly(training=TRAINING, victim=victim), plan)}
    failed = found.pop(victim)
    assert isinstance(failed, ClientFailure)
    assert "worker process ended with exit code 7" in failed.reason
    assert all(isinstance(o, ClientUpdate) for o in found.values()) and len(found) == len(plan.assignments) - 1


def test_hanging_worker_does_not_keep_a_run_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = FlexFL(training=TRAINING)
    site = tiny_site(algorithm)
    for name, seconds in (("LOOK_S", 0.02), ("STOP_S", 0.2), ("END_S", 0.1)):
        monkeypatch.setattr(processes, name, seconds)
    plan = first_plan(algorithm, site)
    with closing(Processes(site, ("cpu", "cpu"), should_stop=lambda: True)) as backend:
        worker = backend._workers[0].process
        os.kill(worker.pid or 0, signal.SIGSTOP)
        with pytest.raises(Stopped):
            list(backend.run(algorithm, plan))
    assert worker.exitcode is not None


def test_low_limit_of_open_files_is_an_environment_failure(tmp_path: Path) -> None:
    site = tiny_site(FlexFL())
    low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        free = stack.enter_context((tmp_path / "a").open("w", encoding="utf-8")).fileno()
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (low, high))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, high))
        with pytest.raises(EnvironmentFailure, match="ulimit -n"):
            Processes(site, ("cpu",))


@pytest.mark.parametrize("lanes", [2, 3, 64])
def test_batched_clients_have_equal_bits_in_every_backend(lanes: int, tmp_path: Path) -> None:
    algorithm = FlexFL(training=replace(TRAINING, fraction=0.6))
    site = replace(tiny_site(algorithm), numerics=Numerics("batched", lanes))
    plan = first_plan(algorithm, site)
    expected = [execute(algorithm, assignment, site) for assignment in plan.assignments]
    with closing(Processes(site, ("cpu",))) as worker:
        for backend in (InProcess(site), InProcess(site, ("cpu", "cpu")), worker):
            assert_same_results(sorted(backend.run(algorithm, plan), key=lambda o: o.client), expected)
