"""How things grow: what a point measures, the fitted lines, and a long run that the report takes."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth, large
from benchmarks.networks import family_of
from benchmarks.workloads import WORKLOADS
from fl_engine.training import strategy


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


@pytest.mark.parametrize("clients", [2, 300, 512, 10_000])
def test_so_many_clients_train_side_by_side_and_no_more(clients: int) -> None:
    family = family_of("W3", WORKLOADS["W3"])
    assert strategy.batched(family, 10, clients, "fp32").lanes == min(clients, 512)
