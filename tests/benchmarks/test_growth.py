"""How things grow: what a point measures, the fitted lines, and a long run that the report takes."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, large
from benchmarks.limits import TEN_MB
from benchmarks.networks import family_of
from benchmarks.workloads import WORKLOADS
from fl_engine.core.costs import count_params
from fl_engine.training import strategy
from flexfleet.reports import report
from flexfleet.tracking import server


@pytest.mark.parametrize("selection", growth.SELECTIONS)
def test_a_point_says_what_a_round_takes(selection: str) -> None:
    """In a process of its own, as points are measured: in one that has given memory back, peaks may fall."""
    command = [sys.executable, "-m", "benchmarks.growth", "--point", selection, "40", "4"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    assert found.keys() == {
        "fleet", "plan", "train", "merge", "round", "resume", "mb_before", "mb_rounds", "mb_peak", "mb_ledger"
    }  # fmt: skip
    assert all(value > 0 for value in found.values())
    peaks = [found[name] for name in ("mb_before", "mb_rounds", "mb_peak")]
    assert all(later > earlier - 1 for earlier, later in pairwise(peaks)), "the kernel counts pages in batches"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="elsewhere the peak is the parent's too")
def test_ten_thousand_clients_a_round_take_little_memory() -> None:
    """48 kB for each of them at once was half a gigabyte; an update takes 5."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        found = alone.apply(growth.point, ("uniform", 10_000, 10_000, 1))
    assert found["mb_rounds"] - found["mb_before"] < 300


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="elsewhere a peak cannot be counted anew")
@pytest.mark.parametrize(
    ("way", "bounds"),
    [
        ("workers", {"updates": 4.5, "merge": 5.5, "evaluate": 4, "commit": 3.2}),
        ("process", {"train": 5.5, "updates": 4.5, "merge": 5.5, "evaluate": 4.5, "commit": 3.2}),
    ],
)
def test_memory_is_few_times_a_large_model(way: str, bounds: dict[str, float]) -> None:
    """In models of 80 MB, above what the process held before. Each stage took 8 to 10 when updates, files and means
    were whole in memory, and the heap kept what they had left; now at most 4.4, and a worker 3.4 (5 before). Libraries
    that a stage is the first to need count too: a third of a model."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        found = alone.apply(_point_that_has_workers, (80.0, 3, way))
    assert {stage: found[stage] for stage in bounds if found[stage] > bounds[stage]} == {}
    assert found["written"] == pytest.approx(4, abs=0.01)
    if way == "workers":
        assert (found["mb_worker"] - found["mb_before"]) / found["mb_model"] < 4.5


def _point_that_has_workers(*args: Any) -> dict[str, float]:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    return large.point(*args)


def test_the_lines_of_large_models_are_fitted(capsys: pytest.CaptureFixture[str]) -> None:
    told = growth.of_models((4, 8), clients=2)
    assert [line.partition(":")[0] for line in told] == ["coordinator", "a worker", "one process"]
    assert capsys.readouterr().out.count("'merge': ") == 4


def test_each_method_has_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "METHODS", {name: large.METHODS[name] for name in ("adam", "half")})
    growth.of_methods(4, clients=2)
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    written = {name: float(figures[head.index("written")]) for name, *figures in lines}
    assert written == {"adam": pytest.approx(5, abs=0.1), "half": pytest.approx(2, abs=0.1)}


def test_mlflow_is_told_rounds_and_clients(
    finished: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_short", lambda folder: finished[0])
    monkeypatch.setattr(growth.tracking, "places", lambda: nullcontext({"file": f"sqlite:///{tmp_path}/mlflow.db"}))
    growth.of_mlflow(rounds=(2, 5), lines=(3,))
    assert re.findall(r"(rounds|lines)': (\d+)", capsys.readouterr().out) == [
        ("rounds", "2"), ("rounds", "5"), ("lines", "3")
    ]  # fmt: skip
    (run,) = server.client_of(f"sqlite:///{tmp_path}/mlflow.db").search_runs(["1"], "attributes.run_name = 'rounds'")
    row, *_ = json.loads((finished[0] / "history.json").read_text())["rounds"]
    assert run.data.metrics.keys() == row["metrics"].keys()


@pytest.mark.parametrize("clients", [2, 300, 512, 10_000])
def test_so_many_clients_train_side_by_side_and_no_more(clients: int) -> None:
    family = family_of("W3", WORKLOADS["W3"])
    assert strategy.batched(family, 10, clients, "fp32").lanes == min(clients, 512)


def test_lanes_of_many_weights_are_fewer() -> None:
    """A batch of one sample makes cheap steps, but each lane has all its weights."""
    assert strategy.batched(TEN_MB, 1, 1000, "fp32").lanes == 2**26 // (4 * count_params(TEN_MB)) == 6


def test_the_lines_are_those_of_the_points() -> None:
    assert growth.line([0, 10, 100], [1, 6, 51]) == pytest.approx((1.0, 0.5))
    points = [
        {"selection": "oort", "clients": n, "per_round": 7, "round": 0.002 + n / 1e6, "resume": 1.0, "mb_peak": 300.0}
        for n in (100, 1000)
    ]
    (told,) = growth.fits("fleet", points)
    assert told.startswith("oort: by clients of the fleet, 2.0 + 1.00 ms a round per 1000, 1000.0 + ")


def test_a_long_run_is_one_that_the_report_takes(finished: tuple[Path, Any], tmp_path: Path) -> None:
    run = report.load(growth.long_run(finished[0], tmp_path / "long", 1200))
    assert [row.round for row in run.rows] == list(range(1200))
    assert len({row.metrics["avg"] for row in run.rows}) > 1000
    assert run.rows[0].metrics["bytes_down"] == report.load(finished[0]).rows[0].metrics["bytes_down"]
