"""Record why a client failed: the end of its log, the traceback, the peak memory and the time.

Clients and servers read these texts, so they contain no control characters, no values of environment variables and no
folders of the client's machine.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fl_engine.core.errors import ClientError
from fl_engine.core.system import resident_peak
from fl_engine.core.types import FAILURE_LINES, Assignment, ClientFailure, Code, FailureDetails, Stage

PATH = re.compile(r"(?:/[^\s/:'\",()]+)+/(?=[^\s/])")
SHORTEST = 8
"""Minimum length of the values of environment variables that are replaced; shorter values are common words."""


def _shareable(text: str) -> str:
    """Return the text without folders, and with the names of environment variables instead of their values."""
    values = {value: name for name, value in os.environ.items() if len(value) >= SHORTEST}
    text = PATH.sub("", text)
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, f"${values[value]}")
    return text


def _current_traceback() -> tuple[str, ...]:
    """Return the traceback of the exception that is being handled, with its innermost cause; empty if there is none."""
    error = sys.exc_info()[1]
    if error is None:
        return ()
    while error.__cause__ is not None:
        error = error.__cause__
    calls = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
    return tuple(map(_shareable, [*calls[1 - FAILURE_LINES :], f"{type(error).__name__}: {error}"]))


class _Log(logging.Handler):
    """Keeps the last lines that this thread logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = deque[str](maxlen=FAILURE_LINES)
        self.thread, self.started = threading.get_ident(), time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            self.lines.append(_shareable(f"{record.levelname.lower()}: {record.getMessage()}"))


_current: ContextVar[_Log] = ContextVar("log")


@contextmanager
def watched() -> Iterator[None]:
    """Keep the end of the log and the start time for `failed`, which the body or the decorated function calls."""
    log = _Log()
    token = _current.set(log)
    logging.getLogger().addHandler(log)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(log)
        _current.reset(token)


def failed(assignment: Assignment, stage: Stage, reason: str, code: Code | None = None) -> ClientFailure:
    """Return a failure, with details if the work is `watched`. The traceback is that of the handled exception. A
    ClientError, such as too little memory, explains itself and needs no details."""
    log, details = _current.get(None), None
    if log is not None and not isinstance(sys.exc_info()[1], ClientError):
        seconds = time.monotonic() - log.started
        details = FailureDetails(tuple(log.lines), _current_traceback(), resident_peak() / 1e6, seconds)
    return ClientFailure(assignment.round, assignment.client, stage, _shareable(reason), code, details=details)
