"""What a pipeline's tasks have in common around their work: how they end, and what they try again.

Kubeflow's launcher makes of every exit code a 1, and shows the log's last lines: so the last line of a task that fails
says what is wrong, of which kind that is, and how to go on. A traceback is for what is a bug.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fl_engine.core.errors import BadInput, EnvironmentFailure, GateFailed, IntegrityError, Stopped, Unreachable, masked
from flexfleet.files.terminal import told_of

log = logging.getLogger("flexfleet")

T = TypeVar("T")

KINDS = {
    BadInput: "wrong parameter",
    Stopped: "stopped",
    IntegrityError: "damaged file",
    GateFailed: "gate",
    EnvironmentFailure: "environment",
}
"""By the exit code's class: the word for it."""
WAITS_S = (10.0, 30.0, 90.0, 270.0)
"""How long a task waits before it tries again what a server did not answer."""
FRESH_S = 600.0
"""A try that went well for so long has all of them before it again."""


@contextmanager
def ending(again: str) -> Iterator[None]:
    """The body of a task. `again` is the pipeline's parameter whose value goes on with what was begun. Ends the process
    with the command line's exit code."""
    try:
        yield
    except Exception as error:
        line, code = told_of(error) or ("", 1)
        if not line:
            print(masked(traceback.format_exc()), end="", file=sys.stderr)
            line = f"{type(error).__name__}: {masked(str(error))}"
        kind = next((word for kind, word in KINDS.items() if code == kind.exit_code), "bug")
        print(f"error, exit code {code} ({kind}): {' '.join(line.split())} {_advice(kind, again)}", file=sys.stderr)
        sys.exit(code)


def _advice(kind: str, again: str) -> str:
    if kind == KINDS[BadInput]:
        return "Nothing more is tried: mend it, and start another run."
    if kind == KINDS[GateFailed]:
        return "The report is with the task before."
    return f"To go on where it ended: Retry of this run in Kubeflow's UI, or another run with the same {again}."


def patiently(call: Callable[[], T]) -> T:
    """Calls again, a few times and each time later, while a server does not answer. What it calls goes on with what it
    finds. Raises what the last try does."""
    tries = 0
    while True:
        began = time.monotonic()
        try:
            return call()
        except Unreachable as error:
            tries = 0 if time.monotonic() - began > FRESH_S else tries
            if tries == len(WAITS_S):
                raise
            log.warning("%s; trying again in %.0f s (%d of %d)", error, WAITS_S[tries], tries + 1, len(WAITS_S))
            time.sleep(WAITS_S[tries])
            tries += 1
