"""A round in its words: what is collected, what plan and merge are told, and what is decoded how often."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.core.errors import Diverged, ModelError
from fl_engine.core.types import ClientFailure, ClientUpdate
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection import Uniform
from fl_engine.storage.store import FolderStore
from fl_engine.testing import played
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site

EVERY = {"evaluate_every": 100, "commit_every": 1}


def federate(algorithm: Any, site: Any, folder: Path, backend: Any = None, **terms: Any) -> tuple[Any, list[Any]]:
    return played.federated(Run(algorithm, site, RoundsConfig(**(EVERY | terms))), FolderStore(folder), backend)


@dataclass(frozen=True)
class Twice(FedAvg):
    clocks: list[float] = field(default_factory=list)

    def plan(self, state: Any, context: Any) -> Any:
        self.clocks.append(context.clock)
        assert (context.available, len(context.pool)) == (context.fleet, 1)
        return super().plan(state, context)

    def merge(self, state: Any, plan: Any, answers: Any, server: Any) -> Any:
        first, second = list(answers), list(answers)
        assert [a.client for a in first] == [a.client for a in second] == sorted(plan.order_of)
        for one, other in zip(first, second, strict=True):
            if isinstance(one, ClientUpdate):
                assert one.level == plan.order_of[one.client].level == 0 and one.elapsed > 0
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

    def learn(self, state: Any, order: Any, outcome: Any, seconds: float) -> Any:
        assert order.client == outcome.client
        self.told.append((order.client, isinstance(outcome, ClientFailure), seconds))
        return state


def test_a_selector_hears_of_every_order_failures_included(tmp_path: Path) -> None:
    selection = Listening(model="largest")
    algorithm = FedAvg(training=TRAINING, eligible="capable", selection=selection)
    site = tiny_site(algorithm)
    _, (row,) = federate(algorithm, site, tmp_path, stop=1)
    expected = [(c["client"], "failure" in c, c.get("seconds_simulated", 0.0)) for c in row.clients]
    assert selection.told == expected
    assert {failed for _, failed, _ in expected} == {True, False}, "who has less free than it needs fails"


def test_a_round_takes_as_many_updates_as_the_plan_wants(tmp_path: Path) -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all")
    site = tiny_site(algorithm)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED, over_provision=2.0))
    assert (len(plan.orders), plan.wanted, plan.enough) == (10, 5, 5)
    _, (row,) = federate(algorithm, site, tmp_path, stop=1, over_provision=2.0)
    assert (row.metrics["clients_trained"], row.metrics["clients_late"]) == (5, 5)


@dataclass(frozen=True)
class Merging(FedAvg):
    into: Any = None

    def merge(self, state: Any, plan: Any, answers: Any, server: Any) -> Any:
        return self.into(super().merge(state, plan, answers, server))


NAME = "conv.conv.weight"


def changed(change: Any) -> Any:
    """A merge that gives another tensor of this name; None: none."""

    def into(state: Any) -> Any:
        others = {name: tensor for name, tensor in state.params.items() if name != NAME}
        return replace(state, params=others if change is None else others | {NAME: change(state.params[NAME])})

    return into


@pytest.mark.parametrize(
    ("into", "said"),
    [
        (lambda state: None, "Merging.merge gave None, where a state with `params` is expected: return"),
        (lambda state: dict(state.params), "Merging.merge gave a dict, where a state with `params` is expected"),
        (changed(lambda t: t[:1]), f"gave {NAME} as torch.float32 (1, 1, 3, 3), where torch.float32 (8, 1, 3, 3) is"),
        (changed(lambda t: t.numpy()), f"gave {NAME} as numpy.ndarray, where torch.float32 (8, 1, 3, 3) is"),
        (changed(None), f"gave no {NAME}: what nobody trained keeps its value in state.params"),
        (lambda s: replace(s, params=s.params | {"more": torch.ones(1)}), "gave more, which state.params does not"),
    ],
    ids=["nothing", "a dict", "a shape", "numpy", "too few", "too many"],
)
def test_merge_with_other_tensors_is_refused_by_name(tmp_path: Path, into: Any, said: str) -> None:
    algorithm = Merging(training=TRAINING, eligible="all", into=into)
    with pytest.raises(ModelError, match=re.escape(said)):
        federate(algorithm, tiny_site(algorithm), tmp_path, stop=1)


@dataclass(frozen=True)
class Diverging(FedAvg):
    value: float = math.nan

    def merge(self, state: Any, plan: Any, answers: Any, server: Any) -> Any:
        merged = super().merge(state, plan, answers, server)
        if plan.round < 2:
            return merged
        spoilt = merged.params[NAME].clone()
        spoilt.view(-1)[-1] = self.value
        return replace(merged, params=merged.params | {NAME: spoilt})


@pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2e9])
def test_a_merge_that_diverges_stops_the_run_before_its_commit(
    tmp_path: Path, value: float, keep_updates: bool
) -> None:
    algorithm = Diverging(training=TRAINING, eligible="all", value=value)
    site, terms = tiny_site(algorithm), {"keep_updates": keep_updates, "evaluate_every": 1}
    said = (
        r"the model has diverged: Diverging\.merge \(aggregation mean, server average\) gave conv\.conv\.weight of 8 "
    )
    for _ in range(2):  # the second time it goes on from the commit, and finds the same
        with pytest.raises(Diverged, match=rf"{said}in round 3, .* --resume --set rounds\.stop=2"):
            federate(algorithm, site, tmp_path, stop=5, **terms)
        checkpoints = ledger_in(FolderStore(tmp_path)).checkpoints
        assert checkpoints.commits()[-1] == 1 and len(checkpoints.rows()) == 2
    ended, rows = federate(algorithm, site, tmp_path, stop=2, **terms)
    assert len(rows) == 2 and all(bool(torch.isfinite(tensor).all()) for tensor in ended.params.values())


def test_round_whose_scores_are_not_finite_says_diverged(tmp_path: Path) -> None:
    def grown(state: Any) -> Any:
        return replace(state, params={name: 9e8 * torch.sign(t) for name, t in state.params.items()})

    _, (row,) = federate(Merging(TRAINING, into=grown), tiny_site(FedAvg(TRAINING)), tmp_path, stop=1)
    assert "loss/full" not in row.metrics and row.metrics["diverged"] == 1


@dataclass(frozen=True)
class Asking(FedAvg):
    into: Any = None

    def plan(self, state: Any, context: Any) -> Any:
        return self.into(super().plan(state, context))


def asking(*clients: int) -> Any:
    """A plan with orders for these clients alone."""
    return lambda plan: replace(plan, orders=tuple(replace(plan.orders[0], client=c) for c in clients))


def hinting(**hints: Any) -> Any:
    """The plan with its first order, which has these hints."""
    return lambda plan: replace(plan, orders=(replace(plan.orders[0], client=0, hints=hints),))


def at_level(level: Any) -> Any:
    """The plan with its first order for a model of this level."""
    return lambda plan: replace(plan, orders=(replace(plan.orders[0], level=level),))


@pytest.mark.parametrize(
    ("into", "said"),
    [
        (lambda plan: None, "Asking.plan gave None, where a RoundPlan is expected"),
        (lambda plan: list(plan.orders), "Asking.plan gave a list, where a RoundPlan is expected"),
        (asking(1, 3, 1), "Asking.plan gave two orders for client 1: in a round each client has one at most"),
        (asking(99), "Asking.plan gave an order for client 99; there are the clients 0 to 19"),
        (asking(*np.arange(2)), f"Asking.plan gave an order for client {np.int64(0)!r}, where an int is expected"),
        (at_level(3), "Asking.plan gave an order of level 3, where an int of 0 to 0 is expected"),
        (hinting(width=(1, 2)), "Asking.plan gave client 0 hints that no other process gets: hints holds "),
        (hinting(lr=np.float64(0.5)), "hints holds {"),
        (hinting(x=torch.ones(1)), "hints holds {"),
    ],
    ids=["nothing", "a list", "twice", "too many", "numpy", "level", "a tuple", "a number of numpy", "a tensor"],
)
def test_a_plan_that_no_backend_can_carry_out_is_refused(tmp_path: Path, into: Any, said: str) -> None:
    algorithm = Asking(training=TRAINING, eligible="all", into=into)
    with pytest.raises(ModelError, match=re.escape(said)):
        federate(algorithm, tiny_site(algorithm), tmp_path, stop=1)
