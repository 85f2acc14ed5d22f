"""How the tasks of a pipeline end, and what they retry.

Kubeflow's launcher turns every exit code into 1, and shows the log's last lines. So the last lines of a failed task
name the cause with the exit code, the fields of the form, and how to continue. Only a bug has a traceback.
"""

from __future__ import annotations

import logging
import re
import sys
import textwrap
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
    SeveralErrors,
    Stopped,
    Unreachable,
    masked,
)
from flexfleet.config.form_fields import REMOTE, SHORT, STUDY
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
BUG = "bug"
"""The word for every other error."""
WIDTH = 100
"""Characters of the longest line of an error. Kubeflow shows the lines in a box that does not wrap."""
WAITS_S = (10.0, 30.0, 90.0, 270.0)
"""Seconds that a task waits before each new try, if a server did not answer or another coordinator has the run."""
FRESH_S = 600.0
"""Seconds of work after which a failing call has all its tries again."""

RUN = {path: name for name, path in SHORT.items()} | REMOTE
NIGHT = {path: name for path, name in RUN.items() if name in ("mlflow_uri", "store_uri")}
SEVERAL = {path: name for path, name in RUN.items() if path != "seed"}
FORMS: Mapping[str, Mapping[str, str]] = {
    "run_id": RUN,
    "comparison_id": SEVERAL | {"algorithm.name": "algorithms"},
    "study_id": SEVERAL | {path: name for name, path in STUDY.items()},
    "night_id": NIGHT,
}
"""For each pipeline, by the field that names what it began: the form's fields by the dotted names that they set."""


@contextmanager
def ending(again: str, form: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Run the body of a task. On an error, print it and end the process with the exit code of the command line.

    Args:
        again: The field of the pipeline's form whose value resumes what was begun: a key of FORMS.
        form: The task's parameters, if it has the form's `advanced` or a `job_id`.
    """
    try:
        yield
    except Exception as error:
        line, code = told_of(error) or ("", 1)
        if not line:
            print(masked(traceback.format_exc()), end="", file=sys.stderr)
            line = f"{type(error).__name__}: {masked(str(error))}"
        kind = next((word for kind, word in KINDS.items() if code == kind.exit_code), BUG)
        causes = (
            [(told_of(each) or (line,))[0] for each in error.errors] if isinstance(error, SeveralErrors) else [line]
        )
        fields = FORMS[again]
        first, *more = (" ".join(re.sub("--(run-)?id", again, cause).split()) for cause in causes)
        head = f"error, exit code {code} ({kind}): {first}"
        lines = [head, *(f"  also: {cause}" for cause in more), *_named(" ".join([first, *more]), fields)]
        lines += [f"  {_advice(kind, again)}"]
        if kind != KINDS[GateFailed]:  # `decide` has called the webhook for the verdict
            _call_webhook(" ".join(" ".join(lines).split()), form)
        print("\n".join(wrapped for each in lines for wrapped in _wrapped(each)), file=sys.stderr, flush=True)
        sys.exit(code)


def _call_webhook(error: str, form: Mapping[str, Any]) -> None:
    """Report the error to the webhook, whose address only tasks of a nightly regression run have: no task after this
    one could judge the run. A task that is killed, or never starts, reports nothing."""
    from flexfleet.experiments import webhook

    webhook.call(
        "A task of the nightly regression run failed. There is no verdict unless a retry succeeds. Pipeline run "
        f"{form.get('job_id', 'unknown')}: {error}"
    )


def _wrapped(line: str) -> list[str]:
    """Break a line into lines of at most WIDTH characters. All but the first begin with two spaces."""
    start = "  " if line.startswith("  ") else ""
    return textwrap.wrap(
        line.strip(), WIDTH, initial_indent=start, subsequent_indent=f"{start}  ", break_on_hyphens=False
    )


def _named(causes: str, fields: Mapping[str, str]) -> list[str]:
    """Return the line that maps the parameters in the errors to the form's fields; empty without such fields."""
    named = [
        f"{path} is {field}"
        for path, field in fields.items()
        if path != field and re.search(rf"(?<![\w.-]){re.escape(path)}(?![\w-]|\.\w)", causes)
    ]
    return [f"  in the form: {', '.join(named)}"] if named else []


def _advice(kind: str, again: str) -> str:
    if kind in (KINDS[BadInput], KINDS[Diverged]):
        return "A retry does not help. Correct the form, and start another run."
    if kind == KINDS[GateFailed]:
        return "The task before this one has the report."
    if kind == BUG:
        return "This is a bug in flexfleet or in your own class. Report it with the traceback above."
    return f"To continue, choose Retry of this run in Kubeflow's UI, or start another run with the same {again}."


def patiently(call: Callable[[], T]) -> T:
    """Call again, a few times and each time later, while a server does not answer, or while another coordinator has
    the run. A coordinator whose node is cut off ends soon, and nobody else would continue its run. `call` has to resume
    what an earlier try began. Raises what the last try raises."""
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
