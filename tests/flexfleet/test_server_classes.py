"""A run whose server owns classes: what its files, its report and a comparison say of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.data.partition import read_manifest
from fl_engine.training.evaluation import OWNERS
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, RunResult
from tests.harness.alike import run_of
from tests.harness.run_folders import rounds_of

OWNED = (8, 9)
LABELS = ("flexfl", "all_large")


@pytest.fixture(scope="module")
def sets(quick: Sequence[str]) -> list[str]:
    kept = [given for given in quick if not given.startswith(("algorithm.name=", "partition.proxy="))]
    return [*kept, "partition.server_classes=[8,9]", "rounds.stop=2"]


@pytest.fixture(scope="module")
def runs(module_folder: Path, flexfleet: Any, sets: list[str]) -> Path:
    """One run of each, with its report."""
    for label in LABELS:
        run_of(flexfleet, f"{label}-s0", [*sets, f"algorithm.name={label}"])
    return module_folder


@pytest.mark.parametrize("label", LABELS)
def test_every_file_says_the_same(runs: Path, label: str) -> None:
    run = runs / "runs" / f"{label}-s0"
    evaluation = EvaluationFile.read(run / "evaluation.json")
    assert evaluation.metric == "accuracy" and set(evaluation.by_owner) == set(OWNERS)
    last = rounds_of(run)[-1]["metrics"]
    for level, matrix in ConfusionFile.read(run / "confusion.json").levels.items():
        counts = np.array(matrix)
        for name, rows in zip(OWNERS, ([*range(8)], [*OWNED]), strict=True):
            found = counts[rows, rows].sum() / counts[rows].sum()
            assert evaluation.by_owner[name][level] == pytest.approx(found)
            assert last[f"{name}/{level}"] == pytest.approx(found)
    assert RunResult.read(run / "result.json").metrics["by_owner"] == evaluation.by_owner
    clients = len(read_manifest(run / "partition" / "partition.json").client_samples)
    assert all(0 < each.clients <= clients for each in evaluation.local.values()), "the server is no client"
    page = (run / "report.html").read_text()
    assert "devices' classes %" in page
    for level in evaluation.levels:
        assert f"<td>{100 * evaluation.by_owner[OWNERS[0]][level]:.2f}</td>" in page
