"""Show progress in the last line of the terminal or as one log line per minute, and count repeated warnings."""

from __future__ import annotations

import logging
import math
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from logging.handlers import BufferingHandler

log = logging.getLogger("flexfleet")

hidden: ContextVar[bool] = ContextVar("hidden", default=False)
"""True if progress must be logged even if stderr is a terminal."""

TERMINAL_S = 0.5
LOG_S = 60.0
CLEAR = "\r\x1b[2K"


class Live:
    """A progress line at the end of stderr, which is updated at most twice a second. If stderr is not a terminal or
    `hidden` is set, the line is logged at most once a minute."""

    def __init__(self) -> None:
        self.terminal = sys.stderr.isatty() and not hidden.get()
        self._last = -math.inf if self.terminal else time.monotonic()
        self._shown = False
        self._handlers: list[logging.Handler] = []

    def due(self) -> bool:
        """Return whether enough time has passed since the last update."""
        return time.monotonic() - self._last >= (TERMINAL_S if self.terminal else LOG_S)

    def show(self, text: str) -> None:
        """Show `text` in the line if an update is due."""
        if not self.due() or not log.isEnabledFor(logging.INFO):
            return
        self._last = time.monotonic()
        if not self.terminal:
            log.info("%s", text)
            return
        if not self._handlers:
            here = [*log.handlers, *logging.getLogger().handlers]  # the next line excludes handlers that write to files
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
        """Clear the line before a handler logs another line."""
        self.clear()
        return True


def _write(text: str) -> None:
    with suppress(OSError):  # the terminal was closed
        sys.stderr.write(text)
        sys.stderr.flush()


def span(seconds: float) -> str:
    """Format a duration, for example as `7 s`, `12 min` or `3 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


@contextmanager
def called_while_waiting(report: Callable[[float], None], first_s: float, again_s: float = LOG_S) -> Iterator[None]:
    """Call `report(elapsed seconds)` in a thread: once after `first_s`, then every `again_s` until the context ends."""
    done = threading.Event()

    def repeat() -> None:
        began, pause = time.monotonic(), first_s
        while not done.wait(pause):
            report(time.monotonic() - began)
            pause = again_s

    threading.Thread(target=repeat, daemon=True).start()
    try:
        yield
    finally:
        done.set()


@contextmanager
def recorded_warnings() -> Iterator[list[logging.LogRecord]]:
    """Yield a list that collects the warnings logged inside the context."""
    handler, root = BufferingHandler(capacity=10**6), logging.getLogger()
    handler.setLevel(logging.WARNING)
    root.addHandler(handler)
    try:
        yield handler.buffer
    finally:
        root.removeHandler(handler)


@contextmanager
def counted_warnings() -> Iterator[None]:
    """Log only the first of several warnings that differ only in numbers, and log the counts at the end. With `-v`, all
    warnings are logged."""
    first: dict[str, str] = {}
    counts = Counter[str]()

    def is_new(record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or log.isEnabledFor(logging.DEBUG):
            return True
        text = record.getMessage()
        kind = re.sub(r"\d+([.,]\d+)*", "0", text)
        counts[kind] += 1
        return first.setdefault(kind, text) is text

    log.addFilter(is_new)
    try:
        yield
    finally:
        log.removeFilter(is_new)
        for kind, text in first.items():
            if counts[kind] > 1:
                log.warning("%d more warnings differ only in numbers (-v shows all): %s", counts[kind] - 1, text)
