"""Algorithms, networks, losses and optimizers of the user, by package.module:NAME."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError
from flexfleet.config import load_config
from flexfleet.files.artifacts import RunFile
from tests.harness import processes
from tests.harness.plugins import OBJECTIVE, OPTIMIZER
from tests.harness.settings import refused

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

PLUGIN = '''
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fl_engine.algorithms import FedAvg, HeteroFL
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


@dataclass(frozen=True)
class Deaf(HeteroFL):
    def task(self, assignment, ctx):
        return replace(super().task(assignment, ctx), objective=None)


class Undecorated(FedAvg):
    q: float = 1.0


@dataclass(frozen=True)
class Misspelled(FedAvg):
    def merg(self, state, plan, results, server):
        return super().merge(state, plan, results, server)


@dataclass(frozen=True)
class MisspelledState(FedAvg):
    def client_states(self, family, pool):
        return {}


NOT_AN_ALGORITHM = 3


def focal(model, x, y, start):
    """Lin et al., ICCV 2017, with gamma = 2."""
    log_p = F.log_softmax(model(x), 1).gather(1, y[:, None])
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def rounded(model, x, y, start):
    return model(x).argmax(1).float().mean()


def adam(parameters, lr):
    return torch.optim.AdamW(parameters, lr / 10)
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "ownpackage").mkdir()
    (tmp_path / "ownpackage" / "__init__.py").write_text("")
    (tmp_path / "ownpackage" / "things.py").write_text(PLUGIN)
    (tmp_path / "ownpackage" / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("ownpackage", "ownpackage.things", "ownpackage.broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "ownpackage.things"


def test_algorithm_without_a_base_class_runs(flexfleet: Any, plugin: str, quick: Sequence[str]) -> None:
    sets = [*quick, f"algorithm.name={plugin}:Mine", "algorithm.strength=2", "rounds.stop=1"]
    done = flexfleet("run", "--json", "--run-id", "own", sets=sets).ok()
    assert list(done.json["metrics"]["levels"]) == ["full"]
    assert flexfleet("run", "--json", "--run-id", "own", "--resume", sets=sets).json == done.json


def test_state_that_cannot_be_stored_is_refused_before_training(flexfleet: Any, plugin: str, tmp_path: Path) -> None:
    sets = [f"algorithm.name={plugin}:Remembers", "algorithm.eligible=all", "tracking.mlflow=null"]
    for command in ("check", "run"):
        assert "Remembered.best is 0 (int)" in processes.refused(flexfleet(command, sets=sets))
    assert not (tmp_path / "runs").exists()


def test_ones_own_options_are_checked_by_name(plugin: str) -> None:
    text = refused(f"algorithm.name={plugin}:Mine", "algorithm.strenght=2")
    assert "algorithm.strenght" in text
    assert "did you mean 'strength'" in text
    assert "strength" in refused(f"algorithm.name={plugin}:Mine", "algorithm.strength=strong")


def test_options_without_the_dataclass_decorator_are_refused(plugin: str) -> None:
    for more in ([], ["algorithm.q=2"]):
        with pytest.raises(ConfigError, match="Undecorated") as error:
            load_config(None, [f"algorithm.name={plugin}:Undecorated", *more])
        assert error.value.code == "config.own_code"


@pytest.mark.parametrize(("name", "meant"), [("Misspelled", "merge"), ("MisspelledState", "client_state")])
def test_misspelled_method_of_an_algorithm_is_refused(plugin: str, name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=repr(meant)) as error:
        load_config(None, [f"algorithm.name={plugin}:{name}"])
    assert error.value.code == "config.own_code"


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


def test_misspelled_class_or_codec_section_is_corrected(plugin: str) -> None:
    assert "did you mean 'Mine'" in refused(f"algorithm.name={plugin}:Mined")
    assert "codec.up.name" in refused(f"codec.up={plugin}:Mine")


@pytest.mark.parametrize("name", ["ownpackage.things:Nothing", "ownpackage.things:NOT_AN_ALGORITHM", "digitz"])
def test_a_data_set_that_is_none_is_named(flexfleet: Any, plugin: str, name: str) -> None:
    assert name in processes.refused(flexfleet("check", sets=[f"dataset.name={name}"]))


# ----------------------------------------------------------------------------------------- losses and optimizers
OWN = (f"training.objective={OBJECTIVE}", f"training.optimizer={OPTIMIZER}")
PLAIN = "algorithm.name=heterofl"


def trained(flexfleet: Any, name: str, sets: Sequence[str]) -> str:
    done = flexfleet("run", "--json", "--run-id", name, sets=sets).ok()
    assert RunFile.read(Path("runs") / name / "run.json").numerics["strategy"] == "single"
    return str(done.json["model_sha256"])


@pytest.mark.long
def test_user_code_like_the_built_in_ends_in_the_same_model(flexfleet: Any, quick: Sequence[str]) -> None:
    ways = {"built_in": ("run.strategy=single",), "own": OWN, "processes": (*OWN, "run.backend=processes")}
    assert len({trained(flexfleet, name, [*quick, PLAIN, *sets]) for name, sets in ways.items()}) == 1


def test_own_loss_and_optimizer_give_the_same_bits_in_processes(
    flexfleet: Any, quick: Sequence[str], plugin: str
) -> None:
    sets = [*quick, PLAIN, f"training.objective={plugin}:focal", f"training.optimizer={plugin}:adam"]
    ways = {"threads": "run.devices=[cpu, cpu]", "processes": "run.backend=processes"}
    assert len({trained(flexfleet, name, [*sets, more]) for name, more in ways.items()}) == 1
    resumed = flexfleet("run", "--json", "--run-id", "threads", "--resume", sets=[*quick, PLAIN])
    assert resumed.code == 2
    assert f"training.objective: '{plugin}:focal' -> None" in resumed.err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("training.objective=focal",), "training.objective"),
        (("training.objective=nowhere23:focal",), "training.objective"),
        ((*OWN, "run.strategy=batched"), "run.strategy"),
        ((OWN[1], "training.momentum=0.9"), "training.momentum"),
        ((OWN[1], "run.precision=fp16"), "run.precision"),
        ((OWN[0], "algorithm.name=depthfl"), "a loss at every exit"),
        ((OWN[0], "algorithm.name=fjord"), "a loss of randomly drawn sub-models"),
        ((OWN[0], "algorithm.name=ownpackage.things:Deaf"), "training.objective"),
        (("training.objective=ownpackage.things:rounded",), "does not depend on the model's weights"),
    ],
    ids=["no name", "no module", "batched", "momentum", "fp16", "exits", "widths", "ignored", "no gradient"],
)
def test_loss_or_optimizer_that_cannot_train_is_refused(
    flexfleet: Any, quick: Sequence[str], plugin: str, sets: tuple[str, ...], said: str
) -> None:
    assert said in processes.refused(flexfleet("check", "--json", sets=[*quick, PLAIN, *sets]))
