"""HeteroFL, ScaleFL, DepthFL, FjORD and Decoupled: assignments, pruning on the device and merging,
against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms import Decoupled, DepthFL, FjORD, HeteroFL, ScaleFL
from fl_engine.codecs import Qsgd
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ClientError, PoolError
from fl_engine.core.slicing import contains
from fl_engine.core.types import FULL, Assignment, ClientUpdate, Codecs, Params
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, execute
from fl_engine.models.chains import VGG16, SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.rounds import task_context
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    TinyNet,
    assert_same_bits,
    context_of,
    failure_of,
    start_of,
    tiny_fleet,
    tiny_pool,
    tiny_site,
    update_of,
)
from fl_engine.training.evaluation import published, weights_of

VGG = VGG16((3, 32, 32), 10)


def assignments_by_model(algorithm: Algorithm, site: Site) -> dict[str, Assignment]:
    state = start_of(algorithm, site)
    found = [o for r in range(20) for o in algorithm.plan(state, context_of(site, r, SEED)).assignments]
    return {site.pool[o.level].name: o for o in found}


@pytest.mark.parametrize(("free", "level"), [(100.1, 2), (99.9, 1), (50, 0), (5, 0)])
def test_heterofl_trains_the_level_that_fits(free: float, level: int) -> None:
    algorithm = HeteroFL(training=TRAINING)
    site = tiny_site(algorithm, TinyNet(conv=16, hidden=64))  # levels of about 26, 52 and 100 %
    assignment = assignments_by_model(algorithm, site)["1x"]
    task = algorithm.task(assignment, task_context(site, assignment.client, free))
    assert task.spec == site.pool[level].spec
    assert task.scaler == (0.5, 0.71, 1.0)[level]
    assert task.mask_labels


def test_heterofl_rounds_widths_up() -> None:
    """VGG16 at 0.71: ceil(45.44) = 46, ceil(90.88) = 91, ceil(181.76) = 182, ceil(363.52), ceil(2908.16)."""
    small, middle, full = tiny_pool(HeteroFL(), VGG)
    kept = VGG.layout()
    groups = ("conv1", "conv3", "conv5", "conv13", "fc1")
    assert [kept.width(middle.spec, g) for g in groups] == [46, 91, 182, 364, 2909]
    assert [kept.width(small.spec, g) for g in ("conv1", "conv13", "fc2", "classes")] == [32, 256, 2048, 10]
    assert full.params == 33_646_666
    by_hand = sum(math.prod(t.shape) for t in VGG.module(middle.spec).state_dict().values())
    assert middle.params == by_hand
    assert middle.share == pytest.approx(0.505, abs=0.002)
    assert small.share == pytest.approx(0.2506, abs=0.0005)


@pytest.mark.parametrize("widths", [(0.5, 0.5, 1.0), (1.0, 0.5), (0.5, 0.9), ()])
@pytest.mark.parametrize("kind", [HeteroFL, FjORD, Decoupled])
def test_wrong_widths_are_refused(kind: Any, widths: tuple[float, ...]) -> None:
    with pytest.raises(PoolError):
        tiny_pool(kind(widths=widths), TinyNet())


def test_scalefl_exit_weights_and_teacher() -> None:
    """Three outputs: 1/6, 2/6, 3/6; two: 1/3, 2/3; one: 1."""
    algorithm = ScaleFL(training=TRAINING, exits=("conv", "fc"), kd_from=2)
    site = tiny_site(algorithm)
    assignments = assignments_by_model(algorithm, site)
    for i, (name, weights) in enumerate(
        {"level1": (1.0,), "level2": (1 / 3, 2 / 3), "level3": (1 / 6, 2 / 6, 3 / 6)}.items()
    ):
        assignment = replace(assignments[name], round=2)
        task = algorithm.task(assignment, task_context(site, assignment.client, 150.0))
        assert task.exits is not None
        assert task.exits.weights == pytest.approx(weights)
        assert (task.exits.kd_weight, task.exits.teachers) == (0.05, "last")
        early = algorithm.task(replace(assignment, round=1), task_context(site, assignment.client, 150.0))
        assert early.exits is not None and early.exits.kd_weight == 0, "not before kd_from"
        assert contains(site.family.layout(), site.pool[-1].spec, site.pool[i].spec)


def test_depthfl_cuts_depth_alone() -> None:
    algorithm = DepthFL()
    family = algorithm.network(VGG)
    pool = tiny_pool(algorithm, family)
    assert family.exits == ("conv11", "fc1")  # type: ignore[attr-defined]
    assert [m.spec.keep for m in pool] == [()] * 3
    assert all(m.ensemble for m in pool)
    assert [m.params for m in pool] == [10_006_602, 16_870_484, 33_692_766]
    for m in pool:
        assert m.params == sum(math.prod(t.shape) for t in family.module(m.spec).state_dict().values())


@pytest.mark.parametrize(("round", "weight"), [(0, math.exp(-5)), (150, math.exp(-1.25)), (300, 1.0), (900, 1.0)])
def test_depthfl_distillation_weight_rises(round: int, weight: float) -> None:
    algorithm = DepthFL(training=TRAINING, exits=("conv", "fc"))
    site = tiny_site(algorithm)
    assignment = replace(assignments_by_model(algorithm, site)["level3"], round=round)
    task = algorithm.task(assignment, task_context(site, assignment.client, 150.0))
    assert task.exits is not None
    assert task.exits.kd_weight == pytest.approx(weight)
    assert (task.exits.weights, task.exits.teachers, task.proximal) == ((1.0, 1.0, 1.0), "all", 0.1)


def test_feddyn_by_hand() -> None:
    """alpha = 0.1, K = 20 clients. Two of them bring w + 1 and w + 3: the mean is w + 2,
    g = -0.1 and -0.3, h = -0.1/20 * (1 + 3) = -0.02, and the new model w + 2 - h/0.1 = w + 2.2.
    Next round the first brings w' + 1 alone: g = -0.2, h = -0.02 - 0.005 = -0.025, w' + 1 + 0.25."""
    algorithm = DepthFL(training=TRAINING, exits=("conv", "fc"), alpha=0.1)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    base = algorithm.plan(state, context_of(site, 0, SEED))
    w = state.params
    first, second = (replace(base.assignments[0], client=c, spec=FULL, payload=w, level=2) for c in (4, 9))
    plan = replace(base, assignments=(first, second))
    after = algorithm.merge(
        state, plan, [update_of(first, FULL, up(w, 1)), update_of(second, FULL, up(w, 3), 50)], ServerSite(site)
    )
    for name, old in w.items():
        torch.testing.assert_close(after.memory[f"4/{name}"], torch.full_like(old, -0.1))
        torch.testing.assert_close(after.memory[f"9/{name}"], torch.full_like(old, -0.3))
        torch.testing.assert_close(after.h[name], torch.full_like(old, -0.02))
        torch.testing.assert_close(after.params[name], old + 2.2)
    then = replace(first, payload=after.params)
    again = algorithm.merge(
        after, replace(plan, assignments=(then,)), [update_of(then, FULL, up(after.params, 1))], ServerSite(site)
    )
    for name, old in after.params.items():
        torch.testing.assert_close(again.memory[f"4/{name}"], torch.full_like(old, -0.2), rtol=1e-4, atol=1e-6)
        assert torch.equal(again.memory[f"9/{name}"], after.memory[f"9/{name}"])
        torch.testing.assert_close(again.params[name], old + 1.25)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_feddyn_remembers_changes_from_the_decoded_weights(clip: float | None) -> None:
    """Clients that return what they received have moved nothing, however coarse the codec is and wherever updates are
    cut off. Those that move it by 0.5: g = -0.1 * 0.5, h the mean of the twenty g."""
    algorithm = DepthFL(training=TRAINING, exits=("conv", "fc"), alpha=0.1, aggregation=Mean(clip=clip))
    site = tiny_site(algorithm)
    state, server = start_of(algorithm, site), ServerSite(site)
    plan = coding.encode_plan(algorithm.plan(state, context_of(site, 0)), site.pool, Codecs(down=Qsgd(bits=4)), SEED)
    assert any(
        not torch.equal(assignment.payload[n], state.params[n])
        for assignment in plan.assignments
        for n in assignment.payload
    )
    still = algorithm.merge(state, plan, [update_of(o, o.spec, dict(o.payload)) for o in plan.assignments], server)
    assert not any(tensor.any() for tensor in (*still.memory.values(), *still.h.values()))
    moved = algorithm.merge(state, plan, [update_of(o, o.spec, up(o.payload, 0.5)) for o in plan.assignments], server)
    for name, h in moved.h.items():
        own = [moved.memory[f"{o.client}/{name}"] for o in plan.assignments if name in o.payload]
        torch.testing.assert_close(h, sum(own) / 20, rtol=1e-4, atol=1e-7)
        assert clip or all(torch.allclose(g, torch.full_like(g, -0.05), rtol=1e-4) for g in own)


def test_feddyn_ignores_running_statistics() -> None:
    algorithm = DepthFL(training=TRAINING, exits=("conv1", "conv2"))
    site = tiny_site(algorithm, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
    state = start_of(algorithm, site)
    base = algorithm.plan(state, context_of(site, 0, SEED))
    assignment = replace(base.assignments[0], spec=FULL, payload=state.params, level=2)
    came = [update_of(assignment, FULL, {n: torch.full_like(t, 0.25) for n, t in state.params.items()})]
    after = algorithm.merge(state, replace(base, assignments=(assignment,)), came, ServerSite(site))
    statistics = [name for name in state.params if "running" in name]
    assert len(statistics) == 6
    for name in statistics:
        assert torch.equal(after.params[name], torch.full_like(state.params[name], 0.25))
        assert name not in after.h
        assert f"{assignment.client}/{name}" not in after.memory


def up(params: Params, by: float) -> Params:
    return {name: t + by for name, t in params.items()}


def test_depthfl_sends_each_client_its_memory() -> None:
    algorithm = DepthFL(training=TRAINING, exits=("conv", "fc"))
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    seen: set[int] = set()
    for round in range(4):
        plan = algorithm.plan(state, context_of(site, round, SEED))
        for assignment in plan.assignments:
            assert bool(assignment.memory) == (assignment.client in seen)
            assert assignment.memory.keys() <= assignment.payload.keys()
            for name, g in assignment.memory.items():
                assert torch.equal(g, state.memory[f"{assignment.client}/{name}"])
        results = [execute(algorithm, assignment, site) for assignment in plan.assignments]
        seen |= {o.client for o in results if isinstance(o, ClientUpdate)}
        state = algorithm.merge(state, plan, results, ServerSite(site))


def test_fjord_trains_all_widths_up_to_the_largest_that_fits() -> None:
    algorithm = FjORD(training=TRAINING)
    site = tiny_site(algorithm, TinyNet(conv=20, hidden=60))
    assignment = assignments_by_model(algorithm, site)["1x"]
    for free in (5.0, 20.0, 40.0, 70.0, 120.0):
        task = algorithm.task(assignment, task_context(site, assignment.client, free))
        fitting = [m for m in site.pool if 100 * m.share < free] or list(site.pool[:1])
        assert task.widths == tuple(m.spec for m in fitting)
        assert task.spec == fitting[-1].spec
    assert [m.name for m in site.pool] == ["0.2x", "0.4x", "0.6x", "0.8x", "1x"]
    assert all(m.reported for m in site.pool)


def test_decoupled_levels_share_nothing() -> None:
    """Only clients of level 1 come back: the others' weights stay to the bit, level 1's is their mean."""
    algorithm = Decoupled(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, SEED))
    small = site.pool[0]
    came = [
        update_of(o, o.spec, up(o.payload, i + 1.0), 10 * (i + 1))
        if site.pool[o.level].name == small.name
        else failure_of(o)
        for i, o in enumerate(plan.assignments)
    ]
    after = algorithm.merge(state, plan, came, ServerSite(site))
    assert_same_bits(after.params, state.params)
    assert_same_bits(own(after, site, 1), own(state, site, 1))
    weights = [10 * (i + 1) for i, o in enumerate(plan.assignments) if site.pool[o.level].name == small.name]
    by = sum(w * w / 10 for w in weights) / sum(weights)
    for name, tensor in own(after, site, 0).items():
        torch.testing.assert_close(tensor, own(state, site, 0)[name] + by)


def own(state: Any, site: Site, level: int) -> Params:
    return weights_of(published(state), site.family.layout(), site.pool[level])


def test_decoupled_selects_k_capable_devices_per_level() -> None:
    algorithm = Decoupled(training=replace(TRAINING, fraction=0.1))
    site = tiny_site(algorithm, fleet=tiny_fleet(40))
    state = start_of(algorithm, site)
    for round in range(20):
        assignments = algorithm.plan(state, context_of(site, round, SEED)).assignments
        assert sorted(site.pool[o.level].name for o in assignments) == ["0.5x"] * 4 + ["0.71x"] * 4 + ["1x"] * 4
        for assignment in assignments:
            share = next(m.share for m in site.pool if m.name == site.pool[assignment.level].name)
            assert site.fleet[assignment.client].most > 100 * share


def test_decoupled_cannot_prune_on_the_device() -> None:
    algorithm = Decoupled(training=TRAINING)
    site = tiny_site(algorithm)
    assignments = assignments_by_model(algorithm, site)
    with pytest.raises(ClientError):
        algorithm.task(assignments["1x"], task_context(site, 0, 99.998))
    assert algorithm.task(assignments["0.5x"], task_context(site, 0, 5.0)).spec == site.pool[0].spec
    with pytest.raises(ClientError):
        replace(algorithm, on_too_small="fail").task(assignments["0.5x"], task_context(site, 0, 5.0))
