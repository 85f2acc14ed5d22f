"""A round in its words: what is collected, what plan and merge are told, and what is decoded how often."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.errors import Diverged, ModelError
from fl_engine.core.types import ClientFailure, ClientUpdate
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.selection import Uniform
from fl_engine.storage.store import FolderStore
from fl_engine.testing import rounds
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site

EVERY = {"evaluate_every": 100, "commit_every": 1}


def federate(algorithm: Any, site: Any, folder: Path, backend: Any = None, **options: Any) -> tuple[Any, list[Any]]:
    return rounds.federated(Run(algorithm, site, RoundsConfig(**(EVERY | options))), FolderStore(folder), backend)


@dataclass(frozen=True)
class Twice(FedAvg):
    clocks: list[float] = field(default_factory=list)

    def plan(self, state: Any, context: Any) -> Any:
        self.clocks.append(context.clock)
        assert (context.available, len(context.pool)) == (context.fleet, 1)
        return super().plan(state, context)

    def merge(self, state: Any, plan: Any, results: Any, server: Any) -> Any:
        first, second = list(results), list(results)
        assert [a.client for a in first] == [a.client for a in second] == sorted(plan.assignment_of)
        for one, other in zip(first, second, strict=True):
            if isinstance(one, ClientUpdate):
                assert one.level == plan.assignment_of[one.client].level == 0 and one.elapsed > 0
                assert_same_bits(one.payload, other.payload)
        assert server.samples == dict.fromkeys(range(20), 8)
        return super().merge(state, plan, second, server)


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
def test_simulated_clock_continues_over_rounds_and_runs(tmp_path: Path, keep_updates: bool) -> None:
    algorithm = Twice(training=TRAINING, eligible="all")
    site = tiny_site(algorithm)
    _, rows = federate(algorithm, site, tmp_path / "whole", stop=4, keep_updates=keep_updates)
    took = [row.metrics["seconds_simulated"] for row in rows]
    assert algorithm.clocks == [0.0, took[0], took[0] + took[1], took[0] + took[1] + took[2]]
    whole = list(algorithm.clocks)
    algorithm.clocks.clear()
    for stop in (2, 4):
        federate(algorithm, site, tmp_path / "stopped", stop=stop, keep_updates=keep_updates)
    assert algorithm.clocks == whole


@dataclass(frozen=True)
class Listening(Uniform):
    told: list[tuple[int, bool, float]] = field(default_factory=list)

    def learn(self, state: Any, assignment: Any, result: Any, seconds: float) -> Any:
        assert assignment.client == result.client
        self.told.append((assignment.client, isinstance(result, ClientFailure), seconds))
        return state


def test_selector_learns_from_every_result(tmp_path: Path) -> None:
    selection = Listening(model="largest")
    algorithm = FedAvg(training=TRAINING, eligible="capable", selection=selection)
    site = tiny_site(algorithm)
    _, (row,) = federate(algorithm, site, tmp_path, stop=1)
    expected = [(c["client"], "failure" in c, c.get("seconds_simulated", 0.0)) for c in row.clients]
    assert selection.told == expected
    assert {failed for _, failed, _ in expected} == {True, False}, "who has less free than it needs fails"


def test_round_merges_as_many_updates_as_wanted(tmp_path: Path) -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all")
    site = tiny_site(algorithm)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED, over_provision=2.0))
    assert (len(plan.assignments), plan.wanted, plan.enough) == (10, 5, 5)
    _, (row,) = federate(algorithm, site, tmp_path, stop=1, over_provision=2.0)
    assert (row.metrics["clients_trained"], row.metrics["clients_late"]) == (5, 5)


@dataclass(frozen=True)
class Changed(FedAvg):
    """FedAvg with another plan, or another merged state."""

    planned: Any = None
    merged: Any = None

    def plan(self, state: Any, context: Any) -> Any:
        plan = super().plan(state, context)
        return plan if self.planned is None else self.planned(plan)

    def merge(self, state: Any, plan: Any, results: Any, server: Any) -> Any:
        merged = super().merge(state, plan, results, server)
        return merged if self.merged is None else self.merged(merged, plan.round)


NAME = "conv.conv.weight"


def changed(change: Any) -> Any:
    """A merge that gives another tensor of this name; None: none."""

    def into(state: Any, round: int) -> Any:
        others = {name: tensor for name, tensor in state.params.items() if name != NAME}
        return replace(state, params=others if change is None else others | {NAME: change(state.params[NAME])})

    return into


@pytest.mark.parametrize(
    "into",
    [
        lambda state, round: dict(state.params),
        changed(lambda t: t[:1]),
        changed(None),
        lambda s, round: replace(s, params=s.params | {"more": torch.ones(1)}),
    ],
    ids=["a dict", "a shape", "too few", "too many"],
)
def test_merge_with_other_tensors_is_refused(tmp_path: Path, into: Any) -> None:
    algorithm = Changed(training=TRAINING, eligible="all", merged=into)
    with pytest.raises(ModelError, match=r"Changed\.merge"):
        federate(algorithm, tiny_site(algorithm), tmp_path, stop=1)


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, 2e9])
def test_a_merge_that_diverges_stops_the_run_before_its_commit(
    tmp_path: Path, value: float, keep_updates: bool
) -> None:
    def diverged(state: Any, round: int) -> Any:
        spoilt = state.params[NAME].clone()
        if round >= 2:
            spoilt.view(-1)[-1] = value
        return replace(state, params=state.params | {NAME: spoilt})

    algorithm = Changed(training=TRAINING, eligible="all", merged=diverged)
    site, options = tiny_site(algorithm), {"keep_updates": keep_updates, "evaluate_every": 1}
    for _ in range(2):  # the second time it resumes, with the same result
        with pytest.raises(Diverged, match="round 3"):
            federate(algorithm, site, tmp_path, stop=5, **options)
        checkpoints = Ledger(FolderStore(tmp_path)).checkpoints
        assert checkpoints.commits()[-1] == 1 and len(checkpoints.rows()) == 2
    ended, rows = federate(algorithm, site, tmp_path, stop=2, **options)
    assert len(rows) == 2 and all(bool(torch.isfinite(tensor).all()) for tensor in ended.params.values())


def test_round_with_non_finite_scores_is_marked_diverged(tmp_path: Path) -> None:
    def grown(state: Any, round: int) -> Any:
        return replace(state, params={name: 9e8 * torch.sign(t) for name, t in state.params.items()})

    _, (row,) = federate(Changed(TRAINING, merged=grown), tiny_site(FedAvg(TRAINING)), tmp_path, stop=1)
    assert "loss/full" not in row.metrics and row.metrics["diverged"] == 1


def asking(*clients: int) -> Any:
    """A plan with assignments for these clients only."""
    return lambda plan: replace(plan, assignments=tuple(replace(plan.assignments[0], client=c) for c in clients))


def hinting(**hints: Any) -> Any:
    """The plan with its first assignment, which has these hints."""
    return lambda plan: replace(plan, assignments=(replace(plan.assignments[0], client=0, hints=hints),))


def at_level(level: Any) -> Any:
    """The plan with its first assignment, for a model of this level."""
    return lambda plan: replace(plan, assignments=(replace(plan.assignments[0], level=level),))


@pytest.mark.parametrize(
    "into",
    [
        lambda plan: list(plan.assignments),
        asking(1, 3, 1),
        asking(99),
        asking(*np.arange(2)),
        at_level(3),
        hinting(width=(1, 2)),
        hinting(x=torch.ones(1)),
    ],
    ids=["a list", "twice", "too many", "numpy", "level", "a tuple", "a tensor"],
)
def test_a_plan_that_no_backend_can_execute_is_refused(tmp_path: Path, into: Any) -> None:
    algorithm = Changed(training=TRAINING, eligible="all", planned=into)
    with pytest.raises(ModelError, match=r"Changed\.plan"):
        federate(algorithm, tiny_site(algorithm), tmp_path, stop=1)


@dataclass(frozen=True)
class Weighted(FedAvg):
    by: str = "loss"

    def weight(self, update: Any, state: Any, server: Any) -> Any:
        return self.by if self.by == "loss" else update.metrics[self.by]


@pytest.mark.parametrize(("by", "code"), [("los", "config.own_code"), ("loss", "model")])
def test_wrong_weight_names_the_algorithm(tmp_path: Path, by: str, code: str) -> None:
    algorithm = Weighted(training=TRAINING, eligible="all", by=by)
    with pytest.raises(ModelError, match=r"Weighted.*'loss'") as error:
        federate(algorithm, tiny_site(algorithm), tmp_path, stop=1)
    assert error.value.code == code
