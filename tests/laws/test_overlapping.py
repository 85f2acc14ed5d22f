"""Requests to a store that overlap (`storage.overlapping`): same results and errors as one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.storage.overlapping import AT_ONCE_BYTES, overlapped
from tests.harness.stores import MemoryStore


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


@pytest.mark.parametrize(("size", "most"), [(AT_ONCE_BYTES // 2, 2), (100 * AT_ONCE_BYTES, 1)])
def test_large_values_are_not_in_memory_together(size: int, most: int) -> None:
    store = Waiting(together=most)
    for i in range(6):
        store.put(str(i), b"")
    list(overlapped(store, size, store.get, map(str, range(6))))
    assert store.most == most


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(0, 40))
def test_results_come_in_assignment_until_the_first_error(items: list[int], broken: int) -> None:
    taken: list[int] = []

    def given_out() -> Iterator[tuple[int, int]]:
        for place, item in enumerate(items):
            taken.append(place)
            yield place, item

    def work(each: tuple[int, int]) -> int:
        place, item = each
        if place >= broken:
            raise EnvironmentFailure(f"item {place}")
        return item * item

    def result(found: Iterator[int]) -> tuple[list[int], str]:
        results: list[int] = []
        try:
            results.extend(found)
        except EnvironmentFailure as error:
            return results, str(error)
        return results, ""

    alone = result(map(work, given_out()))
    taken.clear()
    store = Waiting()
    assert result(overlapped(store, 1, work, given_out())) == alone
    assert len(taken) <= broken + store.at_once


@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_a_signal_wait_for_no_request(how: type[BaseException]) -> None:
    answers = threading.Event()

    def given_out() -> Iterator[int]:
        yield from range(3)
        raise how

    with pytest.raises(how):
        list(overlapped(Waiting(), 1, lambda _: answers.wait(60), given_out()))
    answers.set()


def test_products_have_the_callers_bits() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pairs = [(torch.rand(16, size), torch.rand(size, 16)) for size in (1024, 4096, 50_000, 100_000)]
        ours = [a @ b for a, b in pairs]
        found = overlapped(Waiting(), 1, lambda pair: pair[0] @ pair[1], pairs)
        assert all(map(torch.equal, found, ours))
    finally:
        torch.set_num_threads(before)
