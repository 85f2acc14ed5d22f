"""A central training in the tables of a comparison, and trainings that cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flexfleet.experiments.comparison_file import ComparisonFile

SETS = ("dataset.train_samples=300", "dataset.test_samples=100", "model.width=0.5", "tracking.mlflow=null")
SHORT = ("central.epochs=2", "central.lr=0.05")
ROUNDS = (
    "partition.clients=4", "partition.minimum=10", "partition.proxy=0.1", "training.epochs=1", "rounds.stop=2",
    "training.fraction=0.5", "algorithm.eligible=all",
)  # fmt: skip


@pytest.fixture
def trained(flexfleet: Any, own_folder: None) -> list[dict[str, Any]]:
    """Two seeds, in runs/c0 and runs/c1."""
    return [
        flexfleet("central", "--json", "--run-id", f"c{seed}", sets=[*SETS, *SHORT, f"seed={seed}"]).json
        for seed in (0, 1)
    ]


@pytest.mark.long
def test_central_training_is_a_row_of_the_tables(flexfleet: Any, trained: list[dict[str, Any]]) -> None:
    words = ("compare", "--algorithms", "all_large", "--id", "both", "--central", "runs/c0", "runs/c1")
    flexfleet(*words, sets=[*SETS, *ROUNDS]).ok()
    found = ComparisonFile.read(Path("runs/both/comparison.json")).central
    assert found is not None and found.seeds == (0, 1) and found.settings["central.epochs"] == 2
    a, b = (each["metrics"]["full"] for each in trained)
    assert found.full.mean == pytest.approx((a + b) / 2)
    page = Path("runs/both/comparison.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| central training |")]
    assert len(rows) == 2 and f"{50 * (a + b):.2f} ± " in rows[0]
    last = [each["metrics"]["highest"]["100"]["full"] for each in trained]
    assert f"{50 * sum(last):.2f} ± " in rows[1]
    assert "central training: the full network, 2 epochs" in page
    assert "central training" in Path("runs/both/comparison.html").read_text()


def test_other_trainings_are_refused_before_training(flexfleet: Any, trained: Any, tmp_path: Path) -> None:
    def refused(*folders: str, sets: tuple[str, ...] = (), labels: str = "all_large") -> str:
        words = ("compare", "--algorithms", labels, "--id", "x", "--central", *folders)
        done = flexfleet(*words, sets=[*SETS, *ROUNDS, *sets])
        assert done.code in (2, 4) and not Path("runs/x").exists()
        return str(done.err)

    assert "runs/none" in refused("runs/none")
    assert "model.width: 0.25" in refused("runs/c0", sets=("model.width=0.25",))
    assert "0, 0" in refused("runs/c0", "runs/c0")
    labels = "a=all_large,b=all_large"
    assert "model.width" in refused("runs/c0", sets=("b:model.width=0.25",), labels=labels)
    own = ("partition.rule=local", "partition.folders=.", "dataset.train_samples=null")
    assert "partition.rule=local" in refused("runs/c0", sets=own)
    for name in ("c0", "c1"):  # as an unfinished training, which has none
        Path("runs", name, "manifest.json").unlink()
    file = json.loads(Path("runs/c1/central.json").read_text())
    file["config"]["central.lr"] = 0.1
    Path("runs/c1/central.json").write_text(json.dumps(file))
    assert "central.lr" in refused("runs/c0", "runs/c1")
    Path("runs/c0/result.json").unlink()
    assert "result.json" in refused("runs/c0")
