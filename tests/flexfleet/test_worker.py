"""A worker's side of its mailbox, without a process: its state, messages and heartbeats."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

import fl_engine
from fl_engine.core.errors import ClientError, EnvironmentFailure, IntegrityError
from fl_engine.remote.messages import HEARTBEAT, MESSAGE, AssignmentMessage, Heartbeat, Lease, Message
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.storage import code
from fl_engine.storage.run_files import sum_of
from fl_engine.storage.store import FolderStore, sha256
from fl_engine.training import cgroup
from flexfleet.cli.main import dispatch
from flexfleet.files.artifacts import RunFile
from flexfleet.worker import server
from flexfleet.worker.__main__ import main
from flexfleet.worker.execute import prepare
from flexfleet.worker.mailbox import FILE, WorkerMailbox, device_of
from tests.harness.played import START, Clock

LEASE = Lease(id="11" * 8, seconds=3600, assignment=AssignmentMessage(round=0, clients=(0,), store="x"))


def never(why: str) -> NoReturn:
    raise AssertionError(why)


class Place:
    """A coordinator's mailboxes in a folder, and a device weak-1."""

    def __init__(self, path: Path, patch: pytest.MonkeyPatch) -> None:
        self.patch, self.folder, self.file = patch, path / "device", path / "weak-1.json"
        self.home, self.registry = FolderStore(path / "home"), Registry(FolderStore(path / "registry"))
        self.mailboxes = Mailboxes(self.home)
        self.file.write_text(self.mailboxes.invite(self.registry, "weak", None).model_dump_json())
        self.options = [f"--invite={self.file}", f"--folder={self.folder}"]

    def device(self, process: str = "00" * 8) -> WorkerMailbox:
        device, folder = device_of(str(self.file), self.folder)
        return WorkerMailbox(FolderStore(folder, 0o600), device, process)

    def write(self, device: WorkerMailbox, **changes: Any) -> Message:
        """The next message for a device that has enrolled."""
        member = self.registry.member("weak-1").model_copy(update={"id": device.device.id})
        before = Message.model_validate_json(self.home.get(f"weak-1/{MESSAGE}"))
        return self.mailboxes.write(member, before, **{"worker": device.process, **changes})

    def heartbeat(self) -> Heartbeat:
        return Heartbeat.model_validate_json(self.home.get(f"weak-1/{HEARTBEAT}"))

    def served(
        self, device: WorkerMailbox, silence_s: float, each: Callable[[float], object] = lambda passed: None,
        trains: Callable[..., None] = lambda *_: None, restart: Callable[[str], NoReturn] = never,
    ) -> Clock:  # fmt: skip
        """Serve until silence. `each(seconds)` is called after each sleep."""

        class Playing(server.Server):
            def _train(self, *given: Any) -> None:
                trains(*given)

        clock = Clock(each=each)
        self.patch.setattr(server, "time", clock)
        Playing(device, restart).serve(silence_s, False)
        return clock


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setenv(server.DONE, "")
    monkeypatch.setenv(server.PROCESS, "00" * 8)
    return Place(tmp_path, monkeypatch)


def test_older_message_is_not_obeyed(place: Place) -> None:
    device = place.device()
    old = place.write(device, run="a")
    place.write(device, run="b")
    assert device.read().run == "b"
    place.home.put(f"weak-1/{MESSAGE}", old.text())
    for each in (device, place.device()):
        with pytest.raises(IntegrityError):
            each.read()


def test_message_of_another_version_names_both(place: Place) -> None:
    device = place.device()
    place.home.put(f"weak-1/{MESSAGE}", place.write(device).model_copy(update={"version": "9.8.7"}).text())
    with pytest.raises(IntegrityError) as refused:
        device.read()
    assert "9.8.7" in str(refused.value) and fl_engine.__version__ in str(refused.value)


def test_lease_of_another_process_is_not_obeyed(place: Place) -> None:
    device = place.device()
    place.write(device, lease=LEASE)
    assert device.read().lease == LEASE and place.device("11" * 8).read().lease is None


@pytest.mark.parametrize("why", ["revoked", "enrolled"])
def test_device_that_is_not_wanted_ends_with_42(place: Place, flexfleet: Callable[..., Any], why: str) -> None:
    if why == "revoked":
        place.mailboxes.revoke(place.registry, "weak-1")
    else:
        other = WorkerMailbox(FolderStore(place.folder.parent), device_of(str(place.file), place.folder)[0], "")
        place.write(other, worker=None)
    assert flexfleet("agent", *place.options).code == 42
    assert (place.folder / FILE).exists() == (why == "enrolled"), "only a signed message makes it forget its key"
    if why == "enrolled":
        assert (place.folder / FILE).stat().st_mode & 0o777 == 0o600


def test_device_does_not_import_the_code_of_a_run(place: Place) -> None:
    sha = "0" * 64
    run = RunFile(run_id="a", config={}, numerics={}, pool_sha256=sha, partition_sha256=sha, code_sha256=sha)
    place.home.put("site/run.json", value := run.model_dump_json().encode())
    given = LEASE.assignment.model_copy(update={"site": {"run.json": sum_of(value)}, "code": sha})
    with pytest.raises(ClientError, match=r"run\.code"):
        prepare(given, place.home, pod=False)


def test_late_heartbeat_does_not_hide_a_failure(place: Place) -> None:
    """The thread's heartbeat hangs in the network when the main thread has failed."""
    device, hangs, on, put = place.device(), threading.Event(), threading.Event(), FolderStore.put
    message = device.read().model_copy(update={"lease_s": 0.06})

    def slow(store: FolderStore, key: str, value: bytes) -> None:
        if key == HEARTBEAT and threading.current_thread().name == "heartbeats":
            hangs.set()
            assert on.wait(5)
        put(store, key, value)

    place.patch.setattr(FolderStore, "put", slow)
    with (working := server.Working(device, message, LEASE, never)):
        assert hangs.wait(5)
        threading.Timer(0.05, on.set).start()
    device.failed("no data here")
    working._thread.join(5)
    found = place.heartbeat()
    assert (found.state, found.error, found.lease) == ("failed", "no data here", LEASE.id)


def test_assignment_over_its_time_ends_without_a_heartbeat(place: Place) -> None:
    """A heartbeat may take long if the network hangs, and would prolong the lease."""
    device = place.device()
    working = server.Working(device, device.read(), LEASE.model_copy(update={"seconds": 1e-9}), never)
    before = device.requests
    assert working._ended() and device.requests == before


@pytest.mark.parametrize("pod", [True, False])
@pytest.mark.parametrize("owners", [None, "cuda:1"])
def test_torch_device_and_memory_depend_on_the_worker(place: Place, pod: bool, owners: str | None) -> None:
    """The owner may set the torch device. A pod needs a memory limit, because its node's free memory is not its own."""
    device, seen, nothing = place.device(), list[Any](), server.Prepared(None, None, "")  # type: ignore[arg-type]
    place.patch.setattr(server, "prepare", lambda given, *_: seen.append(given.device) or nothing)
    place.patch.setattr(server, "execute", lambda lease, *more: seen.extend([lease.assignment.device, more[-1]]))
    device.device = device.device.model_copy(update={"pod": pod})
    told = LEASE.assignment.model_copy(update={"store": str(place.home.root.parent), "device": "cuda:0"})
    server.Server(device, never, owners)._train(device.read(), LEASE.model_copy(update={"assignment": told}))
    assert seen == [owners or "cuda:0"] * 2 + [cgroup.room if pod else cgroup.room_of_device]


def test_device_ends_when_the_coordinator_is_silent(place: Place) -> None:
    place.write(device := place.device())
    clock = place.served(device, 300, lambda passed: passed < 1000 and place.write(device))
    assert 1300 <= clock.passed < 1400 and device.requests < 400


def test_long_assignment_is_not_silence(place: Place) -> None:
    ends = list[float]()
    place.write(device := place.device(), lease=LEASE)

    def trains(*_: Any) -> None:
        server.time.sleep(500)
        ends.append(server.time.monotonic() - START)

    def each(passed: float) -> None:
        if len(ends) == 1 and passed > ends[0] + 2:
            place.write(device, lease=LEASE.model_copy(update={"id": "22" * 8}))

    place.served(device, 300, each, trains)
    assert len(ends) == 2


def test_failure_is_shown_until_the_coordinator_has_read_it(place: Place) -> None:
    """With agents.lease_s=1200 it reads heartbeats every 100 seconds."""
    seen = list[str]()
    place.write(device := place.device(), lease=LEASE, lease_s=1200.0)

    def trains(*_: Any) -> None:
        raise EnvironmentFailure("no data here")

    def each(passed: float) -> None:
        if passed // 100 > len(seen):
            seen.append(place.heartbeat().state)
            if len(seen) == 1:
                place.write(device, lease=None)

    place.served(device, 1000.0, each, trains)
    assert seen[0] == "failed" and {*seen[1:]} == {"idle"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_device_reports_it(place: Place, unstopped: None, number: signal.Signals) -> None:
    """Each of its heartbeats meets signals; the first signal ends it."""
    put = FolderStore.put

    def signalled(store: FolderStore, key: str, value: bytes) -> None:
        if key == HEARTBEAT:
            for each in (number, signal.SIGTERM, signal.SIGHUP):
                signal.raise_signal(each)
        put(store, key, value)

    place.patch.setattr(FolderStore, "put", signalled)
    assert (dispatch(["agent", *place.options]), place.heartbeat().state) == (143, "gone")


@pytest.mark.parametrize(("flag", "level"), [("-q", logging.WARNING), ("-v", logging.DEBUG)])
def test_replaced_process_has_equal_options_and_no_old_code(place: Place, flag: str, level: int) -> None:
    folder, started = place.folder.parent, list[list[str]]()
    place.patch.setattr(tempfile, "tempdir", str(folder))
    (folder / "mine42.py").write_text("VALUE = 1\n")
    wheel = code.pack(folder / "mine42.py")
    loggers = [logging.getLogger(name) for name in ("flexfleet", "fl_engine")]

    def execv(path: str, argv: list[str]) -> None:
        assert not list(folder.glob("flexfleet-code-*"))
        started.append(argv[1:])
        raise SystemExit(0)

    place.patch.setattr(server.os, "execv", execv)
    place.patch.setattr(server.Server, "serve", lambda server, *_: server._restart("enough"))
    for run, argv in ((dispatch, ["agent", *place.options, "--device=cpu", flag]), (main, None)):
        code.enable(wheel, sha256(wheel), "here")
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
        with pytest.raises(SystemExit):
            run(argv or started[-1][2:])
        assert {logger.level for logger in loggers} == {level}
    code.disable()
    assert started[0] == started[1] and started[0][:2] == ["-m", "flexfleet.worker"] and "--device=cpu" in started[0]
