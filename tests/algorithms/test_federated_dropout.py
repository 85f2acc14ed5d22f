"""Federated Dropout (Caldas et al., 2018), as FedRolex compares with it: which channels are drawn. What it has in
common with FedRolex is tested beside it (`test_fedrolex`)."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from fl_engine.algorithms import FederatedDropout
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import ClientUpdate, ParamLayout, SubmodelSpec, WorkOrder
from fl_engine.core.widths import random_drop
from fl_engine.exchange.client import execute
from fl_engine.models.preresnet import PreResNet18
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.models import kept_mask
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, context_of, start_of, tiny_site

LAYOUT = TinyNet().layout()
SIZES = {"conv": 8, "hidden": 32}


def channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


AT_HALF, AT_WHOLE = 0, 2
"""Levels of 0.5x and 1x."""


def dropped(seed: int, rounds: int) -> dict[tuple[int, int], WorkOrder]:
    algorithm = FederatedDropout(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    return {(r, o.client): o for r in range(rounds) for o in algorithm.plan(state, context_of(site, r, seed)).orders}


def test_dropout_sets_are_of_the_right_size_and_differ() -> None:
    """Between clients of a round and between rounds: 16 of 32 hidden channels hardly ever come twice."""
    orders = dropped(SEED, 30)
    for order in orders.values():
        beta = FederatedDropout().widths[order.level]
        for group, size in SIZES.items():
            found = channels(LAYOUT, order.spec, group)
            assert len(set(found)) == len(found) == math.floor(beta * size + 1e-9)
            assert set(found) <= set(range(size))
    halves = [(at, o) for at, o in orders.items() if o.level == AT_HALF]
    assert len(halves) > 30
    same_round = [(a, b) for (at, a), (bt, b) in itertools.combinations(halves, 2) if at[0] == bt[0]]
    same_client = [(a, b) for (at, a), (bt, b) in itertools.combinations(halves, 2) if at[1] == bt[1]]
    for pairs in (same_round, same_client):
        assert len(pairs) > 10
        for a, b in pairs:
            assert channels(LAYOUT, a.spec, "hidden") != channels(LAYOUT, b.spec, "hidden")


def test_convolutions_draw_alone_unless_a_shortcut_ties_them() -> None:
    """PreResNet18, half width: the stem and the sums of stage 1 are tied by identities, those of a later stage by one;
    what lies between the two convolutions of a block is tied to nothing."""
    family = PreResNet18((1, 16, 16), 10, width=0.5)
    layout = family.layout()
    spec = random_drop(layout, 0.5, np.random.default_rng(3))
    numbered = {n: torch.arange(t.numel()).view(t.shape).float() for n, t in initial_params(family, 0).items()}
    cut = take(numbered, layout, spec)

    def rows(name: str, dim: int) -> list[int]:
        """Which entries of this axis of the tensor were taken, read off the numbers."""
        size = numbered[name].shape
        first = cut[name].movedim(dim, 0).reshape(cut[name].shape[dim], -1)[:, 0].long()
        stride = math.prod(size[dim + 1 :])
        return (first // stride % size[dim]).tolist()

    assert rows("stem.weight", 0) == rows("stage1.0.conv2.weight", 0) == rows("stage1.1.conv2.weight", 0)
    for stage, size in enumerate((32, 64, 128, 256), 1):
        sums = rows(f"stage{stage}.1.conv2.weight", 0)
        assert rows(f"stage{stage}.0.conv2.weight", 0) == sums == rows(f"stage{stage}.1.conv1.weight", 1)
        inner = [rows(f"stage{stage}.{b}.conv1.weight", 0) for b in (0, 1)]
        assert [rows(f"stage{stage}.{b}.conv2.weight", 1) for b in (0, 1)] == inner
        assert [rows(f"stage{stage}.{b}.norm2.bn.weight", 0) for b in (0, 1)] == inner
        assert {len(sums), *map(len, inner)} == {size // 2}
        assert sums != inner[0] != inner[1] != sums
        if stage > 1:
            assert rows(f"stage{stage}.0.shortcut.weight", 0) == sums


def test_dropout_round_puts_each_number_back_in_its_place() -> None:
    """Clients that return what they were sent leave the model as it is, and one that adds 1 adds it to its own
    channels."""
    family = PreResNet18((1, 16, 16), 10, width=0.125)
    algorithm = FederatedDropout(training=TRAINING, widths=(0.5,))
    site = tiny_site(algorithm, family)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 2, SEED))
    back = execute(algorithm, plan.orders[0], site)
    assert isinstance(back, ClientUpdate) and back.spec.kept.keys() >= plan.orders[0].spec.kept.keys()
    for more in (0.0, 1.0):
        updates = [
            ClientUpdate(2, o.client, o.spec, {n: t + more for n, t in o.payload.items()}, 5, {}) for o in plan.orders
        ]
        merged = algorithm.merge(state, plan, updates, ServerSite(site)).params
        layout = family.layout()
        for name, tensor in merged.items():
            held = torch.zeros(tensor.shape, dtype=torch.bool)
            for order in plan.orders:
                held |= kept_mask(layout, order.spec, name, tensor.shape)
            torch.testing.assert_close(tensor, state.params[name] + more * held, rtol=1e-6, atol=1e-6)
