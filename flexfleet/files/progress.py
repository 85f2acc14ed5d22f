"""What is going on now: a last line of the terminal that is written again and again, or a line a minute in a log. And
warnings that come again and again, which are counted."""

from __future__ import annotations

import logging
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

log = logging.getLogger("flexfleet")

hidden: ContextVar[bool] = ContextVar("hidden", default=False)
"""Whether no line of the terminal may be written again and again."""

TERMINAL_S = 0.5
LOG_S = 60.0
CLEAR = "\r\x1b[2K"


class Live:
    """One line on stderr, at most two times a second; every other line goes above it. Where stderr is no terminal it is
    a line of the log, at most one a minute, so that long work is not silent. With `-q` it shows nothing. If `hidden` is
    set, the terminal is treated as any other stream."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.terminal = sys.stderr.isatty() and not hidden.get()
        self._clock = clock
        self._last = -math.inf if self.terminal else clock()
        self._shown = False
        self._handlers: list[logging.Handler] = []

    def due(self) -> bool:
        """Whether it is time for a line."""
        return self._clock() - self._last >= (TERMINAL_S if self.terminal else LOG_S)

    def show(self, text: str) -> None:
        """Shows the text in place of the one before, if it is time."""
        if not self.due() or not log.isEnabledFor(logging.INFO):
            return
        self._last = self._clock()
        if not self.terminal:
            log.info("%s", text)
            return
        if not self._handlers:
            here = [*log.handlers, *logging.getLogger().handlers]  # those of files are no lines of the terminal
            self._handlers = [each for each in here if getattr(each, "stream", sys.stderr) is sys.stderr]
            for handler in self._handlers:
                handler.addFilter(self._before)
        width = shutil.get_terminal_size((80, 24)).columns - 1
        _write(CLEAR + (text if len(text) <= width else f"{text[: max(0, width - 3)]}..."[:width]))
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            _write(CLEAR)
            self._shown = False

    def close(self) -> None:
        self.clear()
        for handler in self._handlers:
            handler.removeFilter(self._before)
        self._handlers = []

    def _before(self, record: logging.LogRecord) -> bool:
        """Called before a line of the log is written."""
        self.clear()
        return True


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal has been closed: the run is to end as one that is stopped
        sys.stderr.write(text)
        sys.stderr.flush()


def span(seconds: float) -> str:
    """`7 s`, `12 min`, `3 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


@contextmanager
def told_while(tell: Callable[[float], None], first_s: float, again_s: float = LOG_S) -> Iterator[None]:
    """For work that is silent: inside, `tell` is called in a thread, after the seconds `first_s` and then after each
    `again_s`, with the seconds so far."""
    done = threading.Event()

    def repeat() -> None:
        began, pause = time.monotonic(), first_s
        while not done.wait(pause):
            tell(time.monotonic() - began)
            pause = again_s

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def kept_warnings() -> Iterator[list[str]]:
    """Yields the warnings that are logged inside, which are told as ever."""
    kept, root = _Kept(), logging.getLogger()
    root.addHandler(kept)
    try:
        yield kept.texts
    finally:
        root.removeHandler(kept)


@contextmanager
def told_before(texts: Iterable[str]) -> Iterator[None]:
    """Inside, each of these warnings is left out once: it was told before."""
    left = set(texts)

    def tell(record: logging.LogRecord) -> bool:
        known = record.levelno == logging.WARNING and record.getMessage() in left
        left.discard(record.getMessage())
        return not known

    log.addFilter(tell)
    try:
        yield
    finally:
        log.removeFilter(tell)


@contextmanager
def counted_warnings() -> Iterator[None]:
    """Inside, a warning that differs from an earlier one only in its numbers is counted instead of told; the end tells
    how many there were. With `-v` all are told."""
    first: dict[str, str] = {}
    more: dict[str, int] = {}

    def tell(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or log.isEnabledFor(logging.DEBUG):
            return True
        text = record.getMessage()
        kind = re.sub(r"\d+([.,]\d+)*", "0", text)
        if kind not in first:
            first[kind] = text
            return True
        more[kind] = more.get(kind, 0) + 1
        return False

    log.addFilter(tell)
    try:
        yield
    finally:
        log.removeFilter(tell)
        for kind, count in more.items():
            how = "-v, or logging at DEBUG, tells each"
            log.warning("%d more like this, with other numbers (%s): %s", count, how, first[kind])
