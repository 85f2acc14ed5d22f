"""Handle errors and retries of pipeline tasks, and return metadata of the runs that tasks execute.

Kubeflow's launcher converts every exit code to 1, and shows the last log lines. Therefore, the log of a failed task
ends with the cause, the exit code, the form fields, and advice on how to continue. Tracebacks are logged only for bugs.
"""

from __future__ import annotations

import logging
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fl_engine.core.errors import BadInput, Diverged, FlexfleetError, GateFailed, InUse, Unreachable, masked
from flexfleet.config.dotted import FIELDS
from flexfleet.files.artifacts import EvaluationFile, History, RunFile, RunResult
from flexfleet.files.terminal import expected, set_log_format

log = logging.getLogger("flexfleet")

T = TypeVar("T")

WAITS_S, FRESH_S = (10.0, 30.0, 90.0, 270.0), 600.0
ADVICE = {
    1: "This is a bug in flexfleet or in your own class. Report it with the traceback in the log.",
    BadInput.exit_code: "A retry does not help. Correct the form, and start another run.",
    Diverged.exit_code: "A retry does not help. Correct the form, and start another run.",
    GateFailed.exit_code: "The task before this one has the report.",
}
"""Map exit codes to advice for the user. After any other exit code, the run can be continued."""


@contextmanager
def ending(again: str, form: Mapping[str, Any] = MappingProxyType({})) -> Iterator[None]:
    """Run the body of a task. If the body fails, print the error and exit with the exit code of the command line.

    Args:
        again: Form field with the name of the run. A pipeline run with the same value continues this run.
        form: Parameters of the task: the values of the form, or at least `job_id`.
    """
    try:
        set_log_format(logging.getLogger().handlers)
        yield
    except Exception as error:
        known = expected(error)
        if known is None:
            print(masked(traceback.format_exc()), end="", file=sys.stderr)
            known = FlexfleetError(f"{type(error).__name__}: {masked(str(error))}")
        about = known.as_json()
        errors = [each["message"] for each in about.get("errors", [about])]
        first, *more = (" ".join(re.sub("--(run-)?id", again, error).split()) for error in errors)
        lines = [f"error, exit code {known.exit_code} ({known.code}): {first}", *(f"  also: {cause}" for cause in more)]
        causes = " ".join([first, *more])
        named = [
            f"{path} is {name}" for path, name in FIELDS.items() if name in form and path != name and path in causes
        ]
        if named:
            lines.append(f"  in the form: {', '.join(named)}")
        retry = f"To continue, choose Retry of this run in Kubeflow's UI, or start another run with the same {again}."
        lines.append(f"  {ADVICE.get(known.exit_code, retry)}")
        if not isinstance(known, GateFailed):  # `decide` has already sent the verdict to the webhook
            from flexfleet.experiments import webhook

            # Only nightly regression runs have a webhook. Without this call, no task would report a verdict.
            what = "A task of the nightly regression run failed. There is no verdict unless a retry succeeds."
            cause = " ".join(" ".join(lines).split())
            webhook.call(f"{what} Pipeline run {form.get('job_id', 'unknown')}: {cause}")
        print("\n".join(lines), file=sys.stderr, flush=True)
        sys.exit(known.exit_code)


def patiently(call: Callable[[], T], waits_s: Sequence[float] = WAITS_S, fresh_s: float = FRESH_S) -> T:
    """Retry `call` with increasing delays as long as a server does not respond, or another coordinator executes the
    run. If the other coordinator is on a disconnected node, it ends after a short time, and this task can continue the
    run. Each call must resume the work of the previous call. If all retries fail, the last error is raised.

    Args:
        waits_s: Seconds before each retry.
        fresh_s: The retry counter is reset if a call runs for more than this many seconds before it fails.
    """
    retries = 0
    while True:
        began = time.monotonic()
        try:
            return call()
        except (Unreachable, InUse) as error:
            retries = 0 if time.monotonic() - began > fresh_s else retries
            if retries == len(waits_s):
                raise
            log.warning("%s; retrying in %.0f s (%d of %d)", error, waits_s[retries], retries + 1, len(waits_s))
            time.sleep(waits_s[retries])
            retries += 1


def metadata_of_finished(folder: Path) -> dict[str, Any]:
    """Return metadata of a run in a comparison or nightly regression run. The metadata must be small, because the last
    task receives the metadata of up to `form.MOST_RUNS` runs in one argument."""
    result = RunResult.read(folder / "result.json")
    facts = {"run_id": result.run_id, "model_sha256": result.model_sha256}
    return facts | {name: result.metrics[name] for name in ("avg", "full")}


def metadata_of(folder: Path, evaluation: Path | None = None) -> dict[str, Any]:
    """Return metadata of a run. If `evaluation` is not None, the metrics from this folder are included."""
    run, history = RunFile.read(folder / "run.json"), History.read(folder / "history.json")
    facts: dict[str, Any] = {
        "run_id": run.run_id, "algorithm": run.config["algorithm"]["name"], "dataset": run.config["dataset"]["name"],
        "network": run.config["model"]["name"], "seed": run.config["seed"], "rounds": len(history.rounds),
        "model_sha256": history.model_sha256, "partition_sha256": run.partition_sha256, "pool_sha256": run.pool_sha256,
    }  # fmt: skip
    if evaluation is not None:
        scores = EvaluationFile.read(evaluation / "evaluation.json")
        facts |= {"avg": scores.avg, "full": scores.full}
        for name, score in scores.levels.items():
            facts |= {f"{metric}/{name}": value for metric, value in score.metrics.items()}
    return facts
