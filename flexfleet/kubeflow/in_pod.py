"""What all tasks of a pipeline do around their work: how they end, and what they try again.

Kubeflow's launcher turns every exit code into 1, and shows the log's last lines: so the last line of a failed task says
what is wrong, what sort of error it is, and how to continue. Only a bug has a traceback.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from fl_engine.core.errors import (
    BadInput,
    Diverged,
    EnvironmentFailure,
    GateFailed,
    IntegrityError,
    InUse,
    Stopped,
    Unreachable,
    masked,
)
from flexfleet.files.terminal import told_of

log = logging.getLogger("flexfleet")

T = TypeVar("T")

KINDS = {
    BadInput: "wrong parameter",
    Stopped: "stopped",
    IntegrityError: "damaged file",
    GateFailed: "gate",
    EnvironmentFailure: "environment",
    Diverged: "diverged or nothing merged",
}
"""The word for each class of errors."""
OPTION = re.compile(r"--(run-)?id\b(?! \(in the pipeline)")
"""The command line's word for the parameter that names what was begun; not where the error names the parameter too."""
WAITS_S = (10.0, 30.0, 90.0, 270.0)
"""Seconds that a task waits before each new try, if a server did not answer or another coordinator has the run."""
FRESH_S = 600.0
"""Seconds of work after which a failing call has all its tries again."""


@contextmanager
def ending(again: str, form: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Runs the body of a task, and ends the process with the command line's exit code on an error. `again`: the
    pipeline's parameter whose value resumes what was begun. `form`: the task's parameters; where an error names a
    parameter that a field of the form sets, which is among them, the field is said too."""
    try:
        yield
    except Exception as error:
        line, code = told_of(error) or ("", 1)
        if not line:
            print(masked(traceback.format_exc()), end="", file=sys.stderr)
            line = f"{type(error).__name__}: {masked(str(error))}"
        line = OPTION.sub(again, line)
        kind = next((word for kind, word in KINDS.items() if code == kind.exit_code), "bug")
        words = (f"error, exit code {code} ({kind}):", *line.split(), *_fields(line, form), _advice(kind, again))
        print(told := " ".join(words), file=sys.stderr)
        if kind != KINDS[GateFailed]:  # a verdict, of which `decide` has told
            _tell(told, form)
        sys.exit(code)


def _tell(error: str, form: Mapping[str, Any]) -> None:
    """Calls the webhook, whose address only tasks of a night have: nothing comes after this task that could judge it.
    A task that is killed, or never starts, tells nobody."""
    from flexfleet.nightly import webhook

    webhook.call(
        "A task of a night failed, which has no verdict unless a further try succeeds. Pipeline run "
        f"{form.get('job_id', 'unknown')}: {error}"
    )


def _fields(line: str, form: Mapping[str, Any]) -> list[str]:
    """Says which fields of the form set the parameters that an error names."""
    if not form:
        return []
    from flexfleet.config.overrides import fields_of

    named = [
        f"{path} is {field}"
        for path, field in fields_of(form).items()
        if re.search(rf"(?<![\w.-]){re.escape(path)}(?![\w-]|\.\w)", line)
    ]
    return [f"(In the form: {', '.join(named)}.)"] if named else []


def _advice(kind: str, again: str) -> str:
    if kind in (KINDS[BadInput], KINDS[Diverged]):
        return "Nothing more is tried: mend it, and start another run."
    if kind == KINDS[GateFailed]:
        return "The report is with the task before."
    return f"To go on where it ended: Retry of this run in Kubeflow's UI, or another run with the same {again}."


def patiently(call: Callable[[], T]) -> T:
    """Calls again, a few times and each time later, while a server does not answer, or while another coordinator has
    the run: where that one's node is cut off, it ends soon, and nobody else would go on. `call` has to resume what an
    earlier try began. Raises what the last try raises."""
    tries = 0
    while True:
        began = time.monotonic()
        try:
            return call()
        except (Unreachable, InUse) as error:
            tries = 0 if time.monotonic() - began > FRESH_S else tries
            if tries == len(WAITS_S):
                raise
            log.warning("%s; trying again in %.0f s (%d of %d)", error, WAITS_S[tries], tries + 1, len(WAITS_S))
            time.sleep(WAITS_S[tries])
            tries += 1
