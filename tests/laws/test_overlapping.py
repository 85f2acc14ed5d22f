"""Requests to a store that overlap (`storage.overlapping`): same results and errors as one after the other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.storage.overlapping import HELD_BYTES, overlapped
from fl_engine.storage.s3 import AT_ONCE, S3Store, UrlStore
from fl_engine.storage.store import FolderStore, MemoryStore


class Waiting(MemoryStore):
    """A store whose requests wait for a server: `together` of them answer when as many are there."""

    at_once = 4

    def __init__(self, together: int = 1) -> None:
        super().__init__()
        self._gate = threading.Barrier(together)
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        """The most requests that were under way at a time."""

    def get(self, key: str, limit: int | None = None) -> bytes:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self._gate.wait(timeout=30)
        with self._lock:
            self._now -= 1
        return super().get(key, limit)


def test_four_requests_are_answered_together() -> None:
    """Each waits for three others, so one after the other would never end."""
    store = Waiting(together=4)
    for i in range(8):
        store.put(str(i), bytes([i]))
    assert list(overlapped(store, 1, store.get, map(str, range(8)))) == [bytes([i]) for i in range(8)]
    assert store.most == 4


@pytest.mark.parametrize(("size", "most"), [(HELD_BYTES // 2, 2), (HELD_BYTES, 1), (100 * HELD_BYTES, 1)])
def test_large_values_do_not_lie_in_memory_beside_each_other(size: int, most: int) -> None:
    store = Waiting(together=most)
    for i in range(6):
        store.put(str(i), b"")
    list(overlapped(store, size, store.get, map(str, range(6))))
    assert store.most == most


def test_a_folder_is_asked_in_the_callers_own_thread(tmp_path: Path) -> None:
    found = set(overlapped(FolderStore(tmp_path), 1, lambda _: threading.get_ident(), range(20)))
    assert found == {threading.get_ident()}
    assert S3Store("s3://bucket").at_once == UrlStore({}, {}).at_once == AT_ONCE


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 40))
def test_results_come_in_order_until_the_first_error(items: list[int], broken: int) -> None:
    """As from a plain loop, whatever fails behind it; and nothing is taken that is not begun."""
    taken: list[int] = []

    def given_out() -> object:
        for place, item in enumerate(items):
            taken.append(place)
            yield place, item

    def work(each: tuple[int, int]) -> int:
        place, item = each
        if place >= broken:
            raise EnvironmentFailure(f"item {place}")
        return item * item

    results: list[int] = []
    store = Waiting()
    if broken < len(items):
        with pytest.raises(EnvironmentFailure, match=f"^item {broken}$"):
            results.extend(overlapped(store, 1, work, given_out()))  # type: ignore[arg-type]
        assert taken[-1] < broken + store.at_once
    else:
        results.extend(overlapped(store, 1, work, given_out()))  # type: ignore[arg-type]
    assert results == [item * item for item in items[:broken]][: len(results)]
    assert len(results) == min(broken, len(items))


def test_who_stops_asking_waits_for_what_has_begun_and_begins_nothing_more() -> None:
    done: list[int] = []
    results = overlapped(Waiting(), 1, done.append, range(100))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert sorted(done) == list(range(len(done))) and len(done) <= 5
