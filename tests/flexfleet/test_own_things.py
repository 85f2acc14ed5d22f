"""Algorithms and networks of the user, by `package.module:NAME`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.settings import refused

PLUGIN = '''
from dataclasses import dataclass

from fl_engine.algorithms import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.algorithms.training import Training


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


def test_algorithm_without_a_base_class_runs(flexfleet: Any, plugin: str, quick: Sequence[str]) -> None:
    kept = [each for each in quick if not each.startswith("algorithm.")]
    sets = [*kept, f"algorithm.name={plugin}:Mine", "algorithm.strength=2", "rounds.stop=1"]
    done = flexfleet("run", "--json", "--run-id", "own", sets=sets)
    assert done.code == 0, done.err
    assert list(done.json["metrics"]["levels"]) == ["full"]
    assert flexfleet("run", "--json", "--run-id", "own", "--resume", sets=sets).json == done.json


def test_state_that_cannot_be_stored_is_refused_before_training(flexfleet: Any, plugin: str, tmp_path: Path) -> None:
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
