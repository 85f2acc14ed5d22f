"""SIGTERM, Ctrl-C and a terminal that is closed during a run."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from fl_engine.core.errors import Stopped


def stopping() -> list[signal.Signals]:
    """The signals that ask a run to stop: SIGTERM, Ctrl-C, and SIGHUP of a terminal that is closed, unless it is
    ignored (nohup)."""
    found = [signal.SIGTERM, signal.SIGINT]
    # None: the handler was not set by Python, and could not be restored.
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, None):
        found.append(signal.SIGHUP)
    return found


@contextmanager
def _handled(by: Callable[[int, object], None]) -> Iterator[Mapping[int, Any]]:
    """Handle the signals that ask to stop with `by` inside. Yields the handlers before."""
    before = {int(number): signal.signal(number, by) for number in stopping()}
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether a stop is requested, so that a run ends after the current client. A second
    Ctrl-C ends it at once. A signal that came after the last look is passed to the handler before, unless that is
    Python's own handler of Ctrl-C."""
    received: list[int] = []

    def request(signum: int, _: object) -> None:
        if signum == signal.SIGINT and signal.SIGINT in received:
            raise KeyboardInterrupt
        received.append(signum)

    if current_thread() is not main_thread():
        yield lambda: False
        return
    try:
        with _handled(request) as before:
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
def stopping_at_once(goes_on: str = "") -> Iterator[None]:
    """Let SIGTERM and a closed terminal end what is inside at once, as Ctrl-C does: raise Stopped, or KeyboardInterrupt
    after Ctrl-C, with the text `goes_on`. Further signals but Ctrl-C do not disturb the end."""
    received: list[int] = []

    def stop(signum: int, _: object) -> None:
        received.append(signum)
        if signum == signal.SIGINT or len(received) == 1:
            raise KeyboardInterrupt  # not Stopped: libraries catch what is an Exception

    if current_thread() is not main_thread():
        yield
        return
    try:
        with _handled(stop):
            yield
    except KeyboardInterrupt:
        if received and signal.SIGINT not in received:
            raise Stopped(f"stopped on request{': ' if goes_on else ''}{goes_on}") from None
        if goes_on:
            raise KeyboardInterrupt(goes_on) from None
        raise
