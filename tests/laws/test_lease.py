"""Two coordinators on one run: exactly one proceeds, the other says who it is; one that was paused damages nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, InUse, Stopped
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage import lease
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.lease import Holder, Lease
from fl_engine.storage.store import FolderStore, Store, encode
from fl_engine.testing.tiny import Memory
from tests.harness.stores import Writing


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.02)
    monkeypatch.setattr(lease, "TTL_S", 0.3)
    monkeypatch.setattr(lease, "POLL_S", 0.01)


def leave(store: Store, **said: Any) -> Holder:
    elsewhere = {"host": "edge-7", "machine": "another", "pid": 4711, "since": "2026-01-01T00:00:00+00:00"}
    holder = Holder.model_validate(elsewhere | said)
    assert store.create("lease/00001.json", holder.model_dump_json().encode())
    return holder


def test_the_second_says_who_the_first_is(memory_store: Store) -> None:
    with lease.held(memory_store) as first:
        assert first.number == 1
        who = rf"is being run by process {os.getpid()} on .* \(since .*\): wait for it, or stop it first"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lease, "_machine", lambda: "another")
            with pytest.raises(InUse, match=who), lease.held(memory_store):
                pass
        first.check()
    with lease.held(memory_store) as second:
        assert second.number == 2, "let go, it is taken without waiting"
    assert memory_store.list("lease/") == ["lease/00002.json"]


def test_ended_process_of_this_machine_is_replaced_at_once(
    memory_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "TTL_S", 1e9)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    leave(memory_store, machine=lease._machine(), pid=gone.pid)
    with lease.held(memory_store) as found:
        assert found.number == 2
    assert f"taking over from process {gone.pid} on edge-7" in caplog.text


def test_restarted_container_takes_over_from_its_own_number(
    memory_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lease, "TTL_S", 1e9)
    leave(memory_store, machine=lease._machine(), pid=os.getpid())
    with lease.held(memory_store) as found:
        assert found.number == 2
    assert f"taking over from process {os.getpid()} on edge-7" in caplog.text


@pytest.mark.parametrize("first", [None, b"{half", b""], ids=["late", "half", "empty"])
def test_slow_store_does_not_take_the_lease_from_its_holder(
    memory_store: Store, monkeypatch: pytest.MonkeyPatch, first: bytes | None
) -> None:
    with lease.held(memory_store):
        get = memory_store.get
        old = get("lease/00001.json") if first is None else first
        waits = [0.0, 0.4]

        def late(key: str, limit: int | None = None) -> bytes:
            if not waits:
                return get(key, limit)
            time.sleep(waits.pop(0))
            return old

        monkeypatch.setattr(memory_store, "get", late)
        monkeypatch.setattr(lease, "_machine", lambda: "another")
        with pytest.raises(InUse, match=r"is being run by process"), lease.held(memory_store):
            pass


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_of_many_that_start_at_once_one_proceeds(kind: str, memory_store: Store, tmp_path: Path) -> None:
    store = memory_store if kind == "memory" else FolderStore(tmp_path)
    ended = threading.Barrier(8, timeout=60)

    def start(number: int) -> Lease | str:
        try:
            with lease.held(store) as mine:
                ended.wait()
                return mine
        except InUse as error:
            ended.wait()
            return str(error)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as threads:
        patch.setattr(lease, "_machine", lambda: str(threading.get_ident()))  # each a machine of its own
        patch.setattr(lease, "TTL_S", 5.0)
        found = list(threads.map(start, range(8)))
    assert sum(isinstance(outcome, Lease) for outcome in found) == 1
    assert all("is being run by process" in outcome for outcome in found if isinstance(outcome, str))


def test_a_server_that_cannot_keep_two_apart_is_refused(memory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrites(key: str, value: bytes) -> bool:
        memory_store.put(key, value)
        return True

    monkeypatch.setattr(memory_store, "create", overwrites)
    with pytest.raises(EnvironmentFailure, match="ignores If-None-Match"), lease.held(memory_store):
        pass


def holder_in(store: Store) -> lease.Holder:
    return lease.Holder.model_validate_json(store.get("lease/00001.json"))


def test_a_heartbeat_outlives_an_outage_of_the_store(memory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put, fails = memory_store.put, threading.Event()

    def flaky(key: str, value: bytes) -> None:
        if fails.is_set():
            raise EnvironmentFailure("no answer")
        put(key, value)

    monkeypatch.setattr(memory_store, "put", flaky)
    with lease.held(memory_store):
        fails.set()
        time.sleep(0.1)
        fails.clear()
        before = holder_in(memory_store)
        time.sleep(0.1)
        after = holder_in(memory_store)
        assert after.beats > before.beats


# ---------------------------------------------------------------------------------------------------- fencing
class Pausing(Writing):
    """Passes everything on to `inner`, but stops before its n-th write or deletion until it is told to go on."""

    def __init__(self, inner: Store, writes: int) -> None:
        super().__init__(inner, self._pause)
        self.left = writes
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def _pause(self, what: str, key: str) -> None:
        self.left -= 1
        if self.left == -1:
            self.reached.set()
            assert self.go_on.wait(60)


def run(
    job: Any, store: Store, number: int, *, stop: int = 3, tracker: Tracker | None = None, discard_damaged: bool = False
) -> bytes:
    """The job's rounds, by the coordinator of this number."""
    holder = Holder(host="here", machine="here", pid=1, since="now")
    settings = RoundsConfig(stop=stop, evaluate_every=1000, commit_every=1, keep_updates=True)
    ledger = ledger_in(store, lease=Lease(store, number, holder))
    args = (Run(job.algorithm, job.site, settings), job.initial(), job.backend, ledger, tracker or Memory())
    return encode(rounds.federate(*args, discard_damaged=discard_damaged).params)


def test_replaced_coordinator_changes_no_bit_after_any_pause(
    job: Any, new_store: Callable[[], Store], timeless: Callable[[Store], list[Any]]
) -> None:
    undisturbed = new_store()
    undisturbed.put("lease/00001.json", b"")
    expected = run(job, undisturbed, 1)
    for writes in range(100):
        store = new_store()
        store.put("lease/00001.json", b"")
        paused, ended = Pausing(store, writes), list[BaseException | bytes]()

        def first(paused: Pausing = paused, ended: list[BaseException | bytes] = ended) -> None:
            try:
                ended.append(run(job, paused, 1))
            except FlexfleetError as error:
                ended.append(error)
            paused.reached.set()

        thread = threading.Thread(target=first)
        thread.start()
        assert paused.reached.wait(60)
        finished = bool(ended)
        store.put("lease/00002.json", b"")
        assert run(job, store, 2) == expected
        before = timeless(store)
        paused.go_on.set()
        thread.join()
        if finished:
            break
        (end,) = ended
        assert isinstance(end, Stopped) or end == expected, "stopped, or paused behind its last commit"
        assert timeless(store) == before == timeless(undisturbed), f"paused before write {writes}"
        assert run(job, store, 2) == expected
        Checkpoints(store).read(2)
    assert writes > 20


class At(Writing):
    """Passes everything on to `inner`; once, before the write or deletion that `when` names, `then` happens."""

    def __init__(self, inner: Store, when: Callable[[str, str], bool], then: Callable[[], object]) -> None:
        super().__init__(inner, self._at)
        self._when, self._then, self._done = when, then, False

    def _at(self, what: str, key: str) -> None:
        if not self._done and self._when(what, key):
            self._done = True
            self._then()


def test_replaced_coordinator_discards_nothing_of_its_successor(job: Any, new_store: Callable[[], Store]) -> None:
    store = new_store()
    store.put("lease/00001.json", b"")
    run(job, store, 1)
    store.put("rounds/00002/1-state.safetensors", b"damaged")
    store.put("lease/00002.json", b"")
    ended = []

    def replaced() -> None:
        store.put("lease/00003.json", b"")
        ended.append(run(job, store, 3, stop=5, discard_damaged=True))

    with pytest.raises(Stopped, match="has taken over"):
        run(job, At(store, lambda what, _: what == "delete", replaced), 2, discard_damaged=True)  # type: ignore[arg-type]
    assert Checkpoints(store).commits() == [0, 1, 2, 3, 4]
    assert run(job, store, 3, stop=5) == ended[0] == run(job, new_store(), 1, stop=5)


def test_late_commit_does_not_stop_the_successor(job: Any, new_store: Callable[[], Store]) -> None:
    store, late, ended = new_store(), list[tuple[str, bytes]](), list[bytes]()
    store.put("lease/00001.json", b"")

    def paused(what: str, key: str) -> bool:
        return what == "create" and key == "rounds/00001/1-COMMITTED"

    def replaced() -> None:
        """The mark comes when the successor has written its state, and not its own mark yet."""
        store.put("lease/00002.json", b"")

        def commits() -> None:
            assert store.create("rounds/00001/1-COMMITTED", mark())

        meanwhile = At(store, lambda what, key: key == "rounds/00001/2-COMMITTED", commits)
        ended.append(run(job, meanwhile, 2))  # type: ignore[arg-type]

    def mark() -> bytes:
        (value,) = (value for key, value in late if key == "rounds/00001/1-COMMITTED")
        return value

    class Late(At):
        def create(self, key: str, value: bytes) -> bool:
            late.append((key, value))
            return super().create(key, value)

    with pytest.raises(Stopped, match="has taken over"):
        run(job, Late(store, paused, replaced), 1)  # type: ignore[arg-type]
    assert ended == [run(job, new_store(), 1)]
    assert Checkpoints(store).commits() == [0, 1, 2]
    assert run(job, store, 2) == ended[0]


def test_coordinator_replaced_after_its_commit_logs_no_more(job: Any, new_store: Callable[[], Store]) -> None:
    store, told, other = new_store(), Memory(), Memory()
    store.put("lease/00001.json", b"")

    def replaced() -> None:
        store.put("lease/00002.json", b"")
        run(job, store, 2, tracker=other)

    def tidies(what: str, key: str) -> bool:
        return what == "delete" and "rounds/00001/1-COMMITTED" in store.list("rounds/")

    with pytest.raises(Stopped, match="has taken over"):
        run(job, At(store, tidies, replaced), 1, tracker=told)  # type: ignore[arg-type]
    assert sorted(told.rows) == [1]
    assert sorted(other.rows) == [1, 2, 3]


def by(store: Store, number: int, **more: Any) -> Ledger:
    return ledger_in(store, lease=Lease(store, number, Holder(host="here", machine="here", pid=1, since="now")), **more)


def commit(ledger: Ledger, *rounds: int, value: float = 0.0) -> None:
    for round in rounds:
        rows = [Row(round=round, metrics={"avg": value}, clients=())]
        ledger.checkpoints.commit(round, {"params/w": torch.full((3,), value)}, {"count": round}, rows)


def test_replaced_coordinator_tidies_nothing_of_its_successor(memory_store: Store) -> None:
    memory_store.put("lease/00002.json", b"")
    commit(by(memory_store, 2, keep_every=1), 0, 1, 2, 3)
    before = memory_store.list("rounds/")
    by(memory_store, 1).checkpoints.tidy()
    assert memory_store.list("rounds/") == before
    by(memory_store, 3).checkpoints.tidy()
    assert memory_store.list("rounds/") != before, "its own successor does"


def test_replaced_coordinator_prunes_nothing_while_it_commits(memory_store: Store) -> None:
    for key in ("rounds/00000/plan.json", "rounds/00000/updates/3.json"):
        memory_store.put(key, b"{}")
    replaced = At(memory_store, lambda what, _: what == "create", lambda: memory_store.put("lease/00002.json", b""))
    with pytest.raises(Stopped, match="has taken over"):
        commit(by(replaced, 1), 0)  # type: ignore[arg-type]
    assert {"rounds/00000/plan.json", "rounds/00000/updates/3.json"} <= set(memory_store.list("rounds/"))


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (9, 10), (10, 9)])
def test_mark_of_the_later_coordinator_counts(memory_store: Store, numbers: tuple[int, int]) -> None:
    for number in numbers:
        commit(by(memory_store, number), 0, value=float(number))
    tensors, _ = Checkpoints(memory_store).read(0)
    assert tensors["params/w"].tolist() == [max(numbers)] * 3
    assert [row.metrics["avg"] for row in Checkpoints(memory_store).rows()] == [max(numbers)]


def test_silent_holder_elsewhere_is_replaced_after_the_ttl(memory_store: Store) -> None:
    leave(memory_store)
    started = time.monotonic()
    with lease.held(memory_store) as found:
        assert found.number == 2 and time.monotonic() - started > 0.3


def test_a_lease_that_is_no_lease_is_replaced_after_a_while(memory_store: Store) -> None:
    memory_store.put("lease/00041.json", b"{half")
    started = time.monotonic()
    with lease.held(memory_store) as found:
        assert found.number == 42 and time.monotonic() - started > 0.3
