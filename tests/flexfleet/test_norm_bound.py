"""The default of `rounds.norm_bound`: off if all clients are the user's own, 5 if they are devices of other people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import flexfleet as ff
from fl_engine.core.errors import ConfigError
from flexfleet.config import load_config
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline.resume import known_run

SIZES = (1, 2, 3, 10, 50, 300, 3000)
"""Samples of each client."""
DEVICES = ["run.backend=kubernetes", "kubernetes.placement=device"]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.hidden(x).relu())
        return found


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors whose class is the number of the largest of their first three numbers."""
    x = np.random.default_rng(count).normal(size=(count, 4)).astype(np.float32)
    return x, x[:, :3].argmax(1)


def failures_of(bound: dict[str, Any], folder: Path) -> tuple[float, list[str]]:
    """The accuracy of the whole network, and why updates were refused."""
    data = ff.from_clients([samples(count) for count in SIZES], test=samples(400))
    tiers = [{"name": "strong", "share": 1.0, "memory": 110.0, "sigma": [0.0]}]
    options = {"tracking.mlflow": None, "partition.minimum": 1, "partition.proxy": 0.0, "fleet.tiers": tiers}
    common: dict[str, Any] = {"seed": 0, "clients": len(SIZES), "client_fraction": 1.0, "partition_rule": "natural"}
    common |= {"rounds": 2, "local_epochs": 1, "learning_rate": 0.005, "progress": False, "store_uri": str(folder)}
    result = ff.run(data, Layers, "heterofl", options=options | bound, **common)
    rows = result.clients.to_dict("records")
    return result.metrics["full"], [row["failure"] for row in rows if isinstance(row.get("failure"), str)]


def test_an_honest_large_client_is_merged_by_default(tmp_path: Path, no_drawings: None) -> None:
    free, none = failures_of({}, tmp_path)
    bounded, refused = failures_of({"rounds.norm_bound": 5.0}, tmp_path)
    assert none == [] and free > 0.9
    assert len(refused) >= 2 and bounded < 0.7
    assert all("rounds.norm_bound" in reason and "null" in reason for reason in refused)


@pytest.mark.parametrize(
    ("sets", "bound"),
    [
        ([], None),
        (["run.backend=processes"], None),
        (["run.backend=kubernetes"], None),
        (["kubernetes.placement=device"], None),  # and the clients are in this process
        (DEVICES, 5.0),
        (["run.backend=agents"], 5.0),
        (["run.backend=agents", "rounds.norm_bound=null"], None),
        (["run.backend=agents", "rounds.norm_bound=7.0"], 7.0),
        (["rounds.norm_bound=7.0"], 7.0),
    ],
)
def test_auto_bounds_the_updates_of_strangers(sets: Sequence[str], bound: float | None) -> None:
    assert load_config(None, sets).settled().rounds.norm_bound == bound


def test_a_resumed_run_keeps_the_recorded_bound(tmp_path: Path) -> None:
    began = load_config(None, ["run.backend=agents"]).settled()
    assert load_config(None).settled(began).rounds.norm_bound == 5.0
    record = RunFile(run_id="a", config=began.model_dump(mode="json"), numerics={}, pool_sha256="", partition_sha256="")
    record.write(tmp_path / "run.json")
    (tmp_path / "history.json").touch()
    assert known_run(load_config(None), tmp_path, resume=True) is not None
    with pytest.raises(ConfigError, match=r"rounds\.norm_bound"):
        known_run(load_config(None, ["rounds.norm_bound=null"]), tmp_path, resume=True)


def test_a_private_run_needs_no_bound_to_be_switched_off() -> None:
    private = "algorithm.aggregation={name: private}"
    load_config(None, [private])
    with pytest.raises(ConfigError, match=r"rounds\.norm_bound"):
        load_config(None, [private, "run.backend=agents"])
