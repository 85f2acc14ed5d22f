"""Networks for samples that are no pictures through `flexfleet run` and `flexfleet pool`, on small made-up data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.datasets import Source
from fl_engine.tasks import Classification, Regression
from flexfleet.files.artifacts import RunFile
from tests.harness.processes import refused

pytestmark = pytest.mark.usefixtures("own_folder")

SAMPLES, TEST = 120, 40


def made_up(name: str, task: Task, *shape: int) -> Data:
    """Noise around three levels. The target is the level of a sample."""
    rng = seeds.rng(0, name)
    level = rng.permutation(np.arange(SAMPLES + TEST) % 3)
    noise = rng.normal(0, 1, (SAMPLES + TEST, *shape)) + (level - 1.0).reshape(-1, *[1] * len(shape))
    x, y = torch.from_numpy(noise.astype(np.float32)), torch.from_numpy(level - (1.0 if task == Regression() else 0))
    return Data(name, task, x[:SAMPLES], y[:SAMPLES], x[SAMPLES:], y[SAMPLES:])


WISDM = Source("series of 20 steps of six sensors", lambda root: made_up("like_wisdm", Classification(3), 20, 6))
AEP = Source("18 features and a number", lambda root: made_up("like_aep", Regression(), 18))
WIDAR = Source("maps of 4 moments", lambda root: made_up("like_widar", Classification(3), 4, 4, 6))

NETWORKS = {
    "wisdm_lstm": ("WISDM", 1.0), "har_cnn": ("WISDM", 0.5), "aep_mlp": ("AEP", 0.1), "widar_resnet18": ("WIDAR", 0.1)
}  # fmt: skip
"""The data, and the width."""
HETEROGENEOUS = ("adaptivefl", "depthfl", "fedrolex", "flexfl", "heterofl", "multibranch", "scalefl")
EXITS = ("depthfl", "multibranch", "scalefl")
"""They train networks with early exits."""


def quickly(quick: Sequence[str], name: str, algorithm: str) -> list[str]:
    data, width = NETWORKS[name]
    dropped = ("dataset.", "model.", "algorithm.", "rounds.", "tracking.")
    sets = [*(each for each in quick if not each.startswith(dropped)), "rounds.stop=2", "tracking.mlflow=null"]
    sets += [f"dataset.name={__name__}:{data}", f"model.name={name}", f"model.width={width}"]
    return [*sets, f"algorithm.name={algorithm}"]


@pytest.mark.parametrize("algorithm", HETEROGENEOUS)
@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_two_rounds(
    flexfleet: Any, quick: Sequence[str], name: str, algorithm: str, tmp_path: Path, no_drawings: None
) -> None:
    sets = quickly(quick, name, algorithm)
    if algorithm == "heterofl" and name == "aep_mlp":
        sets.append("algorithm.mask_labels=false")
    done = flexfleet("run", "--json", "--run-id", "a", sets=sets)
    if name == "wisdm_lstm" and algorithm in EXITS:
        assert (done.code, "WisdmLSTM does not support early exits" in done.err) == (2, True)
        return
    assert done.code == 0, done.err
    assert np.isfinite(done.json["metrics"]["full"])
    strategy = RunFile.read(tmp_path / "runs" / "a" / "run.json").numerics["strategy"]
    assert strategy == ("single" if name == "widar_resnet18" else "batched")


@pytest.mark.parametrize(
    ("name", "shape", "outputs", "params"),
    [
        ("wisdm_lstm", [200, 6], 12, 155_612),
        ("widar_resnet18", [22, 20, 20], 9, 11_185_706),
        ("har_cnn", [128, 9], 6, 300_486),
    ],
)
def test_pool_takes_what_a_network_was_published_for(
    flexfleet: Any, name: str, shape: list[int], outputs: int, params: int
) -> None:
    found = flexfleet("pool", "--json", "--algorithm", "all_large", "--model", name).json
    assert (found["input_chw"], found["classes"]) == (shape, outputs)
    assert [level["params"] for level in found["levels"]] == [params]


def test_pool_measures_on_data_what_takes_data(flexfleet: Any) -> None:
    assert "1x8x8" in refused(flexfleet("pool", "--json", "--algorithm", "flexfl", "--model", "wisdm_lstm"))
    sets = ["algorithm.use_apoz=false"]
    free = flexfleet("pool", "--json", "--algorithm", "flexfl", "--model", "wisdm_lstm", sets=sets)
    assert free.json["levels"][-1]["params"] == 155_612
