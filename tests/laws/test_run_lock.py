"""Two coordinators of one run: one holds the lock, and one that was paused damages nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, InUse, Replaced, Stopped
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage import run_lock
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.run_lock import Holder, RunLock
from fl_engine.storage.store import FolderStore, Store, encode
from fl_engine.testing.tiny import Memory
from tests.harness.stores import MemoryStore, Writing

hold = partial(run_lock.hold, ttl_s=0.3, heartbeat_s=0.02)
ELSEWHERE = Holder(host="edge-7", machine="another", pid=4711, since="2026-01-01T00:00:00+00:00")


@contextmanager
def held_elsewhere(store: Store, holder: Holder = ELSEWHERE) -> Iterator[None]:
    """The first lock, held on another machine."""
    assert store.create("lease/00001.json", holder.model_dump_json().encode())
    lock = RunLock(store, 1, holder, 0.02)
    thread = threading.Thread(target=lock.send_heartbeats)
    thread.start()
    try:
        yield
    finally:
        lock.ended.set()
        thread.join()


def test_error_names_the_holder(memory_store: Store) -> None:
    who = r"is being run by process 4711 on edge-7 \(since 2026-.*\)\. Wait for this process, or stop it"
    with held_elsewhere(memory_store), pytest.raises(InUse, match=who), hold(memory_store):
        pass
    with hold(memory_store, ttl_s=1e9) as second:
        assert second.number == 2, "let go, it is taken without waiting"
        second.check()
        with pytest.raises(Replaced, match=f"process {os.getpid()} on .* has taken over"):
            RunLock(memory_store, 1, ELSEWHERE).check()
    assert Holder.model_validate_json(memory_store.get("lease/00002.json")).released, "before the block has ended"
    assert memory_store.list("lease/") == ["lease/00002.json"]


@pytest.mark.parametrize("restarted", [False, True], ids=["ended", "a container started again"])
def test_ended_process_of_this_machine_is_replaced_at_once(
    memory_store: Store, caplog: pytest.LogCaptureFixture, restarted: bool
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with hold(memory_store):
        mine = Holder.model_validate_json(memory_store.get("lease/00001.json"))
    left = mine.model_copy(update={"released": False, "pid": os.getpid() if restarted else gone.pid})
    memory_store.put("lease/00001.json", left.model_dump_json().encode())
    with hold(memory_store, ttl_s=1e9) as found:
        assert found.number == 2
    assert f"taking over from process {left.pid} on {left.host}" in caplog.text


def test_running_process_of_this_machine_keeps_the_lock(memory_store: Store) -> None:
    with hold(memory_store):
        mine = Holder.model_validate_json(memory_store.get("lease/00001.json"))
    memory_store.delete("lease/00001.json")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as running:
        holder = mine.model_copy(update={"released": False, "pid": running.pid})
        with held_elsewhere(memory_store, holder), pytest.raises(InUse), hold(memory_store):
            pass
        running.kill()


class Late(MemoryStore):
    """Answers the first two requests for a value slowly, with an old one."""

    waits = (0.0, 0.4)
    old = b""

    def get(self, key: str, limit: int | None = None) -> bytes:
        if not self.waits:
            return super().get(key, limit)
        wait, *self.waits = self.waits  # type: ignore[assignment]
        time.sleep(wait)
        return self.old


@pytest.mark.parametrize("first", [None, b"{half", b""], ids=["late", "half", "empty"])
def test_slow_store_does_not_take_the_lock_from_its_holder(first: bytes | None) -> None:
    store = Late()
    store.old = ELSEWHERE.model_dump_json().encode() if first is None else first
    with held_elsewhere(store), pytest.raises(InUse), hold(store):
        pass


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_one_of_many_that_start_at_once_holds_the_lock(kind: str, memory_store: Store, tmp_path: Path) -> None:
    store = memory_store if kind == "memory" else FolderStore(tmp_path)
    ended = threading.Barrier(8, timeout=60)

    def start(number: int) -> RunLock | str:
        try:
            with hold(store, ttl_s=5.0) as mine:
                ended.wait()
                return mine
        except InUse as error:
            ended.wait()
            return str(error)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(8) as threads:
        patch.setattr(run_lock, "_machine", lambda: str(threading.get_ident()))  # each a machine of its own
        found = list(threads.map(start, range(8)))
    assert sum(isinstance(result, RunLock) for result in found) == 1
    assert all("is being run by process" in result for result in found if isinstance(result, str))


class Overwriting(MemoryStore):
    def create(self, key: str, value: bytes) -> bool:
        self.put(key, value)
        return True


def test_server_without_conditional_writes_is_refused() -> None:
    with pytest.raises(EnvironmentFailure), hold(Overwriting()):
        pass


def test_heartbeats_continue_after_an_outage(memory_store: Store) -> None:
    fails = threading.Event()

    def fail(what: str, key: str) -> None:
        if fails.is_set() and what == "put":
            raise EnvironmentFailure("no answer")

    def heartbeats() -> int:
        return Holder.model_validate_json(memory_store.get("lease/00001.json")).heartbeats

    with hold(Writing(memory_store, fail)):
        fails.set()
        time.sleep(0.1)
        fails.clear()
        before = heartbeats()
        time.sleep(0.1)
        assert heartbeats() > before


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
    settings = RoundsConfig(stop=stop, evaluate_every=1000, commit_every=1, keep_updates=True)
    ledger = Ledger(store, lock=RunLock(store, number, ELSEWHERE))
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

    with pytest.raises(Replaced, match="another coordinator has taken over"):
        run(job, At(store, lambda what, _: what == "delete", replaced), 2, discard_damaged=True)  # type: ignore[arg-type]
    assert Checkpoints(store).commits() == [0, 1, 2, 3, 4]
    assert run(job, store, 3, stop=5) == ended[0] == run(job, new_store(), 1, stop=5)


def by(store: Store, number: int, **more: Any) -> Ledger:
    return Ledger(store, lock=RunLock(store, number, ELSEWHERE), **more)


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
    with pytest.raises(Replaced):
        commit(by(memory_store, 1), 4)
    assert memory_store.list("rounds/") == before
    by(memory_store, 3).checkpoints.tidy()
    assert memory_store.list("rounds/") != before, "its own successor does"
    commit(by(memory_store, 3), 4, 5, 6, 7)
    assert not memory_store.list("rounds/00004/3-state"), "and deletes old states that it wrote itself"


@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (9, 10), (10, 9)])
def test_mark_of_the_later_coordinator_counts(memory_store: Store, numbers: tuple[int, int]) -> None:
    for number in numbers:
        commit(by(memory_store, number), 0, value=float(number))
    memory_store.put(f"rounds/00000/{max(numbers) + 1}-state.json", b"of a commit without a marker")
    tensors, _ = Checkpoints(memory_store).read(0)
    assert tensors["params/w"].tolist() == [max(numbers)] * 3
    assert [row.metrics["avg"] for row in Checkpoints(memory_store).rows()] == [max(numbers)]


@pytest.mark.parametrize("damaged", [False, True])
def test_silent_holder_elsewhere_is_replaced_after_the_ttl(memory_store: Store, damaged: bool) -> None:
    memory_store.put("lease/00001.json", b"{half" if damaged else ELSEWHERE.model_dump_json().encode())
    started = time.monotonic()
    with hold(memory_store, ttl_s=None, heartbeat_s=0.1) as found:
        assert found.number == 2 and 0.4 < time.monotonic() - started < 20
