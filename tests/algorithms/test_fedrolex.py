"""FedRolex (Alam et al., NeurIPS 2022; thesis ch. 3) and Federated Dropout (Caldas et al., 2018), as FedRolex compares
with it: which channels are sent, what a device makes of them, and how much a client counts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import FederatedDropout, FedRolex
from fl_engine.algorithms.training import Training
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import FULL, Assignment, ClientUpdate, Device, RoundPlan, TaskContext
from fl_engine.core.widths import random_drop
from fl_engine.exchange.client import Site, execute
from fl_engine.models.resnet import PreResNet18
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.models import kept_channels, kept_mask
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, context_of, start_of, tiny_site

law = settings(max_examples=40)
TINY = TinyNet()
LAYOUT = TINY.layout()
SIZES = {"conv": 8, "hidden": 32}
KINDS = [FedRolex, FederatedDropout]


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
    assignments = algorithm.plan(start_of(algorithm, SITE), context_of(SITE, round, SEED)).assignments
    assert assignments
    for assignment in assignments:
        beta = capacity(SITE.fleet[assignment.client])
        assert SITE.pool[assignment.level].name == f"{beta:g}x"
        for group, size in SIZES.items():
            expected = around(round % size, math.floor(beta * size + 1e-9), size)
            assert set(kept_channels(LAYOUT, assignment.spec, group)) == expected
        assert "classes" not in assignment.spec.kept, "the output layer is never cut"


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_server_model_may_be_larger_than_every_client_model(kind: Any) -> None:
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
    assignments = [o for round in range(20) for o in algorithm.plan(state, context_of(site, round, SEED)).assignments]
    assert {site.pool[o.level].name for o in assignments} == {"0.5x"}, (
        "the weakest device of this fleet can hold one half"
    )
    assert {o.client for o in assignments} == set(range(20)), "and so can all others"
    assert {len(kept_channels(LAYOUT, o.spec, "hidden")) for o in assignments} == {16}


def task_for(algorithm: Any, assignment: Assignment, site: Site, free: float) -> Any:
    return algorithm.task(assignment, TaskContext(LAYOUT, site.pool, site.fleet[assignment.client], free))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@pytest.mark.parametrize(("free", "beta"), [(110.0, 1.0), (100.0, 0.71), (47.0, 0.5), (5.0, 0.5)])
def test_device_with_less_memory_trains_a_part(kind: Any, free: float, beta: float) -> None:
    """652, 1,110 and 2,324 parameters are 28.06, 47.76 and 100 %."""
    algorithm = kind(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    for round in (0, 6, 30):
        for assignment in algorithm.plan(state, context_of(site, round, SEED)).assignments:
            sent = float(site.pool[assignment.level].name[:-1])
            task = task_for(algorithm, assignment, site, free)
            width = min(sent, beta)
            assert task.scaler == width, "the scaler is that of the width that is trained"
            assert task == task_for(algorithm, assignment, site, free)
            for group, size in SIZES.items():
                found = kept_channels(LAYOUT, task.spec, group)
                assert len(found) == math.floor(width * size + 1e-9)
                assert set(found) <= set(kept_channels(LAYOUT, assignment.spec, group))
                if kind is FedRolex:
                    assert set(found) == around(round % size, len(found), size), "from the same start on"
            assert "classes" not in task.spec.kept
            take(assignment.payload, LAYOUT, task.spec, have=assignment.spec)


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_shrunk_window_starts_where_the_received_one_does(overlap: float) -> None:
    """Strides differ with the width (r < 1): those of what was sent count, else the part would lie outside."""
    algorithm = FedRolex(training=TRAINING, overlap=overlap)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    shrunk = 0
    for round in range(40):
        for assignment in algorithm.plan(state, context_of(site, round, SEED)).assignments:
            if site.pool[assignment.level].name != "0.71x":
                continue
            shrunk += 1
            task = task_for(algorithm, assignment, site, 30.0)
            for group, size in SIZES.items():
                step = 1 + math.floor(0.71 * (1 - overlap) * size)
                assert set(kept_channels(LAYOUT, task.spec, group)) == around(round * step % size, size // 2, size)
    assert shrunk > 10


@pytest.mark.parametrize("weighting", ["updates", "hybrid"])
@pytest.mark.parametrize(("reported", "counted"), [(math.inf, 4), (5.0, 4), (2.0, 2), (-1e18, 1), (math.nan, 1)])
def test_reported_steps_count_up_to_those_of_the_assignment(weighting: str, reported: float, counted: int) -> None:
    algorithm = FedRolex(training=TRAINING, widths=(1.0,), weighting=weighting)  # type: ignore[arg-type]
    site = tiny_site(algorithm)
    state, assignments, updates = start_of(algorithm, site), [], []
    for client, (value, steps) in enumerate(((1.0, 4.0), (4.0, reported))):  # an honest client, and a liar
        payload = {name: torch.full_like(t, value) for name, t in state.params.items()}
        assignments.append(Assignment(0, client, FULL, {}, client, 2))
        updates.append(ClientUpdate(0, client, FULL, payload, 8, {"loss": 1.0, "steps": steps}))
    merged = algorithm.merge(state, RoundPlan(0, tuple(assignments)), updates, ServerSite(site)).params
    for tensor in merged.values():
        assert tensor.numpy() == pytest.approx((4 * 1 + counted * 4) / (4 + counted), rel=1e-6)


def test_lr_steps_divide_the_rate_by_ten() -> None:
    """Table 3.7: x 0.1 at rounds 800 and 1500; with a decay of .5 per round, both."""
    training = Training(lr=2e-4, lr_decay=1.0, lr_steps=(800, 1500))
    rates = [training.optimizer_in(round).lr for round in (0, 799, 800, 1499, 1500, 2499)]
    assert rates == pytest.approx([2e-4, 2e-4, 2e-5, 2e-5, 2e-6, 2e-6], rel=1e-12)
    both = Training(lr=8.0, lr_decay=0.5, lr_steps=(2,))
    assert [both.optimizer_in(round).lr for round in range(4)] == pytest.approx([8.0, 4.0, 0.2, 0.1])


AT_HALF, AT_WHOLE = 0, 2
"""Levels of 0.5x and 1x."""


def dropped(seed: int, rounds: int) -> dict[tuple[int, int], Assignment]:
    algorithm = FederatedDropout(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    return {
        (r, o.client): o for r in range(rounds) for o in algorithm.plan(state, context_of(site, r, seed)).assignments
    }


def test_dropout_sets_are_of_the_right_size_and_differ() -> None:
    """Between clients of a round and between rounds: 16 of 32 hidden channels hardly ever come twice."""
    assignments = dropped(SEED, 30)
    for assignment in assignments.values():
        beta = FederatedDropout().widths[assignment.level]
        for group, size in SIZES.items():
            found = kept_channels(LAYOUT, assignment.spec, group)
            assert len(set(found)) == len(found) == math.floor(beta * size + 1e-9)
            assert set(found) <= set(range(size))
    halves = [(at, o) for at, o in assignments.items() if o.level == AT_HALF]
    assert len(halves) > 30
    same_round = [(a, b) for (at, a), (bt, b) in itertools.combinations(halves, 2) if at[0] == bt[0]]
    same_client = [(a, b) for (at, a), (bt, b) in itertools.combinations(halves, 2) if at[1] == bt[1]]
    for pairs in (same_round, same_client):
        assert len(pairs) > 10
        for a, b in pairs:
            assert kept_channels(LAYOUT, a.spec, "hidden") != kept_channels(LAYOUT, b.spec, "hidden")


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
    back = execute(algorithm, plan.assignments[0], site)
    assert isinstance(back, ClientUpdate) and back.spec.kept.keys() >= plan.assignments[0].spec.kept.keys()
    for more in (0.0, 1.0):
        updates = [
            ClientUpdate(2, o.client, o.spec, {n: t + more for n, t in o.payload.items()}, 5, {})
            for o in plan.assignments
        ]
        merged = algorithm.merge(state, plan, updates, ServerSite(site)).params
        layout = family.layout()
        for name, tensor in merged.items():
            held = torch.zeros(tensor.shape, dtype=torch.bool)
            for assignment in plan.assignments:
                held |= kept_mask(layout, assignment.spec, name, tensor.shape)
            torch.testing.assert_close(tensor, state.params[name] + more * held, rtol=1e-6, atol=1e-6)
