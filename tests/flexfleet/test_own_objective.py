"""A run with an objective and an optimiser of one's own, which the configuration names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import HeteroFL
from fl_engine.core.types import LocalTask, TaskContext, WorkOrder
from fl_engine.testing.plugins import OBJECTIVE, OPTIMIZER
from flexfleet.files.artifacts import RunFile

pytestmark = pytest.mark.usefixtures("own_folder", "no_drawings")

OWN = (f"training.objective={OBJECTIVE}", f"training.optimizer={OPTIMIZER}")
PLAIN = "algorithm.name=heterofl"

MODULE = '''
import torch
import torch.nn.functional as F


def focal(model, x, y, start):
    """Lin et al., ICCV 2017, with gamma = 2."""
    log_p = F.log_softmax(model(x), 1).gather(1, y[:, None])
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


def rounded(model, x, y, start):
    return model(x).argmax(1).float().mean()


def adam(parameters, lr):
    return torch.optim.AdamW(parameters, lr / 10)
'''


@dataclass(frozen=True)
class Deaf(HeteroFL):
    def task(self, order: WorkOrder, ctx: TaskContext) -> LocalTask:
        return replace(super().task(order, ctx), objective=None)


@pytest.mark.long
def test_user_code_like_the_built_in_ends_in_the_same_model(flexfleet: Any, quick: Sequence[str]) -> None:
    ways = {"built_in": ("run.strategy=single",), "own": OWN, "processes": (*OWN, "run.backend=processes")}
    found = {}
    for name, sets in ways.items():
        done = flexfleet("run", "--json", "--run-id", name, sets=[*quick, PLAIN, *sets])
        assert done.code == 0, done.err
        found[name] = done.json["model_sha256"]
        assert RunFile.read(Path("runs") / name / "run.json").numerics["strategy"] == "single"
    assert len(set(found.values())) == 1


def test_a_loss_and_an_optimiser_beside_the_command(
    flexfleet: Any, quick: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownloss23.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sets = [*quick, PLAIN, "training.objective=ownloss23:focal", "training.optimizer=ownloss23:adam"]
    found = {}
    for name, more in {"threads": "run.devices=[cpu, cpu]", "processes": "run.backend=processes"}.items():
        done = flexfleet("run", "--json", "--run-id", name, sets=[*sets, more])
        assert done.code == 0, done.err
        found[name] = done.json["model_sha256"]
    assert found["threads"] == found["processes"]
    resumed = flexfleet("run", "--json", "--run-id", "threads", "--resume", sets=[*quick, PLAIN])
    assert resumed.code == 2
    assert "training.objective: 'ownloss23:focal' -> None" in resumed.err


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        (("training.objective=focal",), "training.objective"),
        (("training.objective=nowhere23:focal",), "training.objective"),
        ((*OWN, "run.strategy=batched"), "run.strategy"),
        ((OWN[1], "training.momentum=0.9"), "training.momentum"),
        ((OWN[1], "run.precision=fp16"), "run.precision=fp16"),
        ((OWN[0], "algorithm.name=depthfl"), "a loss at every exit"),
        ((OWN[0], "algorithm.name=fjord"), "a loss of sub-models that each step draws"),
        (("training.objective=ownloss23:rounded",), "does not depend on the model's weights"),
    ],
    ids=["no name", "no module", "batched", "momentum", "fp16", "exits", "widths", "no gradient"],
)
def test_what_cannot_be_is_said_before_anything_trains(
    flexfleet: Any,
    quick: Sequence[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sets: tuple[str, ...],
    said: str,
) -> None:
    (tmp_path / "ownloss23.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    done = flexfleet("check", "--json", sets=[*quick, PLAIN, *sets])
    assert done.code == 2, done.err
    assert said in done.err


def test_an_algorithm_that_makes_its_tasks_without_it_is_refused(flexfleet: Any, quick: Sequence[str]) -> None:
    name = f"algorithm.name={__name__}:Deaf"
    done = flexfleet("check", "--json", sets=[*quick, name, OWN[0]])
    assert done.code == 2
    assert "makes its clients' tasks without training.objective" in done.err
