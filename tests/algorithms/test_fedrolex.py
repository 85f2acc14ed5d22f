"""FedRolex (Alam et al., NeurIPS 2022; thesis ch. 3) and Federated Dropout, its neighbour: which channels are sent,
what a device makes of them, and how much a client counts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import FederatedDropout, FedRolex
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import take
from fl_engine.core.types import (
    FULL,
    ClientUpdate,
    Device,
    ParamLayout,
    Params,
    RoundPlan,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)
from fl_engine.exchange.client import Site
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, context_of, start_of, tiny_site

law = settings(max_examples=40)
TINY = TinyNet()
LAYOUT = TINY.layout()
SIZES = {"conv": 8, "hidden": 32}
KINDS = [FedRolex, FederatedDropout]


def channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


def around(start: int, count: int, size: int) -> set[int]:
    """{start, ..., start + count - 1} mod size."""
    return {(start + i) % size for i in range(count)}


def capacity(device: Device) -> float:
    """By hand: TinyNet has 2,324 parameters; at half width 652, at 0.71 (5 and 22 channels) 1,110, or 28 and 48 %.
    A weak device holds 35 %, a medium one 60 %, a strong one 110 %."""
    return {"weak": 0.5, "medium": 0.71, "strong": 1.0}[device.tier]


SITE = tiny_site(FedRolex(training=TRAINING))


@law
@given(round=st.integers(0, 3000))
def test_clients_get_the_window_of_their_capacity_and_the_round(round: int) -> None:
    """Eq. 3.4: floor(beta * K_i) channels from round mod K_i on, in every layer."""
    algorithm = FedRolex(training=TRAINING)
    orders = algorithm.plan(start_of(algorithm, SITE), context_of(SITE, round, SEED)).orders
    assert orders
    for order in orders:
        beta = capacity(SITE.fleet[order.client])
        assert SITE.pool[order.level].name == f"{beta:g}x"
        for group, size in SIZES.items():
            expected = around(round % size, math.floor(beta * size + 1e-9), size)
            assert set(channels(LAYOUT, order.spec, group)) == expected
        assert "classes" not in order.spec.kept, "the output layer is never cut"


@pytest.mark.parametrize(("overlap", "steps"), [(1.0, (1, 1)), (0.5, (3, 9)), (0.0, (5, 17))])
def test_less_overlap_moves_the_window_further(overlap: float, steps: tuple[int, int]) -> None:
    """Width 1/2 of 8 and 32 channels: 1 + floor(1/2 * (1 - r) * K) is 1, 1; 1 + 2, 1 + 8; 1 + 4, 1 + 16."""
    algorithm = FedRolex(training=TRAINING, overlap=overlap)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    seen = 0
    for round in range(40):
        for order in algorithm.plan(state, context_of(site, round, SEED)).orders:
            if site.pool[order.level].name == "0.5x":
                seen += 1
                for (group, size), step in zip(SIZES.items(), steps, strict=True):
                    assert set(channels(LAYOUT, order.spec, group)) == around(round * step % size, size // 2, size)
    assert seen > 20


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_the_servers_model_may_be_larger_than_every_clients(kind: Any) -> None:
    """Widths below 1: the full model is in the pool and is reported, but nobody is sent it."""
    algorithm = kind(training=TRAINING, widths=(0.25, 0.5))
    site = tiny_site(algorithm)
    assert [(m.name, m.dispatched, m.reported) for m in site.pool] == [
        ("0.25x", True, False),
        ("0.5x", True, False),
        ("1x", False, True),
    ]
    assert site.pool[-1].spec == FULL
    state = start_of(algorithm, site)
    orders = [o for round in range(20) for o in algorithm.plan(state, context_of(site, round, SEED)).orders]
    assert {site.pool[o.level].name for o in orders} == {"0.5x"}, "the weakest device of this fleet can hold one half"
    assert {o.client for o in orders} == set(range(20)), "and so can all others"
    assert {len(channels(LAYOUT, o.spec, "hidden")) for o in orders} == {16}


def task_for(algorithm: Any, order: WorkOrder, site: Site, free: float) -> Any:
    return algorithm.task(order, TaskContext(LAYOUT, site.pool, site.fleet[order.client], free))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize(
    ("free", "beta"), [(110.0, 1.0), (100.0, 0.71), (60.0, 0.71), (47.0, 0.5), (29.0, 0.5), (28.0, 0.5), (5.0, 0.5)]
)
def test_device_with_less_memory_trains_a_part(kind: Any, free: float, beta: float) -> None:
    """652, 1,110 and 2,324 parameters are 28.06, 47.76 and 100 %."""
    algorithm = kind(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    for round in (0, 6, 30):
        for order in algorithm.plan(state, context_of(site, round, SEED)).orders:
            sent = float(site.pool[order.level].name[:-1])
            task = task_for(algorithm, order, site, free)
            width = min(sent, beta)
            assert task.scaler == width, "the scaler is that of the width that is trained"
            assert task == task_for(algorithm, order, site, free)
            for group, size in SIZES.items():
                found = channels(LAYOUT, task.spec, group)
                assert len(found) == math.floor(width * size + 1e-9)
                assert set(found) <= set(channels(LAYOUT, order.spec, group))
                if kind is FedRolex:
                    assert set(found) == around(round % size, len(found), size), "from the same start on"
            assert "classes" not in task.spec.kept
            take(order.payload, LAYOUT, task.spec, have=order.spec)


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_a_shrunk_window_starts_where_the_one_received_does(overlap: float) -> None:
    """Strides differ with the width (r < 1): those of what was sent count, else the part would lie outside."""
    algorithm = FedRolex(training=TRAINING, overlap=overlap)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    shrunk = 0
    for round in range(40):
        for order in algorithm.plan(state, context_of(site, round, SEED)).orders:
            if site.pool[order.level].name != "0.71x":
                continue
            shrunk += 1
            task = task_for(algorithm, order, site, 30.0)
            for group, size in SIZES.items():
                step = 1 + math.floor(0.71 * (1 - overlap) * size)
                assert set(channels(LAYOUT, task.spec, group)) == around(round * step % size, size // 2, size)
    assert shrunk > 10


def constant(spec: SubmodelSpec, value: float, family: ModelFamily = TINY) -> Params:
    layout = family.layout()
    with torch.device("meta"):  # a prefix of the same widths has the same shapes
        prefix = SubmodelSpec.of({group: layout.width(spec, group) for group in layout.groups})
        state = family.module(prefix).state_dict()
    return {name: torch.full(t.shape, value) for name, t in state.items()}


def merged(weighting: Any, family: ModelFamily, updates: Sequence[tuple[SubmodelSpec, Params, float, int]]) -> Params:
    """Of clients 0, 1, ... that come back with (sub-model, payload, local steps, samples)."""
    algorithm = FedRolex(training=TRAINING, widths=(1.0,), weighting=weighting)
    site = tiny_site(algorithm, family)
    state = start_of(algorithm, site)
    orders = tuple(WorkOrder(0, client, spec, {}, client, 2) for client, (spec, *_) in enumerate(updates))
    outcomes = [
        ClientUpdate(0, client, spec, payload, samples, {"loss": 1.0, "steps": steps})
        for client, (spec, payload, steps, samples) in enumerate(updates)
    ]
    found: Params = algorithm.merge(state, RoundPlan(0, orders), outcomes, ServerSite(site)).params
    return found


@pytest.mark.parametrize("weighting", ["updates", "hybrid"])
@pytest.mark.parametrize(
    ("said", "counted"), [(1e18, 4), (math.inf, 4), (5.0, 4), (4.0, 4), (2.0, 2), (0.0, 1), (-1e18, 1), (math.nan, 1)]
)
def test_lie_about_steps_counts_up_to_the_assignments_steps(weighting: str, said: float, counted: int) -> None:
    liar, honest = (FULL, constant(FULL, 4.0), said, 8), (FULL, constant(FULL, 1.0), 4.0, 8)
    for tensor in merged(weighting, TINY, [honest, liar]).values():
        assert tensor.numpy() == pytest.approx((4 * 1 + counted * 4) / (4 + counted), rel=1e-6)


def test_the_learning_rate_is_a_tenth_from_each_step_on() -> None:
    """Table 3.7: x 0.1 at rounds 800 and 1500; with a decay of .5 per round, both."""
    training = Training(lr=2e-4, lr_decay=1.0, lr_steps=(800, 1500))
    rates = [training.sgd(round).lr for round in (0, 799, 800, 1499, 1500, 2499)]
    assert rates == pytest.approx([2e-4, 2e-4, 2e-5, 2e-5, 2e-6, 2e-6], rel=1e-12)
    both = Training(lr=8.0, lr_decay=0.5, lr_steps=(2,))
    assert [both.sgd(round).lr for round in range(4)] == pytest.approx([8.0, 4.0, 0.2, 0.1])
