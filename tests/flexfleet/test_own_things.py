"""A data set, a network and an algorithm of one's own, by `package.module:NAME`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.settings import refused

PLUGIN = '''
from dataclasses import dataclass

import torch

from fl_engine.algorithms import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.algorithms.training import Training
from fl_engine.datasets import Source
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.core.types import FULL
from fl_engine.core.samples import Data
from fl_engine.tasks import Classification


@dataclass(frozen=True)
class Mine:
    """An algorithm that is nobody's subclass; it passes its work on."""

    training: Training
    strength: float = 1.0

    preparations = ()

    def _other(self):
        return FedAvg(self.training, eligible="all")

    def pool(self, family, prepared, server):
        return self._other().pool(family, prepared, server)

    def init(self, params, layout, fleet, pool, server):
        return self._other().init(params, layout, fleet, pool, server)

    def plan(self, state, context):
        return self._other().plan(state, context)

    def task(self, order, ctx):
        return self._other().task(order, ctx)

    def merge(self, state, plan, answers, server):
        return self._other().merge(state, plan, answers, server)


@dataclass(frozen=True)
class Remembered(PooledState):
    best: float = 0


@dataclass(frozen=True)
class Remembers(FedAvg):
    def init(self, params, layout, fleet, pool, server):
        return Remembered(**vars(super().init(params, layout, fleet, pool, server)))


@dataclass(frozen=True)
class Net:
    input_shape: tuple[int, int, int]
    outputs: int
    size: float = 0.5

    min_hw = 8

    def layout(self):
        return SmallCNN(self.input_shape, self.outputs, self.size).layout()

    def module(self, spec=FULL):
        return SmallCNN(self.input_shape, self.outputs, self.size).module(spec)

    def prunable(self):
        return SmallCNN(self.input_shape, self.outputs, self.size).prunable()


def load(root):
    x = torch.arange(60 * 64, dtype=torch.int64).view(60, 1, 8, 8).remainder(256).to(torch.uint8)
    y = torch.arange(60) % 3
    return Data("mine", Classification(3), x, y, x[:12], y[:12], (0.5,), (0.3,))


DATA = Source("sixty made-up images", load)
NOT_AN_ALGORITHM = 3
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ownpackage").mkdir()
    (tmp_path / "ownpackage" / "__init__.py").write_text("")
    (tmp_path / "ownpackage" / "things.py").write_text(PLUGIN)
    (tmp_path / "ownpackage" / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("ownpackage", "ownpackage.things", "ownpackage.broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "ownpackage.things"


def test_ones_own_data_set_network_and_algorithm_run(flexfleet: Any, plugin: str) -> None:
    sets = [
        f"dataset.name={plugin}:DATA",
        f"model.name={plugin}:Net",
        "model.size=0.25",
        f"algorithm.name={plugin}:Mine",
        "algorithm.strength=2",
        "partition.rule=iid",
        "partition.clients=4",
        "partition.minimum=5",
        "training.epochs=1",
        "rounds.stop=1",
        "tracking.mlflow=null",
    ]
    done = flexfleet("run", "--json", "--run-id", "own", sets=sets)
    assert done.code == 0
    assert list(done.json["metrics"]["levels"]) == ["full"]
    assert flexfleet("run", "--json", "--run-id", "own", "--resume", sets=sets).json == done.json


def test_a_state_that_no_ledger_holds_is_refused_before_anything_trains(
    flexfleet: Any, plugin: str, tmp_path: Path
) -> None:
    sets = [f"algorithm.name={plugin}:Remembers", "algorithm.eligible=all", "tracking.mlflow=null"]
    for command in ("check", "run"):
        done = flexfleet(command, sets=sets)
        assert done.code == 2
        assert "Remembered.best holds 0 (int)" in done.err
    assert not (tmp_path / "runs").exists()


def test_ones_own_options_are_checked_by_name(plugin: str) -> None:
    text = refused(f"algorithm.name={plugin}:Mine", "algorithm.strenght=2")
    assert "algorithm.strenght" in text
    assert "did you mean 'strength'" in text
    assert "did you mean 'size'" in refused(f"model.name={plugin}:Net", "model.sise=0.25")
    assert "strength" in refused(f"algorithm.name={plugin}:Mine", "algorithm.strength=strong")


@pytest.mark.parametrize("section", ["algorithm", "model"])
@pytest.mark.parametrize(
    "name",
    [
        "ownpackage.things:Nothing",
        "ownpackage.broken:Mine",
        ":Mine",
        "ownpackage.things:NOT_AN_ALGORITHM",
        "ownpackage things:Mine",
    ],
)
def test_what_cannot_be_plugged_in_is_named(plugin: str, section: str, name: str) -> None:
    assert name in refused(f"{section}.name='{name}'")


@pytest.mark.parametrize("name", ["ownpackage.things:Nothing", "ownpackage.things:NOT_AN_ALGORITHM", "digitz"])
def test_a_data_set_that_is_none_is_named(flexfleet: Any, plugin: str, name: str) -> None:
    done = flexfleet("check", sets=[f"dataset.name={name}"])
    assert done.code == 2
    assert name in done.err
