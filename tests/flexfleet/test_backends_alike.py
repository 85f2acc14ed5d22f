"""A run's model depends neither on the backend nor on how many clients train at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flexfleet.files.artifacts import RunFile
from tests.harness.alike import WAYS, alike
from tests.harness.run_folders import rounds_of

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")


@pytest.mark.parametrize("strategy", [pytest.param("single", marks=pytest.mark.long), "batched"])
def test_threads_and_processes_give_the_same_model(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, strategy: str
) -> None:
    for name in alike(flexfleet, [*quick, f"run.strategy={strategy}"]):
        assert RunFile.read(tmp_path / "runs" / name / "run.json").numerics["strategy"] == strategy
    left = {p.parent.name for p in (tmp_path / "runs" / "processes" / "rounds").rglob("*.safetensors")}
    assert "assignments" not in left and "updates" not in left, "a committed round leaves its state alone"


FAULTS = "drop=0.2,slow=0.2x50,nan=0.1,scale=0.1x3,flip=0.1,corrupt=0.1"


@pytest.mark.long
def test_faults_are_equal_in_all_backends(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    terms = ("seed=0", "rounds.over_provision=1.5", "rounds.deadline_s=0.5", "rounds.quorum=0.5", "rounds.stop=8")
    ways = {"memory": (), "store": ("rounds.keep_updates=true",), "processes": WAYS["processes"]}
    found, failures = {}, {}
    for name, sets in ways.items():
        argv = ("run", "--json", "--run-id", name, "--faults", FAULTS)
        found[name] = flexfleet(*argv, sets=[*quick, *terms, *sets]).ok().json["model_sha256"]
        rounds = rounds_of(tmp_path / "runs" / name)
        failures[name] = [line.get("failure") for row in rounds for line in row["clients"]]
    assert len(set(found.values())) == 1
    assert failures["memory"] == failures["store"] == failures["processes"]
    stages = {failure.partition(":")[0] for failure in failures["memory"] if failure}
    assert stages == {"drop", "validate", "straggle", "quorum"}
    metrics = [row["metrics"] for row in rounds]
    assert any("clients_dropped" in m for m in metrics) and any("clients_late" in m for m in metrics)
    carried = [i for i, m in enumerate(metrics) if "carried_forward" in m]
    assert carried and all(metrics[i]["clients_trained"] == 0 for i in carried)
    assert all(metrics[i]["avg"] == metrics[i - 1]["avg"] for i in carried if i), "the model is the one before"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_gives_another_model(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, precision: str
) -> None:
    sets = [*quick, f"run.precision={precision}"]
    plain = flexfleet("run", "--json", "--run-id", "fp32", sets=quick)
    half = flexfleet("run", "--json", "--run-id", "half", sets=sets)
    again = flexfleet("run", "--json", "--run-id", "again", sets=[*sets, "run.backend=processes"])
    assert half.json["model_sha256"] == again.json["model_sha256"] != plain.json["model_sha256"]
    assert RunFile.read(tmp_path / "runs" / "half" / "run.json").numerics["precision"] == precision
    assert half.json["metrics"]["avg"] == pytest.approx(plain.json["metrics"]["avg"], abs=0.25)


def test_overflow_of_float16_fails_the_client(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    """With one learning rate all weights overflow; the other is not a number of float16. The model does not change."""
    said = {
        "6e4": "train: training diverged (learning rate 60000)",
        "7e4": "train: training.lr must be at most 65504",
    }
    for lr, reason in said.items():
        done = flexfleet(
            "run", "--json", "--run-id", lr, sets=[*quick, "run.precision=fp16", f"training.lr={lr}", "rounds.stop=1"]
        )
        assert done.code == 7, done.err
        (row,) = rounds_of(tmp_path / "runs" / lr)
        assert row["metrics"]["clients_trained"] == 0
        assert all(line["failure"].startswith(reason) for line in row["clients"])
