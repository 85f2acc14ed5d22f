"""A line of the terminal that is updated during long work, or a line a minute in a log; and repeated warnings, which
are counted."""

from __future__ import annotations

import logging
import math
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

log = logging.getLogger("flexfleet")

hidden: ContextVar[bool] = ContextVar("hidden", default=False)
"""Whether the terminal is treated like any other stream."""

TERMINAL_S = 0.5
LOG_S = 60.0
CLEAR = "\r\x1b[2K"


class Live:
    """One line on stderr, updated at most two times a second, above which other lines are logged. If stderr is not a
    terminal, or `hidden` is set, it is a line of the log at most once a minute. With `-q` it shows nothing."""

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
        """Show the text in place of the one before, if it is time."""
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
    """Call `tell` in a thread with the seconds so far, after `first_s` seconds and then every `again_s` seconds."""
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
    """Yield the list of the warnings that are logged inside."""
    kept, root = _Kept(), logging.getLogger()
    root.addHandler(kept)
    try:
        yield kept.texts
    finally:
        root.removeHandler(kept)


@contextmanager
def counted_warnings() -> Iterator[None]:
    """Count a warning that differs from an earlier one only in its numbers instead of logging it, and log the counts at
    the end. With `-v` all are logged."""
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
            log.warning("%d more like this, with other numbers (-v shows each): %s", count, first[kind])
