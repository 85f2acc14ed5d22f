"""Requests to a store that overlap: a small one is mostly waiting for the server."""

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
"""Bytes of values that are on their way at once, where there is more than one."""


def overlapped(store: Store, size: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `work` makes of each item, in the items' order. `work` makes requests to `store`, and holds about `size`
    bytes while it does. As many items are under way at once as the store takes (`at_once`) and as fit into
    AT_ONCE_BYTES; where that is one, there are no threads.

    Items are taken in the caller's thread, a few ahead of the result that it asks for. An error of `work` or of `items`
    is raised where a plain loop would raise it, after the results before it. Items that have not begun by then are
    dropped, and those that have begun are waited for, but for Ctrl-C and SystemExit.
    """
    at_once = min(getattr(store, "at_once", 1), max(1, AT_ONCE_BYTES // max(1, size)))
    if at_once == 1:
        yield from map(work, items)
        return
    # Not a ThreadPoolExecutor, for whose threads Python waits at its end, whatever they wait for.
    asked: SimpleQueue[tuple[T, Future[R]] | None] = SimpleQueue()
    threads = [Thread(target=_serve, args=(asked, work), daemon=True, name="requests") for _ in range(at_once)]
    for thread in threads:
        thread.start()
    flying: deque[Future[R]] = deque()
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
            flying.append(Future())
            asked.put((item, flying[-1]))
            while flying and (len(flying) == at_once or flying[0].done()):
                yield flying.popleft().result()
        while flying:
            yield flying.popleft().result()
        if failed is not None:
            raise failed
    except (KeyboardInterrupt, SystemExit):
        waits = False
        raise
    finally:
        for future in flying:
            future.cancel()
        for _ in threads:
            asked.put(None)
        for thread in threads if waits else ():
            thread.join()


def _serve(asked: SimpleQueue[tuple[T, Future[R]] | None], work: Callable[[T], R]) -> None:
    # Until a thread has asked for it, torch's matrix products in it do not know `set_num_threads`, and have other bits.
    torch.get_num_threads()
    while (job := asked.get()) is not None:
        item, future = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work(item))
            except BaseException as error:
                future.set_exception(error)
        del job, item, future  # nothing is held while the thread waits
