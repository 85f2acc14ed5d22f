"""Adaptive Federated Optimization (Reddi et al., ICLR 2021), Algorithm 2, worked by hand for two rounds; and every
algorithm with every server optimiser and every selection."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import lru_cache
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.aggregation.server_opt import Adagrad, Adam, Average, Server, Yogi
from fl_engine.algorithms import ALGORITHMS, AdaptiveFL, Decoupled, FedOpt
from fl_engine.algorithms.pooled import PooledState
from fl_engine.algorithms.training import Training
from fl_engine.core.errors import ConfigError
from fl_engine.core.state import pack, unpack
from fl_engine.core.types import (
    FULL,
    Axis,
    ClientUpdate,
    Device,
    Outcome,
    ParamLayout,
    Params,
    PoolModel,
    RoundPlan,
    Slot,
    SubmodelSpec,
    WorkOrder,
)
from fl_engine.exchange.client import Site, execute
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Curiosity, ResourceTable, Uniform
from fl_engine.storage.store import decode, encode
from fl_engine.testing.tiny import (
    SEED,
    assert_same_bits,
    assert_same_orders,
    context_of,
    failure_of,
    on_devices_alone,
    start_of,
    tiny_site,
    update_of,
)
from fl_engine.training.evaluation import published
from flexfleet import config as configs
from flexfleet.config import load_config

law = settings(max_examples=40)
RULES: list[Adagrad | Adam | Yogi] = [Adagrad(), Adam(), Yogi()]


# ============================================================================================= two rounds by hand
# Four weights and the running means of a batch norm, one per channel. Channel 3 is not trained in the first round,
# channel 2 not in the second.
LAYOUT = ParamLayout({"g": 4}, {"w": Slot("b", (Axis("g"),)), "bn.running_mean": Slot("b", (Axis("g"),))})
OLD = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0]), "bn.running_mean": torch.tensor([0.0, 10.0, 20.0, 30.0])}
POOL = (PoolModel("full", FULL, 8, 1.0, 4, dispatched=True, reported=True),)
SERVER = ServerSite(tiny_site(FedOpt()))
FLEET = tuple(Device(c, "any", 110.0, 0.0) for c in range(3))
FIRST, SECOND = SubmodelSpec.of({"g": 3}), SubmodelSpec.of({"g": [0, 1, 3]})

ADAM = Adam(lr=0.1, b1=0.9, b2=0.99, tau=0.1)
YOGI = Yogi(lr=0.1, b1=0.9, b2=0.99, tau=0.1)
ADAGRAD = Adagrad(lr=0.1, b1=0.0, tau=0.1)
ADAGRAD_WITH_MOMENTUM = Adagrad(lr=0.1, b1=0.5, tau=0.1)


def state_before() -> PooledState:
    return FedOpt().init({name: t.clone() for name, t in OLD.items()}, LAYOUT, FLEET, POOL, SERVER)


def orders_of(round: int, clients: int) -> tuple[WorkOrder, ...]:
    return tuple(WorkOrder(round, client, FULL, {}, client, 0) for client in range(clients))


def after_one(server: Server) -> PooledState:
    """Client 0 has one sample, client 1 three, client 2 fails. Means: (2 + 3 * 1.2) / 4 = 1.4, (1.2 + 3 * 2) / 4 = 1.8,
    (3.2 + 3 * 3) / 4 = 3.05: the pseudo-gradient is 0.4, -0.2, 0.05. Running means: 4, 12, 20."""
    first, second, third = orders_of(0, 3)
    a = {"w": torch.tensor([2.0, 1.2, 3.2]), "bn.running_mean": torch.tensor([1.0, 12.0, 23.0])}
    b = {"w": torch.tensor([1.2, 2.0, 3.0]), "bn.running_mean": torch.tensor([5.0, 12.0, 19.0])}
    outcomes: list[Outcome] = [update_of(first, FIRST, a, 1), update_of(second, FIRST, b, 3), failure_of(third)]
    return FedOpt(server=server).merge(state_before(), RoundPlan(0, (first, second, third)), outcomes, SERVER)


def after_two(server: Server) -> tuple[PooledState, PooledState]:
    """One client, which moves channels 0, 1 and 3 by 0.1, 0.3 and 0.2."""
    state = after_one(server)
    moved = state.params["w"][[0, 1, 3]] + torch.tensor([0.1, 0.3, 0.2])
    payload = {"w": moved, "bn.running_mean": torch.tensor([7.0, 8.0, 9.0])}
    (order,) = orders_of(1, 1)
    return state, FedOpt(server=server).merge(
        state, RoundPlan(1, (order,)), [update_of(order, SECOND, payload, 9)], SERVER
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
    pytest.param(
        ADAGRAD_WITH_MOMENTUM,
        # 0.5 * delta, then 0.5 * m + 0.5 * delta.
        [0.2, -0.1, 0.025, 0.0],
        [0.17, 0.05, 0.0125, 0.01],
        [0.15, 0.1, 0.025, 0.1],
        [0.18, 0.14, 0.0125, 0.05],
        id="adagrad with momentum",
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


def test_two_rounds_in_decimals() -> None:
    """The same with the square roots worked out: sqrt(0.0115) = 0.107238, sqrt(0.0103) = 0.101489, ..."""
    one, two = after_two(ADAM)
    # 1 + 0.004 / 0.207238, 2 - 0.002 / 0.201489, 3 + 0.0005 / 0.199624.
    assert one.params["w"].tolist() == pytest.approx([1.019301, 1.990074, 3.002505, 4.0], abs=2e-6)
    # + 0.0046 / 0.207168, + 0.0012 / 0.205342, -, + 0.002 / 0.201489.
    assert two.params["w"].tolist() == pytest.approx([1.041506, 1.995918, 3.002505, 4.009926], abs=2e-6)
    (one, two) = after_two(ADAGRAD)
    # 1 + 0.04 / 0.512311, 2 - 0.02 / 0.323607, 3 + 0.005 / 0.211803.
    assert one.params["w"].tolist() == pytest.approx([1.078078, 1.938197, 3.023607, 4.0], abs=2e-6)
    # + 0.01 / 0.524264, + 0.03 / 0.474166, -, + 0.02 / 0.323607.
    assert two.params["w"].tolist() == pytest.approx([1.097152, 2.001466, 3.023607, 4.061803], abs=2e-6)
    one, _ = after_two(YOGI)
    # 1 + 0.004 / 0.207703, 2 - 0.002 / 0.201980, 3 + 0.0005 / 0.199875.
    assert one.params["w"].tolist() == pytest.approx([1.019258, 1.990098, 3.002502, 4.0], abs=2e-6)


def test_fedavg_takes_the_mean() -> None:
    one, two = after_two(Average())
    close(one.params["w"], [1.4, 1.8, 3.05, 4.0])
    close(two.params["w"], [1.5, 2.1, 3.05, 4.2])
    assert one.moments == two.moments == {}


@pytest.mark.parametrize("server", [Average(), ADAM, YOGI, ADAGRAD], ids=lambda s: s.name)
def test_running_statistics_are_averaged(server: Server) -> None:
    """(1 + 3 * 5) / 4 = 4, 12, (23 + 3 * 19) / 4 = 20, 30 as it was; then 7, 8, 20, 9. They have no moments."""
    one, two = after_two(server)
    assert one.params["bn.running_mean"].tolist() == [4, 12, 20, 30]
    assert two.params["bn.running_mean"].tolist() == [7, 8, 20, 9]
    assert set(two.moments) == (set() if server == Average() else {"m/w", "v/w"})


@pytest.mark.parametrize("server", [ADAM, YOGI, ADAGRAD], ids=lambda s: s.name)
def test_elements_that_nobody_trained_keep_value_and_moments_bit_for_bit(server: Server) -> None:
    one, two = after_two(server)
    assert one.params["w"][3] == 4
    assert one.moments["m/w"][3] == 0
    close(one.moments["v/w"][3:], [0.01])
    for name in ("m/w", "v/w"):
        assert torch.equal(two.moments[name][2], one.moments[name][2])
    assert torch.equal(two.params["w"][2], one.params["w"][2]), "its momentum does not carry it on"


@pytest.mark.parametrize("server", [Average(), ADAM, YOGI, ADAGRAD], ids=lambda s: s.name)
def test_a_round_in_which_all_fail_moves_nothing(server: Server) -> None:
    state = after_one(server)
    plan = RoundPlan(1, orders_of(1, 2))
    found = FedOpt(server=server).merge(state, plan, [failure_of(o) for o in plan.orders], SERVER)
    assert_same_bits(found.params, state.params)
    assert_same_bits(found.moments, state.moments)


def test_a_merge_leaves_the_old_state_alone() -> None:
    state = after_one(ADAM)
    before = pack(state)
    kept = {name: t.clone() for name, t in before[0].items()}
    (order,) = orders_of(1, 1)
    update = update_of(order, SECOND, {"w": torch.zeros(3), "bn.running_mean": torch.zeros(3)}, 9)
    FedOpt(server=ADAM).merge(state, RoundPlan(1, (order,)), [update], SERVER)
    assert_same_bits(pack(state)[0], kept)


def test_defaults_are_those_of_the_paper() -> None:
    """Sec. 5 and App. D: b1 = 0.9 and b2 = 0.99, for FedAdagrad b1 = 0; tau = 1e-3."""
    assert [(r.name, r.b1, r.tau) for r in RULES] == [("adagrad", 0, 1e-3), ("adam", 0.9, 1e-3), ("yogi", 0.9, 1e-3)]
    assert Adam().b2 == Yogi().b2 == 0.99
    assert (Adagrad().lr, Adam().lr, Yogi().lr) == (0.1, 0.01, 0.01), "ours: the paper's are tuned for each task"
    assert FedOpt().server == Adam()


# ------------------------------------------------------------------------------------------------ bias correction
CORRECTED: list[Adam | Yogi] = [
    Adam(lr=0.1, b1=0.9, b2=0.999, tau=1e-8, bias_correction=True),
    Adam(lr=0.01, b1=0.5, b2=0.99, tau=1e-3, bias_correction=True),
    Adam(lr=1.0, b1=0.0, b2=0.9, tau=0.1, bias_correction=True),
]


@pytest.mark.parametrize("rule", CORRECTED, ids=str)
def test_with_bias_correction_adam_is_torchs(rule: Adam) -> None:
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


def test_bias_correction_by_hand_counts_the_steps_of_each_element() -> None:
    """Channel 2 takes part in the first round alone, channel 3 in the second alone: there t is 1, elsewhere 2."""
    for server in (replace(ADAM, bias_correction=True), replace(YOGI, bias_correction=True)):
        one, two = after_two(server)
        # m = 0.1 * delta and v = 0.01 * delta^2, over 0.1 and 0.01: lr * delta / (|delta| + tau).
        first = [old + 0.1 * d / (abs(d) + 0.1) for old, d in zip((1, 2, 3), (0.4, -0.2, 0.05), strict=True)]
        close(one.params["w"], [*first, 4.0])
        # m: 0.9 * m + 0.1 * delta over 1 - 0.81; v over 1 - 0.9801. Yogi's v: 0.0016 is below 0.01 and 0.0004 below
        # 0.09, so both grow by 0.01 * delta^2.
        m = [(0.9 * 0.04 + 0.1 * 0.1) / 0.19, (0.9 * -0.02 + 0.1 * 0.3) / 0.19]
        before = [0.0016, 0.0004] if server.name == "yogi" else [0.99 * 0.0016, 0.99 * 0.0004]
        v = [(b + 0.01 * d * d) / 0.0199 for b, d in zip(before, (0.1, 0.3), strict=True)]
        moved = [x + 0.1 * a / (sqrt(c) + 0.1) for x, a, c in zip(first, m, v, strict=False)]
        close(two.params["w"], [*moved, first[2], 4 + 0.1 * 0.2 / 0.3])
        assert two.moments["t/w"].tolist() == [2, 2, 1, 1]


# -------------------------------------------------------------------------------------------------- laws of a step
def numbers(draw: st.DrawFn, low: float, high: float, count: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.floats(low, high, width=32), min_size=count, max_size=count)))


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[Tensor, Tensor]]:
    """Pseudo-gradients of a few rounds, and which elements were trained."""
    masks = st.lists(st.booleans(), min_size=6, max_size=6).map(torch.tensor)
    return [(numbers(draw, -2, 2, 6), draw(masks)) for _ in range(draw(st.integers(1, 5)))]


@law
@given(rounds=rounds())
def test_average_is_the_identity_on_the_mean(rounds: list[tuple[Tensor, Tensor]]) -> None:
    for mean, trained in rounds:
        moments, new = Average().step({}, {"w": torch.ones(6)}, {"w": mean}, {"w": trained})
        assert moments == {}
        assert torch.equal(new["w"], mean)


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
@law
@given(rounds=rounds())
def test_steps_are_those_of_one_element_at_a_time(
    rule: Adagrad | Adam | Yogi, rounds: list[tuple[Tensor, Tensor]]
) -> None:
    """Algorithm 2 in plain Python numbers, whatever is trained when."""
    params: Params = {"w": torch.zeros(6)}
    moments: Params = {}
    x, m, v = [0.0] * 6, [0.0] * 6, [rule.tau**2] * 6
    for delta, trained in rounds:
        mean = {"w": params["w"] + delta}
        d = (mean["w"] - params["w"]).tolist()
        moments, new = rule.step(moments, params, mean, {"w": trained})
        for i in range(6):
            if not trained[i]:
                continue
            m[i] = rule.b1 * m[i] + (1 - rule.b1) * d[i]
            square = d[i] ** 2
            if isinstance(rule, Adagrad):
                v[i] = v[i] + square
            elif isinstance(rule, Adam):
                v[i] = rule.b2 * v[i] + (1 - rule.b2) * square
            else:
                sign = (v[i] > square) - (v[i] < square)
                v[i] = v[i] - (1 - rule.b2) * square * sign
            x[i] += rule.lr * m[i] / (math.sqrt(v[i]) + rule.tau)
        params = new
        assert params["w"].tolist() == pytest.approx(x, rel=1e-3, abs=1e-5)
        assert moments["m/w"].tolist() == pytest.approx(m, rel=1e-3, abs=1e-6)
        # Single precision; where Yogi's v and delta^2 are equal but for rounding, v may go either way.
        assert moments["v/w"].tolist() == pytest.approx(v, rel=2.1e-2, abs=1e-9)


# ======================================================================= every algorithm, optimiser and selection
QUICK = Training(fraction=0.1, epochs=1, batch_size=8, lr=0.05)
SERVERS: list[Server] = [Average(), Adagrad(), Adam(), Yogi(), Adam(b2=0.999, tau=1e-8, bias_correction=True)]
SELECTIONS: list[Any] = [
    Uniform(), Uniform(model="random"), Uniform(model="largest"), ResourceTable(), Curiosity(per_type=1),
]  # fmt: skip


def combinations() -> Iterator[Any]:
    """Each algorithm with each selection, the optimisers in turn: each algorithm meets each of them, too, and each pair
    of optimiser and selection occurs."""
    for i, name in enumerate(sorted(ALGORITHMS)):
        for j, selection in enumerate(SELECTIONS):
            server = SERVERS[(i + j) % len(SERVERS)]
            yield pytest.param(name, selection, server, id=f"{name}-{server.name}-{j}-{selection.name}")


def test_all_pairs_are_there() -> None:
    found = [p.values for p in combinations()]
    counts = (len(ALGORITHMS), len(SELECTIONS), len(SERVERS))
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert len({(str(p[left]), str(p[right])) for p in found}) == counts[left] * counts[right]


@lru_cache(maxsize=32)
def site_of(name: str) -> Site:
    """Neither the selection nor the server's optimiser changes it."""
    kind: Any = ALGORITHMS[name]
    return tiny_site(kind(training=QUICK))


@pytest.mark.parametrize(("name", "selection", "server"), combinations())
def test_two_rounds_with_every_optimiser_and_selection(name: str, selection: Any, server: Server) -> None:
    kind: Any = ALGORITHMS[name]
    options = {"server": server} if "server" in {f.name for f in fields(kind)} else {}
    algorithm = on_devices_alone(kind(training=QUICK, selection=selection, **options))
    site = site_of(name)
    fresh = state = start_of(algorithm, site)
    trained = 0
    for round in range(2):
        plan = algorithm.plan(state, context_of(site, round, SEED))
        assert plan.orders
        clients = [o.client for o in plan.orders]
        assert len(set(clients)) == len(clients)
        outcomes = [execute(algorithm, order, site) for order in plan.orders]
        trained += sum(isinstance(o, ClientUpdate) for o in outcomes)
        state = algorithm.merge(state, plan, outcomes, SERVER)
    for tensor in published(state).values():
        assert torch.isfinite(tensor).all()
    if trained:
        old, new = published(fresh), published(state)
        assert any(not torch.equal(old[n], new[n]) for n in old)
    # With moments and tables, on disk and back.
    tensors, rest = pack(state)
    found = unpack(fresh, decode(encode(tensors), "state"), json.loads(json.dumps(rest, allow_nan=False)))
    again = pack(found)
    assert_same_bits(again[0], tensors)
    assert again[1] == rest
    assert_same_orders(
        algorithm.plan(found, context_of(site, 2, SEED)), algorithm.plan(state, context_of(site, 2, SEED))
    )
    if trained and options:
        moments = [n for n in tensors if n.startswith("moments/")]
        assert bool(moments) == (server != Average())
        assert bool(rest["tables"]) == isinstance(selection, Curiosity)


@pytest.mark.parametrize("server", [ADAM, YOGI, ADAGRAD], ids=lambda s: s.name)
def test_a_state_that_was_stored_goes_on_as_if_it_had_not_been(server: Server) -> None:
    """Without its moments, the next step would be another one."""
    one, two = after_two(server)
    tensors, rest = pack(one)
    found = unpack(state_before(), decode(encode(tensors), "state"), json.loads(json.dumps(rest)))
    assert_same_bits(found.moments, one.moments)
    (order,) = orders_of(1, 1)
    moved = one.params["w"][[0, 1, 3]] + torch.tensor([0.1, 0.3, 0.2])
    payload = {"w": moved, "bn.running_mean": torch.tensor([7.0, 8.0, 9.0])}
    update = update_of(order, SECOND, payload, 9)
    going_on = [FedOpt(server=server).merge(s, RoundPlan(1, (order,)), [update], SERVER) for s in (found, one)]
    for state in going_on:
        assert_same_bits(state.params, two.params)
        assert_same_bits(state.moments, two.moments)
    forgotten = FedOpt(server=server).merge(replace(one, moments={}), RoundPlan(1, (order,)), [update], SERVER)
    assert not torch.equal(forgotten.params["w"], two.params["w"])


def test_levels_of_decoupled_have_moments_of_their_own() -> None:
    """Only the middle level's clients bring something back, twice: no other level moves or starts moments. Each time
    delta is 1: m = 0.1, then 0.19; v = 0.99e-6 + 0.01 = 0.01000099, then 0.99 * v + 0.01 = 0.0199009801; lr = 0.01."""
    algorithm = Decoupled(training=QUICK, server=Adam())
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    steps = [0.01 * 0.1 / (sqrt(0.01000099) + 1e-3), 0.01 * 0.19 / (sqrt(0.0199009801) + 1e-3)]
    for round, step in enumerate(steps):
        plan = algorithm.plan(state, context_of(site, round, SEED))
        middle = [o for o in plan.orders if site.pool[o.level].name == "0.71x"]
        assert middle
        updates = [update_of(o, o.spec, {n: t + 1 for n, t in o.payload.items()}) for o in middle]
        failed = [failure_of(o) for o in plan.orders if o not in middle]
        found = algorithm.merge(state, plan, [*updates, *failed], SERVER)
        assert {n.partition("/")[0] for n in found.moments} == {"0.71x"}
        assert_same_bits(found.params, state.params)
        assert found.levels.keys() == state.levels.keys()
        for name, tensor in found.levels.items():
            if name.startswith("0.71x/"):
                torch.testing.assert_close(tensor, state.levels[name] + step, rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(tensor, state.levels[name]), name
        state = found


# ============================================================================================ in a configuration
def configured(*sets: str, name: str = "heterofl") -> Any:
    config = load_config(None, [f"algorithm.name={name}", *sets])
    return configs.algorithm(config)


def test_a_server_optimiser_is_configured_by_name() -> None:
    found = configured("algorithm.server.name=yogi", "algorithm.server.lr=0.02")
    assert found.server == Yogi(lr=0.02)
    assert configured("algorithm.server.lr=0.02", "algorithm.server.name=yogi").server == Yogi(lr=0.02)
    adam = ("algorithm.server.name=adam", "algorithm.server.b1=0.5", "algorithm.server.tau=1e-4")
    assert configured(*adam).server == Adam(b1=0.5, tau=1e-4)
    assert configured("algorithm.server.name=adagrad").server == Adagrad()
    torchs = [f"algorithm.server.{of}" for of in ("name=adam", "b2=0.999", "tau=1e-8", "bias_correction=true")]
    assert configured(*torchs, name="fedopt").server == Adam(b2=0.999, tau=1e-8, bias_correction=True)
    assert configured("algorithm.server.name=average").server == configured().server == Average()
    assert configured(name="fedopt").server == Adam()


def test_a_selection_is_configured_by_name() -> None:
    curiosity = ("algorithm.selection.name=curiosity", "algorithm.selection.score=c", "algorithm.selection.per_type=1")
    assert configured(*curiosity).selection == Curiosity(score="c", per_type=1)
    assert configured("algorithm.selection.name=resource_table").selection == ResourceTable()
    largest = ("algorithm.selection.name=uniform", "algorithm.selection.model=largest")
    assert configured(*largest, name="adaptivefl").selection == Uniform(model="largest")
    assert configured(name="adaptivefl") == AdaptiveFL(training=configured().training)


WRONG = [
    # what is set; what the error has to name.
    (["algorithm.server.name=yogy"], ["algorithm.server", "'yogy'", "yogi", "adam", "adagrad", "average"]),
    (["algorithm.server.name=yogi", "algorithm.server.beta=0.9"], ["algorithm.server.beta", "unknown parameter"]),
    (["algorithm.server.name=average", "algorithm.server.lr=1"], ["algorithm.server.lr", "unknown parameter"]),
    (["algorithm.server.name=adagrad", "algorithm.server.b2=0.9"], ["algorithm.server.b2", "unknown parameter"]),
    (["algorithm.server.name=yogi", "algorithm.server.lr=0"], ["algorithm.server.lr", "greater than 0", "got 0"]),
    (["algorithm.server.name=yogi", "algorithm.server.lr=.inf"], ["algorithm.server.lr"]),
    (["algorithm.server.name=yogi", "algorithm.server.lr=fast"], ["algorithm.server.lr", "number", "'fast'"]),
    (["algorithm.server.name=adam", "algorithm.server.b1=1"], ["algorithm.server.b1", "less than 1", "got 1"]),
    (["algorithm.server.name=adam", "algorithm.server.b2=-0.1"], ["algorithm.server.b2", "-0.1"]),
    (["algorithm.server.name=adam", "algorithm.server.tau=0"], ["algorithm.server.tau", "greater than 0"]),
    (["algorithm.server.lr=0.1"], ["algorithm.server", "name"]),
    (["algorithm.server=yogi"], ["algorithm.server", "'yogi'"]),
    (["algorithm.server=null"], ["algorithm.server"]),
    (["algorithm.serwer.name=yogi"], ["algorithm.serwer", "did you mean 'server'"]),
    (["algorithm.selection.name=curious"], ["algorithm.selection", "'curious'", "curiosity", "uniform"]),
    (["algorithm.selection.name=curiosity", "algorithm.selection.scor=c"], ["algorithm.selection.scor", "'score'"]),
    (["algorithm.selection.name=curiosity", "algorithm.selection.score=x"], ["algorithm.selection.score", "'x'"]),
    (["algorithm.selection.name=curiosity", "algorithm.selection.per_type=0"], ["algorithm.selection.per_type", "0"]),
    (["algorithm.selection.name=uniform", "algorithm.selection.model=big"], ["algorithm.selection.model", "'big'"]),
]


@pytest.mark.parametrize(("sets", "said"), WRONG, ids=lambda value: value[-1] if len(value) < 3 else "")
def test_what_is_wrong_in_a_configuration_is_named_with_its_path(sets: list[str], said: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configured(*sets)
    for part in said:
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    for jargon in ("tag", "discriminator", ".yogi.", ".adam.", ".curiosity.", ".uniform."):
        assert jargon not in str(error.value), "how the parser sees it is of no help"
