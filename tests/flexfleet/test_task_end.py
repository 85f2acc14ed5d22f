"""How a pipeline's tasks end, and what they retry."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from fl_engine.core import errors
from fl_engine.core.errors import ConfigError, EnvironmentFailure, GateFailed, NothingMerged, Unreachable
from fl_engine.storage.store import FolderStore
from flexfleet.files.artifacts import History
from flexfleet.kubeflow.task_end import ending, patiently
from flexfleet.pipeline import resume
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.retry import federate_in
from flexfleet.pipeline.run import run

RETRY = "choose Retry of this run in Kubeflow's UI, or start another run with the same run_id."
CORRECT = "A retry does not help. Correct the form, and start another run."


@pytest.mark.parametrize(
    ("error", "code", "advice"),
    [
        (ConfigError("seed is\nwrong"), 2, CORRECT),
        (GateFailed("full is worse"), 5, "The task before this one has the report."),
        (Unreachable("s3 is gone"), 6, RETRY),
        (ModuleNotFoundError(name="optuna"), 6, RETRY),
        (NothingMerged("no update"), 7, CORRECT),
        (KeyError("x"), 1, "Report it with the traceback in the log."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_ends_with_exit_code_and_advice(
    error: Exception, code: int, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, ending("run_id"):
        raise error
    assert ended.value.code == code
    *before, cause, last = capsys.readouterr().err.splitlines()
    assert cause.startswith(f"error, exit code {code} (") and last.startswith("  ") and last.endswith(advice)
    assert bool(before) == isinstance(error, KeyError), "only a bug has a traceback"


def test_traceback_has_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), ending("run_id"):
        raise KeyError("https://me:pl4nted@host/x")
    assert "pl4nted" not in capsys.readouterr().err


class Failing:
    """A call that raises these errors one after the other, or Unreachable after these seconds."""

    def __init__(self, *outcomes: Exception | float) -> None:
        self.left = list(outcomes)

    def __call__(self) -> str:
        if not self.left:
            return "done"
        outcome = self.left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        time.sleep(outcome)
        raise Unreachable("gone")


def test_retries_are_limited_and_renewed_by_a_long_success() -> None:
    gone, waits_s = Unreachable("gone"), (0.0, 0.0, 0.0)
    call = Failing(*[gone] * 5)
    with pytest.raises(Unreachable):
        patiently(call, waits_s)
    assert len(call.left) == 1, "four tries"
    assert patiently(Failing(gone, gone, gone, 0.3, gone, gone), waits_s, fresh_s=0.2) == "done"


@pytest.mark.parametrize("error", [ConfigError("x"), GateFailed("x"), EnvironmentFailure("x"), errors.Refused("x")])
def test_error_that_a_retry_cannot_cure_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        patiently(Failing(error), waits_s=(0.0,))


class Outage(FolderStore):
    """A store that does not respond from its ninth write on, until two retries have opened it again."""

    opened = written = 0

    def put(self, key: str, value: bytes) -> None:
        type(self).written += 1
        if self.written > 8 and self.opened < 3:
            raise Unreachable(f"{key} cannot be reached")
        super().put(key, value)


def test_rounds_continue_after_an_outage_of_the_store(
    quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> None:
    def open_outage(*_: object, **__: object) -> Outage:
        Outage.opened += 1
        return Outage(tmp_path / "there")

    sets = [*quick, f"run.store={tmp_path}/runs", "tracking.mlflow=null", "rounds.stop=4", "rounds.commit_every=1"]
    whole = run(Resolved.load(None, sets), "whole")
    resolved = Resolved.load(None, [*sets, f"run.remote=file://{tmp_path}/there"])
    monkeypatch.setattr(resume, "open_store", open_outage)
    steps = [tmp_path / "runs" / "whole" / name for name in ("partition", "pool")]
    out = patiently(lambda: federate_in(tmp_path / "pod" / "a", resolved, *steps, tmp_path / "out"), (0.0,) * 4)
    assert Outage.opened == 3, "gone for two tries"
    assert History.read(out / "history.json").model_sha256 == whole.model_sha256
