"""Pods that stay for the run and prune to the memory that they have free (kubernetes.lifetime=run, observe=cgroup)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.backends.agents.backend import Agents
from fl_engine.storage.checkpoints import Row
from fl_engine.training import memory
from fl_engine.training.memory import Peaks
from flexfleet.files.artifacts import PoolFile
from tests.k8s.staying import Staying, threads_on

MIB = 2**20
POOLS = "kubernetes.pools={weak: {memory: 1000Mi}, medium: {memory: 1000Mi}, strong: {memory: 1000Mi}}"
LOOKS = ("kubernetes.lifetime=run", "kubernetes.observe=cgroup", POOLS, "training.fraction=1.0")

Rounds = Callable[..., Path]
Remote = tuple[str, ...]
Rows = Callable[[Remote, str], list[Row]]


def taken(mib: int) -> dict[str, str]:
    """What a pod's cgroup says that takes so much."""
    return {"memory.current": str(mib * MIB)}


class After:
    """Calls `then[n]` after round n, counted from 1."""

    def __init__(self, then: dict[int, Callable[[], None]]) -> None:
        self._then = then

    def update(self, *_: Any) -> None:
        pass

    def round(self, number: int, *_: Any) -> bool:
        self._then.get(number, lambda: None)()
        return False


def names_of(prepared: Path) -> list[str]:
    return [level.name for level in PoolFile.read(prepared / "pool" / "pool.json").levels]


def check_trained(row: Row, names: Sequence[str], needs: Sequence[int], room: int) -> int:
    """Each client trained the largest level that it was sent and that has room; how many trained less than they were
    sent."""
    fitting = max(i for i, need in enumerate(needs) if need <= room)
    for line in row.clients:
        assert names.index(line["trained"]) == min(names.index(line["sent"]), fitting)
    return sum(line["trained"] != line["sent"] for line in row.clients)


def test_a_pod_prunes_order_by_order_to_what_is_free(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks
) -> None:
    """Real processes, which stay the same in all rounds: with much, with little, and with much free again."""
    cluster.slots = threading.Semaphore(100)
    cluster.say(taken(100))
    then = {1: lambda: cluster.say(taken(940)), 2: lambda: cluster.say(taken(100))}
    rounds("looks", *remote, *LOOKS, "rounds.stop=3", watcher=After(then))
    found = rows(remote, "looks")
    names = names_of(prepared)
    pruned = [
        check_trained(row, names, peaks.needs, room * MIB) for row, room in zip(found, (900, 60, 900), strict=True)
    ]
    assert pruned[0] == pruned[2] == 0 < pruned[1]


@pytest.mark.parametrize(("strategy", "at_once"), [("batched", 2), ("single", 1)])
def test_orders_that_a_pod_holds_at_once_have_room_together(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks, strategy: str, at_once: int
) -> None:
    """Each of two has half of what is free where they train side by side, and all of it where one waits for the
    other."""
    cluster.slots = threading.Semaphore(100)
    cluster.say(taken(1000 - 120))
    sets = ("kubernetes.clients_per_pod=2", f"run.strategy={strategy}", "rounds.stop=1")
    rounds("share", *remote, *LOOKS, *sets)
    (row,) = rows(remote, "share")
    room = 120 * MIB // at_once
    assert len(row.clients) == 6 == 2 * len(re.findall(r"client \d+, \d+: answered", "".join(cluster.logs)))
    assert (check_trained(row, names_of(prepared), peaks.needs, room) > 0) == (at_once == 2)
    pool = PoolFile.read(prepared / "pool" / "pool.json").pool()
    assert {line["free"] for line in row.clients} == {memory.free(room, peaks, pool)}


class Killed(BaseException):
    pass


def test_an_order_that_kills_its_pod_goes_to_the_next_one_level_lower(
    cluster: Any, rounds: Rounds, remote: Remote, rows: Rows, prepared: Path, peaks: Peaks, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Also after the coordinator was killed. Two clients share a pod at first: what is lost together has not failed.
    The orders of others are not smaller for it."""
    (tmp_path / "memory.max").write_text(str(1000 * MIB))
    (tmp_path / "memory.current").write_text(str(100 * MIB))
    for variable in ("FLEXFLEET_CGROUP", "FLEXFLEET_PROC"):
        monkeypatch.setenv(variable, str(tmp_path))
    bad = 5
    told_failures: list[tuple[int, int]] = []
    waits, crashed, go = threading.Event(), threading.Event(), threading.Event()
    noticed = threading.Semaphore(0)

    def at_work(pod: Staying, told: Any) -> None:
        if bad not in told.clients:
            assert told.failures == 0
            return
        told_failures.append((len(told.clients), told.failures))
        if told.failures == 1:
            waits.set()
            go.wait(60)
        if told.failures < 2:
            pod.kill()

    def script(job: Any, index: int, before: int) -> str:
        if before:  # the Job controller waits for ten seconds, in which the coordinator notices
            noticed.acquire(timeout=60)
        return "run"

    real, really_lost = Agents._answered, Agents._lost

    def lost(*args: Any, **more: Any) -> Any:
        yield from really_lost(*args, **more)
        noticed.release()  # the next letter does not name the order any more

    def answered(self: Agents, r: Any) -> Any:
        if waits.is_set() and not crashed.is_set():
            crashed.set()
            raise Killed
        if crashed.is_set():
            go.set()  # the next coordinator has taken the order over
        return real(self, r)

    cluster.script = script
    monkeypatch.setattr(Agents, "_answered", answered)
    monkeypatch.setattr(Agents, "_lost", lost)
    sets = (*LOOKS, "kubernetes.clients_per_pod=2", "kubernetes.attempts=3", "rounds.stop=1")
    with threads_on(cluster) as pods:
        pods.at_work = staticmethod(at_work)
        with pytest.raises(Killed):
            rounds("killed", *remote, *sets)
        rounds("killed", *remote, *sets, resume=True)
    assert told_failures == [(2, 0), (1, 0), (1, 1), (1, 2)]
    (row,) = rows(remote, "killed")
    pool = PoolFile.read(prepared / "pool" / "pool.json").pool()
    free = {line["client"]: line["free"] for line in row.clients}
    assert free.pop(bad) == memory.free(900 * MIB, peaks, pool, 2)
    assert set(free.values()) == {memory.free(900 * MIB, peaks, pool), memory.free(450 * MIB, peaks, pool)}
