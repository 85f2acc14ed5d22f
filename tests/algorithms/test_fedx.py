"""FedX: which sub-network and how many bits a device gets, the merge by hand, and the server's training after it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import FedX
from fl_engine.algorithms.fedx import Assigned
from fl_engine.algorithms.fine_tuning import FineTuning, fine_tuned, tuned
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError, PoolError
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, Codecs, Params, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.preparation.submodel_search import Candidate
from fl_engine.preparation.supernet import Supernet
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Curiosity, Oort, ResourceTable, Uniform
from fl_engine.selection.capacity import level_of
from fl_engine.testing.tiny import TRAINING, TinyNet, assert_same_bits, context_of, start_of, tiny_site, update_of

SOME = {"weak": Assigned("small", 11), "medium": Assigned("small", 9), "strong": Assigned("large", 8)}


@dataclass(frozen=True)
class NestedNet(TinyNet):
    def nested(self) -> Mapping[str, SubmodelSpec]:
        shallow = ("conv", "fc", "classifier")
        return {
            "small": SubmodelSpec.of({"conv": 4, "hidden": 8}, shallow),
            "4-16": SubmodelSpec.of({"conv": 4, "hidden": 16}, shallow),
            "medium": SubmodelSpec.of({"conv": 4, "hidden": 16}),
            "8-24": SubmodelSpec.of({"hidden": 24}),
            "large": FULL,
        }


def fedx(**options: Any) -> FedX:
    return FedX(**{"training": TRAINING, "widths": (0.4, 0.75, 1.0), "fine_tuning": None, **options})


def made(**chosen: tuple[str, int]) -> Supernet:
    found = {t: Candidate(level=n, bits=b, accuracy=0.5, encoded_bits=1.0) for t, (n, b) in chosen.items()}
    return Supernet(chosen=found)


def with_server(site: Site) -> Site:
    """The server owns what the last client held."""
    *clients, last = site.partition.clients
    cut = np.sort(last[:8])
    parts = replace(site.partition, clients=(*clients, last[:0]), proxy_train=cut[:-2], proxy_test=cut[-2:])
    return replace(site, partition=parts)


def test_a_network_of_nested_sub_networks_brings_its_own() -> None:
    family = NestedNet()
    before = fedx().pool(family, {}, None)  # type: ignore[arg-type]
    assert [m.name for m in before] == ["small", "medium", "large"]
    pool = fedx().pool(family, {"supernet": made(weak=("4-16", 11), strong=("large", 4))}, None)  # type: ignore[arg-type]
    assert [(m.name, m.dispatched) for m in pool] == [
        ("small", False), ("4-16", True), ("medium", False), ("large", True),
    ]  # fmt: skip
    assert [m.spec for m in pool] == [family.nested()[m.name] for m in pool]
    assert pool[1].tiers == (("weak", Codecs(Qsgd(bits=11))),)


def test_two_tiers_may_have_one_sub_network_in_other_bits() -> None:
    pool = fedx(assigned=SOME).pool(TinyNet(), {}, None)  # type: ignore[arg-type]
    small, medium, large = pool
    assert small.tiers == (("weak", Codecs(Qsgd(bits=11))), ("medium", Codecs(Qsgd(bits=9))))
    assert small.codecs == Codecs(Qsgd(bits=11)) and large.codecs == Codecs(Qsgd(bits=8))
    assert (medium.dispatched, medium.tiers, medium.codecs) == (False, (), None)
    sized = coding.sized(pool, TinyNet(), Codecs())
    assert sized[0].bytes < 4 * small.params == sized[0].bytes_up, "returned as trained"
    both = fedx(assigned=SOME, up="quantised", bucket=None).pool(TinyNet(), {}, None)  # type: ignore[arg-type]
    assert both[0].codecs == Codecs(Qsgd(bits=11, bucket=None), Qsgd(bits=11, bucket=None))
    # A tier without bits goes by the run's codecs, whatever another tier of its level has.
    plain = {**SOME, "weak": Assigned("small")}
    algorithm = fedx(assigned=plain)
    site = tiny_site(algorithm)
    sent = coding.sent(algorithm.plan(start_of(algorithm, site), context_of(site, 0)), site.pool, Codecs(), 0)
    of = {(site.fleet[o.client].tier, site.pool[o.level].name): o.codecs for o in sent.orders}
    assert of["weak", "small"] in (None, Codecs()) and of["medium", "small"] == Codecs(Qsgd(bits=9))


@pytest.mark.parametrize("level", ["small", "medium", "large"])
def test_level_sends_one_sub_network_to_all(level: str) -> None:
    algorithm = FedX(TRAINING, level=level)
    pool = algorithm.pool(TinyNet(), {}, None)  # type: ignore[arg-type]
    assert [m.name for m in pool if m.dispatched] == [level]
    assert [m.name for m in pool] == ["small", "medium", "large"]
    found = algorithm.pool(TinyNet(), {"supernet": made(weak=(level, 11), strong=(level, 9))}, None)  # type: ignore[arg-type]
    assert [(m.name, len(m.tiers)) for m in found if m.dispatched] == [(level, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assigned": {"weak": Assigned("smal")}}, "algorithm.assigned.weak.level: there is no sub-network 'smal'"),
        ({"assigned": SOME, "level": "small"}, "algorithm.assigned and algorithm.level both say"),
        ({"widths": (0.5, 1.0)}, "in algorithm.names as many different names, are expected"),
    ],
)
def test_bad_sub_networks_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PoolError, match=re.escape(message)):
        fedx(**options).pool(TinyNet(), {}, None)  # type: ignore[arg-type]


def test_private_aggregation_refuses_a_search_by_seconds() -> None:
    algorithm = fedx(seconds=0.5, aggregation=Private())
    with pytest.raises(ConfigError, match=r"set algorithm\.seconds=null"):
        start_of(algorithm, tiny_site(algorithm))
    for known in (replace(algorithm, seconds=None), replace(algorithm, assigned=SOME)):
        assert start_of(known, tiny_site(known))


SELECTIONS = (Uniform(), Uniform(model="random"), Uniform(model="largest"), Oort(), ResourceTable(), Curiosity())


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: f"{s.name} {getattr(s, 'model', '')}")
def test_tier_decides_the_level_whatever_the_selection(selection: Any) -> None:
    algorithm = fedx(assigned=SOME, selection=selection)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    level = {"weak": 0, "medium": 0, "strong": 2}
    seen = set()
    for round in range(12):
        for order in algorithm.plan(state, context_of(site, round)).orders:
            tier = site.fleet[order.client].tier
            assert order.level == level[tier] == level_of(site.fleet[order.client], site.pool)
            assert order.codecs == Codecs(Qsgd(bits=SOME[tier].bits or 0))
            seen.add(tier)
    assert len(seen) > 1


def test_what_a_client_receives_is_quantised_in_its_tiers_bits() -> None:
    algorithm = fedx(assigned=SOME)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = coding.sent(algorithm.plan(state, context_of(site, 0)), site.pool, Codecs(), site.seed)
    layout, errors = site.family.layout(), dict[str, float]()
    for order in plan.orders:
        exact = take(state.params, layout, order.spec)["fc.linear.weight"]
        away = (order.payload["fc.linear.weight"] - exact).norm() / exact.norm()
        errors[site.fleet[order.client].tier] = float(away)
        assert order.encoded is not None and coding.codec_up(order) is None
    assert 0 < errors["weak"] < errors["medium"], "11 and 9 bits of the same sub-network"


def test_the_merge_by_hand() -> None:
    """Three clients, four values of the hidden layer's bias: the small network has the first two, the large all four.
    Each counts alike, whatever it holds (Eq. 4)."""
    algorithm = fedx(widths=(0.5, 1.0), names=("small", "large"), assigned={"a": Assigned("small")})
    family = TinyNet(hidden=4)
    site = tiny_site(replace(algorithm, assigned={}), family)
    state = start_of(replace(algorithm, assigned={}), site)
    name = "fc.linear.bias"
    state = replace(state, params={**state.params, name: torch.tensor([9.0, 9.0, 9.0, 9.0])})
    values = ((0, [1.0, 2.0]), (0, [3.0, 4.0]), (1, [5.0, 6.0, 7.0, 8.0]))
    orders, updates = [], []
    for client, (level, value) in enumerate(values):
        spec = site.pool[level].spec
        order = WorkOrder(0, client, spec, take(state.params, site.layout, spec), seed=client, level=level)
        payload = {**order.payload, name: torch.tensor(value)}
        orders.append(order)
        updates.append(update_of(order, spec, payload, examples=10 ** (client + 1)))
    merged = algorithm.merge(state, RoundPlan(0, tuple(orders)), updates, ServerSite(site))
    assert merged.params[name].tolist() == [(1 + 3 + 5) / 3, (2 + 4 + 6) / 3, 7.0, 8.0]
    untouched = {n: t for n, t in state.params.items() if n != name}
    for n, tensor in untouched.items():
        torch.testing.assert_close(merged.params[n], tensor)


def test_the_server_fine_tunes_what_was_merged() -> None:
    tuning = FineTuning(lr=0.1, gamma=0.5, start="previous", batch_size=3)
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    for round in (0, 1):
        plan = algorithm.plan(state, context_of(site, round))
        updates = [
            update_of(o, o.spec, {n: t + 0.1 * o.client for n, t in o.payload.items()}, o.client + 1)
            for o in plan.orders
        ]
        merged = algorithm.merge(state, plan, updates, server)
        tuned = replace(algorithm, fine_tuning=tuning).merge(state, plan, updates, server)
        seed = seeds.derive(plan.orders[0].seed, "fine-tuning", round)
        assert_same_bits(tuned.params, fine_tuned(tuning, server, merged.params, state.params, seed))
        assert any(not torch.equal(tuned.params[name], t) for name, t in merged.params.items())
        assert_same_bits(
            replace(algorithm, fine_tuning=tuning).merge(state, plan, updates, server).params, tuned.params
        )


@pytest.mark.parametrize("secret", [True, False])
def test_fine_tuning_seed_hides_the_first_client(secret: bool) -> None:
    private = Private(clip=1.0, noise_multiplier=1.0, secret_selection=secret)
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    merged = replace(state, params={name: tensor + 0.1 for name, tensor in state.params.items()})

    def after(first: int, noise_seed: bytes) -> Params:
        plan = algorithm.plan(state, context_of(site, 0))
        orders = (replace(plan.orders[0], seed=first), *plan.orders[1:])
        plan = replace(plan, orders=orders, noise_seed=noise_seed)
        return tuned(FineTuning(lr=0.1, batch_size=3), private, state, merged, plan, server).params

    one = after(1, bytes(32))
    assert any(not torch.equal(one[n], t) for n, t in after(2, bytes(32)).items()) is not secret
    assert any(not torch.equal(one[n], t) for n, t in after(1, bytes([1] * 32)).items()) is secret


def test_updates_that_make_the_server_diverge_do_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """As long as an update may be, without a bound on norms."""
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    plan = algorithm.plan(state, context_of(site, 0))
    updates = [update_of(o, o.spec, {n: torch.full_like(t, 9e8) for n, t in o.payload.items()}) for o in plan.orders]
    tuned = replace(algorithm, fine_tuning=FineTuning(lr=0.1)).merge(state, plan, updates, server)
    assert_same_bits(tuned.params, algorithm.merge(state, plan, updates, server).params)
    assert "round 1: not fine-tuned: training on the server diverged (learning rate 0.1)" in caplog.text


def test_a_tier_that_cannot_hold_its_sub_network_is_named() -> None:
    algorithm = fedx(assigned={**SOME, "weak": Assigned("large", 8)})
    with pytest.raises(
        ConfigError, match=r"tier 'weak' is assigned large, which needs 100.0 %.* its devices hold 35 %"
    ):
        start_of(algorithm, tiny_site(algorithm))
