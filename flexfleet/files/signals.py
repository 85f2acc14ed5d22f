"""Stop a run on SIGTERM, on Ctrl-C, when its terminal is closed, or when the process that started it has ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread, current_thread, main_thread
from typing import Any

from fl_engine.core.errors import Stopped

STARTER = "FLEXFLEET_STARTER_PIPE"
"""Environment variable with the file descriptor of a pipe. Only the process that started this process holds the other
end of the pipe, so the pipe closes when that process ends, even after SIGKILL."""
GRACE_S = 5.0
"""Seconds for a clean stop after the starting process has ended."""


def end_with_starter() -> None:
    """Stop this process when the process that started it ends. Does nothing without the variable STARTER."""
    if pipe := os.environ.pop(STARTER, ""):
        Thread(target=_stop_after, args=(int(pipe),), daemon=True).start()


def _stop_after(pipe: int) -> None:
    os.read(pipe, 1)  # returns when the pipe closes
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)  # a resumed comparison must not find the run's folder locked


def _stopping() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGTERM, SIGINT, and SIGHUP unless the process was started with nohup."""
    found = [signal.SIGTERM, signal.SIGINT]
    # `getsignal` returns None for a handler that was not set in Python. Python cannot restore such a handler.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, None):
        found.append(signal.SIGHUP)
    return found


@contextmanager
def handled(by: Callable[[int, object], None]) -> Iterator[Mapping[int, Any]]:
    """Handle stop signals with the function `by` if this is the main thread, and yield the previous handlers."""
    numbers = _stopping() if current_thread() is main_thread() else []
    before = {int(number): signal.signal(number, by) for number in numbers}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after a stop signal. The caller must stop the run after the current client. A
    second Ctrl-C stops at once. If the context ends after a signal without Stopped, the previous handler is called."""
    received: list[int] = []

    def request(signum: int, _: object) -> None:
        if signum == signal.SIGINT and signal.SIGINT in received:
            raise KeyboardInterrupt
        received.append(signum)

    try:
        with handled(request) as before:
            yield lambda: bool(received)
    except Stopped:
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        raise
    for late in received:
        outer = before[late]
        if callable(outer) and outer is not signal.default_int_handler:
            outer(late, None)


@contextmanager
def stopping_at_once(instruction: str = "") -> Iterator[None]:
    """Stop at once on SIGTERM, on Ctrl-C, or when the terminal is closed. Raises Stopped, or KeyboardInterrupt after
    Ctrl-C, with `instruction` in the message. After the first signal, only Ctrl-C can interrupt the cleanup."""
    received: list[int] = []

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        if signum == signal.SIGINT or len(received) == 1:
            raise KeyboardInterrupt  # Stopped is an Exception, so libraries could catch it.

    try:
        with handled(stop):
            yield
    except KeyboardInterrupt:
        if received and signal.SIGINT not in received:
            raise Stopped(f"stopped on request{': ' if instruction else ''}{instruction}") from None
        if instruction:
            raise KeyboardInterrupt(instruction) from None
        raise
