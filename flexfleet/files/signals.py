"""SIGTERM, Ctrl-C and a terminal that is closed while a run goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

from fl_engine.core.errors import ON_REQUEST, Stopped

AGAIN_S = 0.5
"""Seconds after which an interruption is repeated, if a library made another error of it and the work went on."""


def stopping() -> list[signal.Signals]:
    """The signals that ask a run to stop: SIGTERM, Ctrl-C, and SIGHUP, which a terminal sends that is closed, unless it
    is ignored (nohup)."""
    found = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP"):  # Windows has none
        # None: the handler was not set by Python, and could not be set again.
        found += [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) not in (signal.SIG_IGN, None))
    return found


@contextmanager
def _handled(
    by: Callable[[int, object], None], dropped: Callable[[], object]
) -> Iterator[Mapping[signal.Signals, Any]]:
    """Inside, signals that ask to stop, and the timer's, go to `by`, in the main thread; yields who handled them
    before. Python drops a KeyboardInterrupt that `by` raises within a destructor or a weak reference's callback, and
    calls sys.unraisablehook instead: then `dropped` is called."""

    def hook(about: sys.UnraisableHookArgs) -> None:
        if about.exc_type is KeyboardInterrupt:
            dropped()
        else:
            told(about)

    before = {number: signal.signal(number, by) for number in (*stopping(), signal.SIGALRM)}
    told, sys.unraisablehook = sys.unraisablehook, hook
    try:
        yield before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = told
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """SIGTERM, a terminal that is closed and the first Ctrl-C end the run after the client in flight; the second Ctrl-C
    ends it at once. A signal that came when nobody looked any more goes to whoever handled it before, but for Python's
    own handler of Ctrl-C."""
    received: list[int] = []

    def request(signum: int, _: object) -> None:
        if signum == signal.SIGALRM or (signum == signal.SIGINT and signal.SIGINT in received):
            again()  # it may be dropped
            raise KeyboardInterrupt  # not Stopped: libraries catch what is an Exception
        received.append(signum)

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    if current_thread() is not main_thread():
        yield lambda: False
        return
    try:
        with _handled(request, again) as before:
            yield lambda: bool(received)
    except Stopped:
        if signal.SIGINT in received:
            raise KeyboardInterrupt from None
        raise
    except KeyboardInterrupt:
        if received and signal.SIGINT not in received:
            raise Stopped(ON_REQUEST) from None
        raise
    for late in received:
        outer = before[signal.Signals(late)]
        if callable(outer) and outer is not signal.default_int_handler:
            outer(late, None)


def _is_on_its_way() -> bool:
    """Whether what the signal has interrupted is the end that a KeyboardInterrupt has brought: a `finally`, say."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


@contextmanager
def stopping_at_once(goes_on: str = "") -> Iterator[None]:
    """SIGTERM and a terminal that is closed end at once what is inside, as Ctrl-C does: raises Stopped, or
    KeyboardInterrupt, which say how it `goes_on`. Further ones do not disturb its end. An interruption that a library
    makes another error of is repeated. Within `stop_on_signals` a run ends as that says."""
    received: list[int] = []

    def stop(signum: int, _: object) -> None:
        if signum != signal.SIGALRM:
            received.append(signum)
        elif _is_on_its_way():
            return
        if signum in (signal.SIGALRM, signal.SIGINT) or len(received) == 1:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)  # pydantic makes a ValueError of it in a serializer
            raise KeyboardInterrupt  # not Stopped: libraries catch what is an Exception

    if current_thread() is not main_thread():
        yield
        return
    try:
        with _handled(stop, lambda: signal.setitimer(signal.ITIMER_REAL, 0.05)):
            yield
    except KeyboardInterrupt:
        if received and signal.SIGINT not in received:
            raise Stopped(f"stopped on request{': ' if goes_on else ''}{goes_on}") from None
        if goes_on:
            raise KeyboardInterrupt(goes_on) from None
        raise
