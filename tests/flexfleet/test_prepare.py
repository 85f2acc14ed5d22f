"""What a configuration names is made once and handed from step to step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from fl_engine.datasets import DATASETS
from flexfleet.cli import main as cli
from flexfleet.config import Config, load_config, resolve
from flexfleet.pipeline.prepare import Resolved


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often an algorithm was built from a section, and how often the digits were read."""
    found: Counter[str] = Counter()
    contract, digits = resolve.CONTRACT, DATASETS["digits"]

    class Counting:
        def of_section(self, section: Any) -> Any:
            found["algorithm"] += 1
            return contract.of_section(section)

    def load(root: Path) -> Any:
        found["data"] += 1
        return digits.load(root)

    monkeypatch.setattr(resolve, "CONTRACT", Counting())
    monkeypatch.setitem(DATASETS, "digits", replace(digits, load=load))
    return found


def test_a_run_builds_its_algorithm_once_and_reads_its_data_once(
    made: Counter[str], tmp_path: Path, quick: Sequence[str], no_drawings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the check through partition, pre-training, pool and rounds to the evaluation and the exported models."""
    monkeypatch.chdir(tmp_path)
    sets = [*quick, "tracking.mlflow=null", "publish.models=true", "publish.onnx=false"]
    options = [word for one in sets for word in ("--set", one)]
    assert cli.dispatch(["run", "--run-id", "a", *options]) == 0
    assert made == {"algorithm": 1, "data": 1}

    # The record of a run that goes on is checked too, whenever it is compared: it names an algorithm of its own.
    assert cli.dispatch(["run", "--run-id", "a", "--resume", *options]) == 0
    assert made["data"] == 2


def test_nobody_reads_data_who_does_not_ask_for_them(made: Counter[str]) -> None:
    resolved = Resolved.load(None, ["model.width=0.5"])
    assert resolved.network((1, 8, 8), 10) == resolved.network((1, 8, 8), 10)
    assert made == {"algorithm": 1}
    assert resolved.family == resolved.network((1, 8, 8), 10)
    assert resolved.data is resolved.data
    assert made == {"algorithm": 1, "data": 1}


def test_what_was_built_to_check_a_file_is_what_the_steps_get(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("algorithm: {kd_weight: 2.0}\n")
    resolved = Resolved.load(path, ["seed=4"])
    assert resolved.config == load_config(path, ["seed=4"])
    assert resolved == Resolved.of(resolved.config) != Resolved.of(Config())
    with pytest.raises(ConfigError, match=r"algorithm\.kd_weight"):
        Resolved.load(path, ["algorithm.kd_weight=-1.0"])
