"""A run whose server owns classes: what its files, its report and a comparison say of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_engine.data.partition_files import read_manifest
from fl_engine.training.evaluation import OWNERS
from flexfleet.config import load_config
from flexfleet.config.comparison_runs import Entry
from flexfleet.experiments import comparison_report
from flexfleet.files.artifacts import ConfusionFile, EvaluationFile, History

OWNED = (8, 9)
LABELS = ("flexfl", "all_large")
NAMES = ("avg_device_classes", "full_device_classes", "avg_server_classes", "full_server_classes")


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


def test_a_comparison_has_a_table_of_them(runs: Path, sets: list[str], tmp_path: Path) -> None:
    entries = [Entry(label, 0, load_config(None, [*sets, f"algorithm.name={label}"])) for label in LABELS]
    folders = {f"{label}-s0": runs / "runs" / f"{label}-s0" for label in LABELS}
    found = comparison_report.tabulate("owned", entries, folders, tmp_path)
    (table,) = [table for table in comparison_report.tables(found) if "whose the class is" in table.title]
    assert table.head[1:] == ("avg devices'", "full devices'", "avg server's", "full server's", "own, all classes")
    for (label, *cells), name in zip(table.rows, LABELS, strict=True):
        levels = EvaluationFile.read(folders[f"{name}-s0"] / "evaluation.json").by_owner
        expected = []
        for of_level in levels.values():
            values = list(of_level.values())
            avg = None if name == "all_large" else statistics.fmean(values)
            expected += [comparison_report.NONE if avg is None else f"{100 * avg:.2f}", f"{100 * values[-1]:.2f}"]
        own = History.read(folders[f"{name}-s0"] / "history.json").rounds[-1]["metrics"].get("accuracy_devices")
        assert label == name and cells == [*expected, comparison_report.NONE if own is None else f"{100 * own:.2f}"]
    told = json.loads((tmp_path / "comparison.json").read_bytes())["results"]["flexfl"]
    assert [f"{100 * told[name]['mean']:.2f}" for name in (*NAMES, "devices")] == list(table.rows[0][1:])
    assert told["full_server_classes"]["mean"] == told["runs"][0]["full_server_classes"]
    assert comparison_report.metrics(found)["full_server_classes/all_large"] == pytest.approx(
        found.results["all_large"].runs[0].full_server_classes
    )
    assert any(line.startswith("devices':") for line in comparison_report.notes(found))
    assert table.title in (tmp_path / "comparison.md").read_text()
