"""Overlapping requests to a store: a small request mostly waits for the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import torch

from fl_engine.storage.store import Store

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE_BYTES = 64 * 2**20
"""The most bytes of values in transfer, if there is more than one value."""


def overlapped(store: Store, size: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` for each item, in the items' order. `work` sends requests to `store` and holds about `size`
    bytes meanwhile. As many items are in progress as the store accepts (`at_once`) and as fit into AT_ONCE_BYTES; for
    one item at a time there are no threads.

    Items are taken in the caller's thread, a few ahead of the result that it waits for. An error of `work` or of
    `items` is raised after the results before it, as in a plain loop. Items that have not begun by then are dropped,
    and the others are waited for, except at Ctrl-C and SystemExit.
    """
    at_once = min(getattr(store, "at_once", 1), max(1, AT_ONCE_BYTES // max(1, size)))
    if at_once == 1:
        yield from map(work, items)
        return
    # At its end Python waits for the threads of a ThreadPoolExecutor, but not for these.
    asked: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
    threads = [Thread(target=_serve, args=(asked, work), daemon=True, name="requests") for _ in range(at_once)]
    for thread in threads:
        thread.start()
    pending: deque[Future[R]] = deque()
    failed: Exception | None = None
    waits, source = True, iter(items)
    try:
        while failed is None:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as error:
                failed = error
                break
            pending.append(Future())
            asked.put((item, pending[-1]))
            while pending and (len(pending) == at_once or pending[0].done()):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if failed is not None:
            raise failed
    except (KeyboardInterrupt, SystemExit):
        waits = False
        raise
    finally:
        for future in pending:
            future.cancel()
        for _ in threads:
            asked.put(None)
        for thread in threads if waits else ():
            thread.join()


def _serve(asked: SimpleQueue[tuple[T, Future[R]] | None], work: Callable[[T], R]) -> None:
    # In a thread that has not called this, torch's matrix products ignore `set_num_threads` and have other bits.
    torch.get_num_threads()
    while (job := asked.get()) is not None:
        item, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:
                future.set_exception(error)
        del job, item, future  # nothing is held while the thread waits
