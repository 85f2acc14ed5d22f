"""The options that algorithms of sub-models share, by hand: rows that a client holds, and weights."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import Decoupled, DepthFL, FedAvg, HeteroFL, ScaleFL
from fl_engine.algorithms.pooled import kernels
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import (
    HEAD,
    Assignment,
    Axis,
    ClientUpdate,
    RoundPlan,
    Slot,
    SubmodelSpec,
)
from fl_engine.exchange.client import Site
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_bits, context_of, start_of, tiny_site


def test_feddyn_stores_only_rows_that_a_client_holds() -> None:
    """One client of twenty returns rows 0 and 3 of the classifier, moved by 2. alpha = .5: g = -1 there and 0 in the
    others; h = -.5 / 20 * 2 = -.05; w = w + 2 - h / alpha = w + 2.1."""
    algorithm = DepthFL(training=TRAINING, alpha=0.5, mask_labels=True)
    site = tiny_site(algorithm)
    state, spec = start_of(algorithm, site), site.pool[-1].spec
    held = SubmodelSpec.of({**spec.kept, "classes": (0, 3)}, spec.blocks)
    payload = {name: t + 2 for name, t in take(state.params, site.layout, held).items()}
    update = ClientUpdate(0, 5, held, payload, 8, {"loss": 1.0, "steps": 4.0})
    plan = RoundPlan(0, (Assignment(0, 5, spec, take(state.params, site.layout, spec), 0, 2),))
    after = algorithm.merge(state, plan, [update], ServerSite(site))
    for name, rows in (("classifier.bias", [0, 3]), ("fc.linear.bias", list(range(32)))):
        moved = after.params[name] - state.params[name]
        others = [i for i in range(len(moved)) if i not in rows]
        torch.testing.assert_close(moved[rows], torch.full((len(rows),), 2.1))
        assert not moved[others].any()
        memory = after.memory[f"5/{name}"]
        torch.testing.assert_close(memory[rows], torch.full((len(rows),), -1.0))
        assert not memory[others].any()
    again = algorithm.merge(
        after,
        RoundPlan(0, (Assignment(0, 5, spec, take(after.params, site.layout, spec), 0, 2),)),
        [replace(update, payload=take(after.params, site.layout, held))],
        ServerSite(site),
    )
    assert_same_bits({"b": again.params["classifier.bias"][[1, 2]]}, {"b": state.params["classifier.bias"][[1, 2]]})
    assignments = algorithm.plan(after, context_of(site, 1, SEED)).assignments
    assert all(
        assignment.memory[n].shape == assignment.payload[n].shape
        for assignment in assignments
        for n in assignment.memory
    )


def brings(site: Site, level: int, client: int, value: float, steps: float, samples: int) -> ClientUpdate:
    spec = site.pool[level].spec
    payload = {n: torch.full_like(t, value) for n, t in take(initial_params(site.family, 0), site.layout, spec).items()}
    return ClientUpdate(0, client, spec, payload, samples, {"loss": 1.0, "steps": steps})


# A: 1,000 samples, 1 step, brings 1. B: 1 sample, 4 steps, brings 4. The small one has 4 + 16 + 16 of 72 kernels.
EXPECTED = {
    "examples": (1000 * 1 + 1 * 4) / 1001,
    "uniform": 5 / 2,
    "updates": (1 * 1 + 4 * 4) / 5,
    "model_size": (72 * 1 + 36 * 4) / 108,
    "hybrid": (72 * 1 + 36 * 4 * 4) / (72 + 36 * 4),
}


@pytest.mark.parametrize("weighting", EXPECTED)
@pytest.mark.parametrize("kind", [HeteroFL, ScaleFL, FedAvg, Decoupled], ids=lambda k: k.__name__)
def test_weightings_by_hand(kind: Any, weighting: Any) -> None:
    more = {"widths": (0.5, 1.0), "targets": (99.0, 100.0), "exits": ("fc",)} if kind is ScaleFL else {}
    more = {"widths": (0.5, 1.0)} if kind in (HeteroFL, Decoupled) else more
    algorithm = kind(training=TRAINING, weighting=weighting, **more)
    site = tiny_site(algorithm)
    state, largest = start_of(algorithm, site), len(site.pool) - 1
    level = 0 if kind in (HeteroFL, ScaleFL) else largest  # of B
    assignments = tuple(Assignment(0, client, site.pool[i].spec, {}, 0, i) for client, i in ((0, largest), (1, level)))
    updates = [brings(site, largest, 0, 1.0, 1.0, 1000), brings(site, level, 1, 4.0, 4.0, 1)]
    merged = algorithm.merge(state, RoundPlan(0, assignments), updates, ServerSite(site)).params
    expected: dict[str, float] = {}
    if level == largest:
        expected = {"model_size": EXPECTED["uniform"], "hybrid": EXPECTED["updates"]}
    elif kind is ScaleFL:  # B ends before the residual layer: 4 + 16 kernels
        expected = {"model_size": (72 + 20 * 4) / 92, "hybrid": (72 + 20 * 4 * 4) / (72 + 20 * 4)}
    assert float(merged["conv.conv.bias"][0]) == pytest.approx((EXPECTED | expected)[weighting], rel=1e-6)


def _slots(**axes: tuple[str | None, ...]) -> Any:
    named = {f"{name}.weight": Slot("b", tuple(Axis(group) for group in groups)) for name, groups in axes.items()}
    return SimpleNamespace(slots=named)


def test_kernels_are_output_channels() -> None:
    """A convolution of 8 to 16, a transposed one of 16 to 3 (its first axis is the inputs), 1,000 words in 32
    numbers; the output layer does not count, and alone it counts 1, since weights are positive."""
    layout = _slots(conv=("b", "a", None, None), up=("b", "c", None, None), words=(None, "d"), head=(HEAD, "d"))
    params = {
        "conv.weight": torch.zeros(16, 8, 3, 3),
        "up.weight": torch.zeros(16, 3, 7, 7),
        "up.bias": torch.zeros(3),
        "words.weight": torch.zeros(1000, 32),
        "head.weight": torch.zeros(10, 32),
    }
    assert kernels(layout, params) == 16 + 3 + 32
    assert kernels(layout, {"head.weight": params["head.weight"]}) == 1
