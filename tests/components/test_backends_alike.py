"""A run's model does not depend on where its clients live, nor on how many train at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from components.artifacts import RunFile


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_drawings: None) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("strategy", ["single", "batched"])
def test_threads_and_worker_processes_end_in_the_same_model(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, strategy: str
) -> None:
    ways = {
        "one": (),
        "threads": ("run.devices=[cpu, cpu]",),
        "processes": ("run.backend=processes", "run.devices=[cpu, cpu]"),
    }
    found = {}
    for name, sets in ways.items():
        done = flexfleet("run", "--json", "--run-id", name, sets=[*quick, f"run.strategy={strategy}", *sets])
        assert done.code == 0, done.err
        found[name] = done.json
        assert RunFile.read(tmp_path / "runs" / name / "run.json").numerics["strategy"] == strategy
    assert len({result["model_sha256"] for result in found.values()}) == 1
    assert len({str(result["bytes"]) for result in found.values()}) == 1
    left = {p.parent.name for p in (tmp_path / "runs" / "processes" / "rounds").rglob("*.safetensors")}
    assert "orders" not in left and "updates" not in left, "a committed round leaves its state alone"


def test_a_run_goes_on_in_another_backend_but_not_with_another_strategy(flexfleet: Any, quick: Sequence[str]) -> None:
    whole = flexfleet("run", "--json", "--run-id", "whole", sets=quick)
    assert flexfleet("run", "--run-id", "a", sets=[*quick, "rounds.stop=1"]).code == 0
    argv = ("run", "--json", "--run-id", "a", "--resume")
    refused = flexfleet(*argv, sets=[*quick, "run.strategy=single"])
    assert refused.code == 6
    assert "would not compute the same bits" in refused.err
    more = flexfleet(*argv, sets=[*quick, "run.backend=processes"])
    assert more.json["model_sha256"] == whole.json["model_sha256"]


def test_bf16_is_another_model_and_says_so(flexfleet: Any, quick: Sequence[str], tmp_path: Path) -> None:
    plain = flexfleet("run", "--json", "--run-id", "fp32", sets=quick)
    half = flexfleet("run", "--json", "--run-id", "bf16", sets=[*quick, "run.precision=bf16"])
    again = flexfleet("run", "--json", "--run-id", "again", sets=[*quick, "run.precision=bf16"])
    assert half.json["model_sha256"] == again.json["model_sha256"] != plain.json["model_sha256"]
    assert RunFile.read(tmp_path / "runs" / "bf16" / "run.json").numerics["precision"] == "bf16"
    assert half.json["metrics"]["avg"] == pytest.approx(plain.json["metrics"]["avg"], abs=0.25)
