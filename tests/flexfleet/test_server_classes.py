"""A run whose server owns classes: what its files, its report and a comparison say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.data.partition_files import read_manifest
from fl_engine.training.evaluation import OWNERS
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, History

OWNED = (8, 9)
LABELS = ("flexfl", "all_large")


@pytest.fixture(scope="module")
def sets(quick: Sequence[str]) -> list[str]:
    kept = [given for given in quick if not given.startswith(("algorithm.name=", "partition.proxy="))]
    return [*kept, "partition.server_classes=[8,9]", "rounds.stop=2"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, flexfleet: Any, sets: list[str]) -> Iterator[Path]:
    """One run of each, with its report."""
    folder = tmp_path_factory.mktemp("owned")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for label in LABELS:
            given = [*sets, f"algorithm.name={label}"]
            done = flexfleet("run", "--json", "--run-id", f"{label}-s0", sets=given)
            assert done.code == 0, done.err
            (folder / f"{label}.json").write_text(json.dumps(done.json))
        yield folder


@pytest.mark.parametrize("label", LABELS)
def test_every_file_says_the_same(runs: Path, label: str) -> None:
    run = runs / "runs" / f"{label}-s0"
    evaluation = EvaluationFile.read(run / "evaluation.json")
    assert evaluation.metric == "accuracy" and set(evaluation.by_owner) == set(OWNERS)
    last = History.read(run / "history.json").rounds[-1]["metrics"]
    for level, matrix in ConfusionFile.read(run / "confusion.json").levels.items():
        counts = np.array(matrix)
        for name, rows in zip(OWNERS, ([*range(8)], [*OWNED]), strict=True):
            found = counts[rows, rows].sum() / counts[rows].sum()
            assert evaluation.by_owner[name][level] == pytest.approx(found)
            assert last[f"{name}/{level}"] == pytest.approx(found)
    assert json.loads((runs / f"{label}.json").read_text())["metrics"]["by_owner"] == evaluation.by_owner
    clients = len(read_manifest(run / "partition" / "partition.json").client_samples)
    assert all(0 < each.clients <= clients for each in evaluation.local.values()), "the server is no client"
    page = (run / "report.html").read_text()
    assert "devices' classes %" in page
    for level in evaluation.levels:
        assert f"<td>{100 * evaluation.by_owner[OWNERS[0]][level]:.2f}</td>" in page
