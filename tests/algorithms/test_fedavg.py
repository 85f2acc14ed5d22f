"""Relatives of FedAvg. FedSGD: one round against a gradient computed by hand. FedOpt: Adaptive Federated Optimization
(Reddi et al., ICLR 2021), Algorithm 2, worked by hand for two rounds."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_engine.aggregation.server_opt import Adagrad, Average, FedAdam, Server, Yogi
from fl_engine.algorithms import FedAvg, FedSGD
from fl_engine.algorithms.pooled import PooledState
from fl_engine.backends import InProcess
from fl_engine.core.errors import ConfigError
from fl_engine.core.steps import Balanced
from fl_engine.core.types import (
    FULL,
    Assignment,
    Axis,
    ClientResult,
    ClientUpdate,
    Device,
    ParamLayout,
    Params,
    PoolModel,
    RoundPlan,
    Slot,
    SubmodelSpec,
)
from fl_engine.exchange.client import Site
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    TinyNet,
    assert_same_bits,
    context_of,
    failure_of,
    start_of,
    tiny_fleet,
    tiny_site,
    update_of,
)

SIZES = (1, 2, 3, 9, 5, 6, 7, 8, 4, 10)
PLAIN = replace(TRAINING, fraction=1.0, momentum=0.5, weight_decay=0.0)


def site_of(algorithm: Any) -> Site:
    return tiny_site(algorithm, TinyNet(), sizes=SIZES, fleet=tiny_fleet(len(SIZES)))


def after_a_round(algorithm: Any, site: Site) -> Params:
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, SEED))
    results = sorted(InProcess(site).run(algorithm, plan), key=lambda result: result.client)
    assert all(isinstance(result, ClientUpdate) and result.metrics["steps"] == 1.0 for result in results)
    return dict(algorithm.merge(state, plan, results, ServerSite(site)).params)


def gradient(site: Site, params: Params, clients: range) -> Params:
    network = site.family.module()
    network.load_state_dict(params)
    network.train()
    rows = torch.cat([torch.from_numpy(site.partition.clients[client]) for client in clients])
    x, y = site.data.normalise(site.data.train_x[rows]), site.data.train_y[rows]
    torch.nn.functional.cross_entropy(network(x), y).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_a_round_is_one_gradient_step_on_all_data() -> None:
    """w - lr * sum_k (n_k / n) grad F_k(w): the gradient of the mean loss over all samples, whoever holds them."""
    algorithm = FedSGD(training=PLAIN)
    site = site_of(algorithm)
    start = dict(start_of(algorithm, site).params)
    stepped, grads = after_a_round(algorithm, site), gradient(site, start, range(len(SIZES)))
    assert grads.keys() == start.keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(stepped[name], start[name] - PLAIN.lr * grad, rtol=0, atol=2e-7)


def test_local_work_of_training_is_ignored() -> None:
    other = replace(PLAIN, epochs=7, batch_size=3, drop_last=False, sampler=Balanced(1.0))
    one, two = FedSGD(training=PLAIN), FedSGD(training=other)
    assert_same_bits(after_a_round(one, site_of(one)), after_a_round(two, site_of(two)))


def test_client_with_too_many_samples_is_refused() -> None:
    algorithm = FedSGD(training=PLAIN, most_samples=9)
    site = site_of(algorithm)
    with pytest.raises(ConfigError):
        algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
    with pytest.raises(ConfigError):
        algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED, samples=()))
    fits = FedSGD(training=PLAIN, most_samples=10)
    assert len(fits.plan(start_of(fits, site), context_of(site, 0, SEED)).assignments) == len(SIZES)


# Four weights and the running means of a batch norm, one per channel. Channel 3 is not trained in the first round,
# channel 2 not in the second.
LAYOUT = ParamLayout({"g": 4}, {"w": Slot("b", (Axis("g"),)), "bn.running_mean": Slot("b", (Axis("g"),))})
OLD = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "bn.running_mean": torch.tensor([0.0, 10.0, 20.0, 30.0])}
POOL = (PoolModel("full", FULL, 8, 1.0, 4, dispatched=True, reported=True),)
SERVER = ServerSite(tiny_site(FedAvg()))
FLEET = tuple(Device(c, "any", 110.0, 0.0) for c in range(3))
FIRST, SECOND = SubmodelSpec.of({"g": 3}), SubmodelSpec.of({"g": [0, 1, 3]})

ADAM = FedAdam(lr=0.1, b1=0.9, b2=0.99, tau=0.1)
YOGI = Yogi(lr=0.1, b1=0.9, b2=0.99, tau=0.1)
ADAGRAD = Adagrad(lr=0.1, b1=0.0, tau=0.1)


def state_before() -> PooledState:
    return FedAvg().init({name: t.clone() for name, t in OLD.items()}, LAYOUT, FLEET, POOL, SERVER)


def orders_of(round: int, clients: int) -> tuple[Assignment, ...]:
    return tuple(Assignment(round, client, FULL, {}, client, 0) for client in range(clients))


def after_one(server: Server) -> PooledState:
    """Client 0 has one sample, client 1 three, client 2 fails. Means: (2 + 3 * 1.2) / 4 = 1.4, (1.2 + 3 * 2) / 4 = 1.8,
    (3.2 + 3 * 3) / 4 = 3.05: the pseudo-gradient is 0.4, -0.2, 0.05. Running means: 4, 12, 20."""
    first, second, third = orders_of(0, 3)
    a = {"w": torch.tensor([2.0, 1.2, 3.2]), "bn.running_mean": torch.tensor([1.0, 12.0, 23.0])}
    b = {"w": torch.tensor([1.2, 2.0, 3.0]), "bn.running_mean": torch.tensor([5.0, 12.0, 19.0])}
    results: list[ClientResult] = [update_of(first, FIRST, a, 1), update_of(second, FIRST, b, 3), failure_of(third)]
    return FedAvg(server=server).merge(state_before(), RoundPlan(0, (first, second, third)), results, SERVER)


def after_two(server: Server) -> tuple[PooledState, PooledState]:
    """One client, which moves channels 0, 1 and 3 by 0.1, 0.3 and 0.2."""
    state = after_one(server)
    moved = state.params["w"][[0, 1, 3]] + torch.tensor([0.1, 0.3, 0.2])
    payload = {"w": moved, "bn.running_mean": torch.tensor([7.0, 8.0, 9.0])}
    (assignment,) = orders_of(1, 1)
    return state, FedAvg(server=server).merge(
        state, RoundPlan(1, (assignment,)), [update_of(assignment, SECOND, payload, 9)], SERVER
    )


def close(tensor: Tensor, expected: list[float]) -> None:
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == pytest.approx(expected, rel=3e-6)


# rule; m and v after the first round (from m = 0 and v = tau^2 = 0.01); m and v after the second.
BY_HAND = [
    pytest.param(
        ADAM,
        # 0.1 * delta.
        [0.04, -0.02, 0.005, 0.0],
        # 0.99 * 0.01 + 0.01 * delta^2, delta^2 = 0.16, 0.04, 0.0025.
        [0.0115, 0.0103, 0.009925, 0.01],
        # 0.9 * m + 0.1 * delta, delta = 0.1, 0.3, -, 0.2.
        [0.046, 0.012, 0.005, 0.02],
        # 0.99 * v + 0.01 * delta^2, delta^2 = 0.01, 0.09, -, 0.04.
        [0.011485, 0.011097, 0.009925, 0.0103],
        id="adam",
    ),
    pytest.param(
        YOGI,
        [0.04, -0.02, 0.005, 0.0],
        # v is below 0.16 and 0.04: it grows by 0.01 * delta^2; it is above 0.0025: it shrinks.
        [0.0116, 0.0104, 0.009975, 0.01],
        [0.046, 0.012, 0.005, 0.02],
        # 0.0116 is above 0.01: less 0.0001; 0.0104 is below 0.09: plus 0.0009; 0.01 is below 0.04: plus 0.0004.
        [0.0115, 0.0113, 0.009975, 0.0104],
        id="yogi",
    ),
    pytest.param(
        ADAGRAD,
        # No momentum: delta itself.
        [0.4, -0.2, 0.05, 0.0],
        # 0.01 + delta^2.
        [0.17, 0.05, 0.0125, 0.01],
        [0.1, 0.3, 0.05, 0.2],
        [0.18, 0.14, 0.0125, 0.05],
        id="adagrad",
    ),
]


@pytest.mark.parametrize(("server", "m1", "v1", "m2", "v2"), BY_HAND)
def test_two_rounds_by_hand(server: Server, m1: list[float], v1: list[float], m2: list[float], v2: list[float]) -> None:
    """new = old + 0.1 * m / (sqrt(v) + 0.1). No bias correction: with it, Adam's first step would be ten times that."""
    one, two = after_two(server)
    close(one.moments["m/w"], m1)
    close(one.moments["v/w"], v1)
    first = [old + 0.1 * m / (sqrt(v) + 0.1) for old, m, v in zip((1, 2, 3), m1[:3], v1[:3], strict=True)]
    close(one.params["w"], [*first, 4.0])
    close(two.moments["m/w"], m2)
    close(two.moments["v/w"], v2)
    second = [old + 0.1 * m / (sqrt(v) + 0.1) for old, m, v in zip((*first, 4.0), m2, v2, strict=True)]
    close(two.params["w"], [second[0], second[1], first[2], second[3]])


@pytest.mark.parametrize("server", [Average(), ADAM, YOGI, ADAGRAD], ids=lambda s: s.name)
def test_running_statistics_are_averaged(server: Server) -> None:
    """(1 + 3 * 5) / 4 = 4, 12, (23 + 3 * 19) / 4 = 20, 30 as it was; then 7, 8, 20, 9. They have no moments."""
    one, two = after_two(server)
    assert one.params["bn.running_mean"].tolist() == [4, 12, 20, 30]
    assert two.params["bn.running_mean"].tolist() == [7, 8, 20, 9]
    assert set(two.moments) == (set() if server == Average() else {"m/w", "v/w"})


CORRECTED: list[FedAdam | Yogi] = [
    FedAdam(lr=0.1, b1=0.9, b2=0.999, tau=1e-8, bias_correction=True),
    FedAdam(lr=0.01, b1=0.5, b2=0.99, tau=1e-3, bias_correction=True),
    FedAdam(lr=1.0, b1=0.0, b2=0.9, tau=0.1, bias_correction=True),
]


@pytest.mark.parametrize("rule", CORRECTED, ids=str)
def test_with_bias_correction_adam_is_torchs(rule: FedAdam) -> None:
    """20 rounds: torch's optimiser, handed old - mean for its gradient, moves alike but for rounding. Betas and eps
    count: those of another rule go elsewhere."""
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(4, 5, generator=generator).requires_grad_()
    params, moments = {"w": theirs.detach().clone()}, dict[str, Tensor]()
    other, forgotten = {"w": theirs.detach().clone()}, dict[str, Tensor]()
    plain = replace(rule, b1=0.8, tau=rule.tau * 100)
    optimizer = torch.optim.Adam([theirs], lr=rule.lr, betas=(rule.b1, rule.b2), eps=rule.tau)
    everything = {"w": torch.ones(4, 5, dtype=torch.bool)}
    for _ in range(20):
        delta = torch.randn(4, 5, generator=generator)
        theirs.grad = -delta
        optimizer.step()
        moments, params = rule.step(moments, params, {"w": params["w"] + delta}, everything)
        forgotten, other = plain.step(forgotten, other, {"w": other["w"] + delta}, everything)
        torch.testing.assert_close(params["w"], theirs.detach(), rtol=1e-5, atol=1e-5 * rule.lr)
    assert not torch.allclose(other["w"], theirs, rtol=1e-3)


def test_bias_correction_counts_steps_of_each_element() -> None:
    """Channel 2 is trained only in the first round and channel 3 only in the second: there t is 1, elsewhere 2."""
    one, two = after_two(replace(ADAM, bias_correction=True))
    # m = 0.1 * delta and v = 0.01 * delta^2, over 0.1 and 0.01: lr * delta / (|delta| + tau).
    first = [old + 0.1 * d / (abs(d) + 0.1) for old, d in zip((1, 2, 3), (0.4, -0.2, 0.05), strict=True)]
    close(one.params["w"], [*first, 4.0])
    # m: 0.9 * m + 0.1 * delta over 1 - 0.81; v over 1 - 0.9801.
    m = [(0.9 * 0.04 + 0.1 * 0.1) / 0.19, (0.9 * -0.02 + 0.1 * 0.3) / 0.19]
    v = [(0.99 * b + 0.01 * d * d) / 0.0199 for b, d in zip((0.0016, 0.0004), (0.1, 0.3), strict=True)]
    moved = [x + 0.1 * a / (sqrt(c) + 0.1) for x, a, c in zip(first, m, v, strict=False)]
    close(two.params["w"], [*moved, first[2], 4 + 0.1 * 0.2 / 0.3])
    assert two.moments["t/w"].tolist() == [2, 2, 1, 1]
