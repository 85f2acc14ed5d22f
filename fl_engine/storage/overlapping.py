"""Send overlapping requests to a store, because a small request mostly waits for the server."""

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
"""Maximum bytes of memory for overlapping calls."""


def overlapped(store: Store, size: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield `work(item)` for each item in the order of `items`, with several calls in parallel.

    At most `store.at_once` calls overlap, and the calls use at most AT_ONCE_BYTES in total. If only one call fits, no
    thread is started. The caller's thread iterates over `items`. After an error, the function waits for running calls,
    except after Ctrl-C or SystemExit.

    Args:
        size: Bytes of memory that one call of `work` uses.
        work: Function that sends requests to `store`.
    """
    at_once = min(getattr(store, "at_once", 1), max(1, AT_ONCE_BYTES // max(1, size)))
    if at_once == 1:
        yield from map(work, items)
        return
    # Use daemon threads, because Python waits at exit for the threads of a ThreadPoolExecutor.
    jobs: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
    threads: list[Thread] = []
    pending: deque[Future[R]] = deque()
    waits = True
    try:
        for item in items:
            if len(threads) < at_once:
                threads.append(Thread(target=_serve, args=(jobs, work), daemon=True, name="requests"))
                threads[-1].start()
            pending.append(Future())
            jobs.put((item, pending[-1]))
            while pending and (len(pending) == at_once or pending[0].done()):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except (KeyboardInterrupt, SystemExit):
        waits = False
        raise
    finally:
        for _ in threads:
            jobs.put(None)
        for thread in threads if waits else ():
            thread.join()


def _serve(jobs: SimpleQueue[tuple[T, Future[R]] | None], work: Callable[[T], R]) -> None:
    # Without this call, torch would ignore `set_num_threads` in this thread, so the last bits of products would change.
    torch.get_num_threads()
    while (job := jobs.get()) is not None:
        item, future = job
        try:
            future.set_result(work(item))
        except BaseException as error:
            future.set_exception(error)
        del job, item, future  # free memory while the thread waits
