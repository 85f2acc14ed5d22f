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
    bytes for it; so many items are under way as the store takes (`at_once`) and as hold AT_ONCE_BYTES, one after the
    other where that is one.

    Items are taken, and results given, in the caller's thread, a little ahead of who asks for them. As from a plain
    loop, an error of `work` or of `items` comes after the results before it; what has not begun by then never does, and
    nothing goes on behind the caller's back. Ctrl-C and SystemExit alone wait for nobody.
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
