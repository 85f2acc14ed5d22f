"""Requests to a store that overlap: a small one is mostly waiting for the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from fl_engine.storage.store import Store

T = TypeVar("T")
R = TypeVar("R")

HELD_BYTES = 64 * 2**20
"""Bytes of values that are on their way at once, where there is more than one."""


def overlapped(store: Store, size: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item, in the items' order. `work` makes requests to `store`, and holds about `size`
    bytes for it; so many items are under way as the store takes (`at_once`) and as hold HELD_BYTES, one after the other
    where that is one.

    Items are taken and results given in this thread, a little ahead of who asks for them. What `work` raises is raised
    at its item's place, after all that has begun has ended; what has not begun by then never does.
    """
    at_once = min(getattr(store, "at_once", 1), max(1, HELD_BYTES // max(1, size)))
    if at_once == 1:
        yield from map(work, items)
        return
    flying: deque[Future[R]] = deque()
    with ThreadPoolExecutor(at_once, "requests") as threads:
        try:
            for item in items:
                flying.append(threads.submit(work, item))
                if len(flying) == at_once:
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()
        finally:
            for future in flying:
                future.cancel()
