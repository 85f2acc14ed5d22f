"""`flexfleet.tune` from Python: the command line's study, spaces, and code of a cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flexfleet as ff
from fl_engine.algorithms import HeteroFL
from flexfleet.api.tuning import study_of
from flexfleet.config.schema import TuneConfig
from tests.harness.from_python import OPTIONS, SMALL

SPACE = {"learning_rate": {"low": 0.01, "high": 0.5, "log": True}, "training.batch_size": [10, 20]}
SEARCH: dict[str, Any] = {"trials": 3, "metric": "full", "held_out": (7, 8), "space": SPACE}


@pytest.fixture(scope="module", autouse=True)
def store(module_folder: Path) -> Path:
    return module_folder / "runs"


@pytest.fixture(scope="module")
def study(store: Path) -> ff.Study:
    return ff.tune("heterofl", id="lr", **SEARCH, **SMALL)


def test_tune_gives_the_study_of_the_command_line(study: ff.Study, flexfleet: Callable[..., Any]) -> None:
    sets = [f"{key}={json.dumps(value)}" for key, value in OPTIONS.items()]
    sets += ["partition.clients=4", "rounds.stop=1", "training.epochs=1", "algorithm.name=heterofl", "tune.trials=3"]
    sets += ["tune.metric=full", "tune.held_out=[7,8]", "run.store=by_command"]
    sets += ["tune.space={training.lr: {low: 0.01, high: 0.5, log: true}, training.batch_size: {choices: [10, 20]}}"]
    done = flexfleet("tune", "--id", "lr", "--json", sets=sets).ok()
    assert done.json == json.loads((study.folder / "tune.json").read_text())


def test_a_study_has_what_its_folder_has(study: ff.Study) -> None:
    assert study.id == "lr" and set(study.best) == {"training.lr", "training.batch_size"}
    assert set(study.default) == set(study.best), "also the configured batch size, which is not in the space"
    trials = study.trials
    assert list(trials["number"]) == [0, 1, 2]
    complete = trials[trials["outcome"] == "complete"]
    assert study.best_value == complete["value"].max()
    assert study.best["training.lr"] == complete.loc[complete["value"].idxmax(), "training.lr"]
    assert list(study.table["seed"]) == [7, 8]
    assert study.gain == pytest.approx(study.table["gain"].mean())
    assert list(study.table["gain"]) == list(study.table["best"] - study.table["default"])
    assert study.report.is_file()
    assert "held-out seeds 7, 8" in str(study) and "lr" in repr(study)
    assert study.config["training"]["lr"] == (study.best if study.better else study.default)["training.lr"]
    assert set(study.importance) == set(study.best)


def test_load_study_takes_folder_and_id(study: ff.Study) -> None:
    for place in ("lr", study.folder, str(study.folder), study):
        assert ff.load_study(place).best == study.best
    with pytest.raises(ff.ConfigError):
        ff.load_study("nowhere")
    with pytest.raises(ff.ConfigError, match=r"resume=True.* id"):
        ff.tune("heterofl", id="lr", **SEARCH, **SMALL)


def test_resumed_study_runs_missing_trials(study: ff.Study) -> None:
    (study.folder / "tune.json").rename(study.folder / "before.json")
    more = ff.tune("heterofl", id="lr", resume=True, **{**SEARCH, "trials": 4}, **SMALL)
    assert len(more.trials) == 4
    assert list(more.trials["value"][:3]) == list(study.trials["value"])
    (study.folder / "before.json").rename(study.folder / "tune.json")


def test_class_of_a_notebook_is_tuned_in_this_process(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class FromACell(HeteroFL):
        boost: int = 1

    FromACell.__module__, FromACell.__qualname__ = "__main__", "FromACell"
    monkeypatch.setitem(vars(sys.modules["__main__"]), "FromACell", FromACell)  # as the cell does
    search = {**SEARCH, "trials": 2, "held_out": (), "space": {"algorithm.boost": (1, 3)}}
    found = ff.tune(FromACell, id="cell", **search, **SMALL)
    assert found.best["algorithm.boost"] in (1, 2, 3) and len(found.table) == 0
    with pytest.raises(ff.ConfigError) as error:
        ff.tune(FromACell, id="two", jobs=2, **search, **SMALL)
    assert error.value.code == "config.own_code" and not (store / "two").exists()


# ------------------------------------------------------------------------------------------------ what diverges
class Line(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 16), nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.relu(self.inner(x)))


def numbers(id: str, rates: Sequence[float], lr: float = 0.1, **more: Any) -> ff.Study:
    """A search for the server's learning rate on numbers to predict."""
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(80, 4))
    data = ff.from_arrays(x, x @ drawn.normal(size=4))
    options = {
        "tracking.mlflow": None, "partition.rule": "iid", "partition.minimum": 2, "training.batch_size": 20,
        "algorithm.mask_labels": False, "algorithm.server": {"name": "adam", "lr": lr},
        "fleet.tiers": [{"name": "all", "share": 1.0, "memory": 100.0}],
    }  # fmt: skip
    return ff.tune(
        "heterofl", dataset=data, model=Line, rounds=1, clients=4, local_epochs=1, options=options,
        space={"algorithm.server.lr": list(rates)}, id=id, progress=False, **more,
    )  # fmt: skip


def test_diverged_trial_is_an_outcome_and_the_study_continues(store: Path) -> None:
    found = numbers("diverges", [0.1, 1e30], lr=1e30, trials=6, held_out=())
    told = json.loads((found.folder / "tune.json").read_text())
    outcomes = [line["outcome"] for line in told["tried"]]
    assert outcomes[0] == "diverged" and set(outcomes) == {"complete", "diverged"}
    assert told["trials"] == {name: outcomes.count(name) for name in ("complete", "pruned", "infeasible", "diverged")}
    assert found.best == {"algorithm.server.lr": 0.1} and told["default_value"] is None
    for line in told["tried"]:
        rate, why = line["params"]["algorithm.server.lr"], line["why"]
        assert (rate == 1e30) == (line["outcome"] == "diverged") == (line["value"] is None)
        assert (why or "").startswith("the model " if rate == 1e30 else "")
    diverged = f"{outcomes.count('diverged')} diverged"
    assert diverged in str(found) and diverged in found.report.read_text()
    assert list(found.trials["outcome"]) == outcomes
    again = numbers("diverges", [0.1, 1e30], lr=1e30, trials=6, held_out=(), resume=True)
    assert [line["outcome"] for line in json.loads((again.folder / "tune.json").read_text())["tried"]] == outcomes


# --------------------------------------------------------------------------------------------- arguments
def tune_section(space: Any = None, given: Any = None, **keywords: Any) -> TuneConfig:
    return study_of(space, given or {}, {"algorithm": "flexfl", **keywords}).tune


def test_ranges() -> None:
    found = tune_section(
        {"algorithm.kd_weight": (1, 20), "local_epochs": (1, 5), "training.lr": (0.1, 1), "training.momentum": [0, 0.9],
         "partition.rule": ["iid", "dirichlet"], "training.weight_decay": {"low": 1e-5, "high": 1e-2, "log": True}}
    ).space  # fmt: skip
    assert (found["algorithm.kd_weight"].whole, found["training.epochs"].whole) == (False, True)
    assert (found["training.lr"].low, found["training.lr"].high, found["training.lr"].whole) == (0.1, 1.0, False)
    assert found["training.momentum"].choices == (0, 0.9) and found["partition.rule"].choices == ("iid", "dirichlet")
    assert found["training.weight_decay"].log


@pytest.mark.parametrize(
    ("space", "given", "options"),
    [
        ({"training.lr": (0.1,)}, {}, {}),
        ({"training.lr": 0.1}, {}, {}),
        ({"training.lr": (1.0, 0.1)}, {}, {}),
        ({"training.lr": (0.1, 1.0), "learning_rate": (0.2, 0.3)}, {}, {}),
        (None, {"trials": 3}, {"tune": {"trials": 4}}),
        ({"training.lr": (0.1, 1.0)}, {}, {"tune": {"space": {"training.epochs": {"choices": [1, 2]}}}}),
    ],
)
def test_wrong_space_is_refused(space: Any, given: Any, options: Any) -> None:
    with pytest.raises(ff.ConfigError) as error:
        tune_section(space, given, options=options)
    assert error.value.path is not None
