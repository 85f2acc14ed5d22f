"""A small version of `benchmarks.attacks`: three uphill clients of twenty, and two with a back door, on the digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flexfleet as ff

pytestmark = pytest.mark.long

UPHILL, BACK_DOOR = "uphill=0.15x2.4,always", "backdoor=0.1x2.4,always"


@pytest.fixture
def measured(tmp_path: Path) -> Any:
    def metrics(faults: str | None, rule: str) -> dict[str, Any]:
        """Return the metrics of HeteroFL after eight rounds."""
        options = {
            "tracking.mlflow": None,
            "rounds.evaluate_every": 100,
            "rounds.faults": faults,
            "algorithm.aggregation": {"name": rule},
            "model.width": 0.5,
            "pretrain.epochs": 5,
        }
        run = {"run_id": f"{rule}-{faults is None}", "store_uri": str(tmp_path), "progress": False}
        return ff.run(algorithm="heterofl", rounds=8, seed=0, options=options, **run).metrics

    return metrics


def test_judged_keeps_the_accuracy_that_uphill_costs_the_mean(measured: Any) -> None:
    honest, mean, judged = measured(None, "mean"), measured(UPHILL, "mean"), measured(UPHILL, "judged")
    assert honest["avg"] > 0.9
    assert mean["avg"] < honest["avg"] - 0.3
    assert judged["avg"] > honest["avg"] - 0.05
    assert (mean["updates"]["failed"], judged["updates"]["failed"] > 0) == (0, True)


def test_judged_closes_the_back_door_that_the_mean_leaves_open(measured: Any) -> None:
    mean, judged = measured(BACK_DOOR, "mean"), measured(BACK_DOOR, "judged")
    assert min(mean["avg"], judged["avg"]) > 0.9  # the accuracy does not show the back door
    assert mean["backdoor_success"] > 0.6
    assert judged["backdoor_success"] < 0.1
