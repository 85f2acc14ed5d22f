"""Comparisons whose runs need no processes of their own, and a finished one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexfleet.cli import main as cli
from flexfleet.experiments import compare as compare_module
from flexfleet.experiments.comparison_file import LabelScore, Spread, Summary
from flexfleet.experiments.executor import BEGINS, Command
from flexfleet.files import terminal
from flexfleet.pipeline import __main__ as steps
from tests.harness.pictures import skip_pages

NOTHING = Spread(mean=0.0, std=None)
SCORE = LabelScore(round=NOTHING, avg=NOTHING, full=NOTHING)
LABELS, SEEDS = ("flexfl", "all_large"), (0, 1)
TWO = ("--algorithms", ",".join(LABELS), "--seeds", "0,1")
MAINS = {"flexfleet.cli.main": cli.dispatch, "flexfleet.pipeline": steps.main}


def in_this_process(jobs: Sequence[Command], at_once: int) -> dict[str, int]:
    """What `side_by_side` does, without the seconds that a process takes to import torch."""
    codes: dict[str, int] = {}
    for job in jobs:
        with open(job.log, "a") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            print(f"{BEGINS}{job.module} {' '.join(job.argv)}")
            with pytest.raises(SystemExit) as end:
                terminal.run_main(lambda _, job=job: MAINS[job.module](list(job.argv)))
        codes[job.name] = int(end.value.code or 0)
    return codes


def _quickly(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compare_module, "side_by_side", in_this_process)
    skip_pages(patch)
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture
def quick_comparisons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of their own; runs need no processes and draw nothing."""
    monkeypatch.chdir(tmp_path)
    _quickly(monkeypatch)


def summary(algorithm: str, **found: Any) -> Summary:
    """A label of one level, without runs. All figures but those of `found` are 0."""
    zero = dict.fromkeys(("mb_down", "mb_up", "waste", "seconds"), NOTHING)
    empty: dict[str, Any] = {"seconds_simulated": None, "reached": (), "reached_avg": (), "runs": (), "settings": {}}
    scores = {"last": SCORE, "best": SCORE}
    return Summary(algorithm=algorithm, levels=(100.0,), **{**scores, **zero, **empty, **found})


@dataclass(frozen=True)
class Compared:
    """A finished comparison of LABELS and SEEDS."""

    cwd: Path
    json: dict[str, Any]
    uri: str

    @property
    def folder(self) -> Path:
        return self.cwd / "runs" / "both"


@pytest.fixture(scope="session")
def compared_template(
    tmp_path_factory: pytest.TempPathFactory, flexfleet: Any, quick: Sequence[str], mlflow_template: Path
) -> Compared:
    """Two algorithms with two seeds, tracked."""
    cwd = tmp_path_factory.mktemp("both")
    shutil.copy(mlflow_template, cwd / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        _quickly(patch)
        sets = [*quick, "tracking.mlflow=sqlite:///mlflow.db"]
        done = flexfleet("compare", *TWO, "--id", "both", "--json", sets=[s for s in sets if "algorithm.name" not in s])
    assert done.code == 0, done.err
    return Compared(cwd, done.json, f"sqlite:///{cwd / 'mlflow.db'}")


@pytest.fixture
def compared(compared_template: Compared, tmp_path: Path) -> Compared:
    """A copy of its run folders in the current folder."""
    shutil.copytree(compared_template.cwd / "runs", tmp_path / "runs")
    return Compared(tmp_path, compared_template.json, compared_template.uri)
