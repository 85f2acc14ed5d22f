"""How a pipeline's tasks end, and what they try again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from components.train_tasks import partition
from fl_engine.core import errors
from fl_engine.core.errors import (
    ConfigError,
    Diverged,
    EnvironmentFailure,
    GateFailed,
    IntegrityError,
    InUse,
    NothingMerged,
    Stopped,
    Unreachable,
)
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore
from flexfleet.config import form, load_config
from flexfleet.files.artifacts import History, RunFile
from flexfleet.kubeflow import task_end
from flexfleet.kubeflow.task_end import ending, patiently
from flexfleet.pipeline import resume
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.retry import federate_in
from flexfleet.pipeline.run import run

RETRY = "choose Retry of this run in Kubeflow's UI, or start another run with the same run_id."
CORRECT = "A retry does not help. Correct the form, and start another run."


@pytest.mark.parametrize(
    ("error", "code", "kind", "advice"),
    [
        (ConfigError("seed is\nwrong"), 2, "wrong parameter", CORRECT),
        (Stopped("stopped"), 3, "stopped", RETRY),
        (IntegrityError("x is damaged"), 4, "damaged file", RETRY),
        (GateFailed("full is worse"), 5, "gate", "The task before this one has the report."),
        (Unreachable("s3 is gone"), 6, "environment", RETRY),
        (InUse("is being run by process 1"), 6, "environment", RETRY),
        (ModuleNotFoundError(name="optuna"), 6, "environment", RETRY),
        (Diverged("no update"), 7, "diverged or nothing merged", CORRECT),
        (NothingMerged("no update"), 7, "diverged or nothing merged", CORRECT),
        (KeyError("x"), 1, "bug", "Report it with the traceback above."),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_error_ends_with_code_kind_cause_and_advice(
    error: Exception, code: int, kind: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, ending("run_id"):
        raise error
    assert ended.value.code == code
    *before, cause, last = capsys.readouterr().err.splitlines()
    assert cause.startswith(f"error, exit code {code} ({kind}): ") and last.startswith("  ") and last.endswith(advice)
    assert bool(before) == (kind == "bug"), "only a bug has a traceback"


def test_no_line_says_a_password(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), ending("run_id"):
        raise KeyError("https://me:pl4nted@host/x")
    assert "pl4nted" not in capsys.readouterr().err


def test_the_first_task_refuses_what_the_rounds_would_refuse(
    quick: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(None, [*quick, "rounds.stop=3"])
    given, advanced = form.parameters_of(config)
    fields = {name: given[name] for name in form.PARAMETERS} | {"store_uri": f"{tmp_path}/ledgers", "run_id": "a"}
    outputs = {
        name: Mock(path=f"{tmp_path}/{name}", metadata={}) for name in ("config", "parts", "dvc_pointer", "links")
    }

    def begin(**other: Any) -> dict[str, str]:
        names: dict[str, str] = partition.python_func(job_id="1", advanced=advanced, **{**fields, **other}, **outputs)
        return names

    assert begin()["run"] == "a", "there is none yet"
    began = load_config(outputs["config"].path)
    record = RunFile(run_id="a", config=began.model_dump(mode="json"), numerics={}, pool_sha256="", partition_sha256="")
    store = FolderStore(form.run_folder(began, "a"))
    store.put("run.json", record.model_dump_json().encode())
    for round in (0, 1):
        Checkpoints(store).commit(round, {}, {}, [Row(round=round, metrics={"avg": 1.0}, clients=())])
    assert begin(rounds=2)["run"] == begin(rounds=4)["run"] == "a"
    shutil.rmtree(outputs["parts"].path)
    for other, said in (
        ({"seed": 7}, "was started with another configuration (seed: 0 -> 7): choose another run_id"),
        ({"rounds": 1}, "rounds.stop = 1, but 2 rounds are committed: a run cannot go back"),
    ):
        with pytest.raises(SystemExit, match="2"):
            begin(**other)
        assert said in " ".join(capsys.readouterr().err.split())
    assert not Path(outputs["parts"].path).exists()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(task_end, "time", made)
    return made


def failing(clock: Clock, *outcomes: tuple[float, Exception | None]) -> Callable[[], str]:
    """Takes so many seconds each time, and ends so."""
    left = list(outcomes)

    def call() -> str:
        seconds, error = left.pop(0)
        clock.now += seconds
        if error is not None:
            raise error
        return "done"

    return call


def test_retries_are_limited_and_renewed_by_a_long_success(clock: Clock) -> None:
    gone, tries = (1.0, Unreachable("gone")), len(task_end.WAITS_S)
    with pytest.raises(Unreachable):
        patiently(failing(clock, *[gone] * (tries + 1)))
    assert clock.slept == list(task_end.WAITS_S)
    long = (task_end.FRESH_S + 1, Unreachable("gone"))
    assert patiently(failing(clock, *[gone] * tries, long, *[gone] * (tries - 1), (1, None))) == "done"


@pytest.mark.parametrize("error", [ConfigError("x"), GateFailed("x"), EnvironmentFailure("x"), errors.Refused("x")])
def test_what_another_try_does_not_mend_is_not_tried_again(clock: Clock, error: Exception) -> None:
    with pytest.raises(type(error)):
        patiently(failing(clock, (1, error)))
    assert clock.slept == []


class Outage(FolderStore):
    """A server that is gone from its ninth value on, until somebody has waited for it."""

    asked = 0
    clock: Clock

    def put(self, key: str, value: bytes) -> None:
        type(self).asked += 1
        if self.asked > 8 and len(self.clock.slept) < 2:
            raise Unreachable(f"{key} cannot be reached")
        super().put(key, value)


def test_rounds_continue_when_their_store_is_back(
    quick: Sequence[str], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, no_drawings: None
) -> None:
    sets = [*quick, f"run.store={tmp_path}/runs", "tracking.mlflow=null", "rounds.stop=4", "rounds.commit_every=1"]
    whole = run(Resolved.load(None, sets), "whole")
    resolved = Resolved.load(None, [*sets, f"run.remote=file://{tmp_path}/there"])
    monkeypatch.setattr(Outage, "clock", clock, raising=False)
    monkeypatch.setattr(resume, "open_store", lambda uri, **_: Outage(tmp_path / "there"))
    steps = [tmp_path / "runs" / "whole" / name for name in ("partition", "pool")]
    out = patiently(lambda: federate_in(tmp_path / "pod" / "a", resolved, *steps, tmp_path / "out"))
    assert clock.slept == list(task_end.WAITS_S[:2]), "gone for two tries"
    assert History.read(out / "history.json").model_sha256 == whole.model_sha256
