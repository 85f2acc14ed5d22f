"""FedX: sub-network and bits of each tier, the merge by hand, and the server's training after the merge. Quantized
FedAvg: one sub-network, sent quantised; nothing else moves, and it is what is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import FedX, QuantizedFedAvg
from fl_engine.algorithms.fedx import Assigned
from fl_engine.algorithms.fine_tuning import FineTuning
from fl_engine.codecs.qsgd import Qsgd
from fl_engine.core import seeds
from fl_engine.core.costs import count_params
from fl_engine.core.errors import BadInput
from fl_engine.core.slicing import take
from fl_engine.core.types import FULL, Assignment, Codecs, Params, RoundPlan, SubmodelSpec
from fl_engine.core.widths import prefix
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site
from fl_engine.preparation.submodel_search import Candidate
from fl_engine.preparation.supernet import Supernet
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Oort, ResourceTable, Uniform
from fl_engine.selection.capacity import level_of
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.testing import rounds
from fl_engine.testing.models import kept_mask
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    TinyNet,
    assert_same_bits,
    context_of,
    start_of,
    tiny_pool,
    tiny_site,
    update_of,
)

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


def test_network_with_nested_sub_networks_uses_them() -> None:
    family = NestedNet()
    before = fedx().pool(family, {}, None)  # type: ignore[arg-type]
    assert [m.name for m in before] == ["small", "medium", "large"]
    pool = fedx().pool(family, {"supernet": made(weak=("4-16", 11), strong=("large", 4))}, None)  # type: ignore[arg-type]
    assert [(m.name, m.dispatched) for m in pool] == [
        ("small", False), ("4-16", True), ("medium", False), ("large", True),
    ]  # fmt: skip
    assert [m.spec for m in pool] == [family.nested()[m.name] for m in pool]
    assert pool[1].tiers == (("weak", Codecs(Qsgd(bits=11))),)


def test_tiers_share_a_sub_network_in_different_bits() -> None:
    pool = fedx(assigned=SOME).pool(TinyNet(), {}, None)  # type: ignore[arg-type]
    small, medium, large = pool
    assert small.tiers == (("weak", Codecs(Qsgd(bits=11))), ("medium", Codecs(Qsgd(bits=9))))
    assert small.codecs == Codecs(Qsgd(bits=11)) and large.codecs == Codecs(Qsgd(bits=8))
    assert (medium.dispatched, medium.tiers, medium.codecs) == (False, (), None)
    sized = coding.add_sizes(pool, TinyNet(), Codecs())
    assert sized[0].bytes < 4 * small.params == sized[0].bytes_up, "returned as trained"
    both = fedx(assigned=SOME, up="quantised", bucket=None).pool(TinyNet(), {}, None)  # type: ignore[arg-type]
    assert both[0].codecs == Codecs(Qsgd(bits=11, bucket=None), Qsgd(bits=11, bucket=None))
    # A tier without bits goes by the run's codecs, whatever another tier of its level has.
    plain = {**SOME, "weak": Assigned("small")}
    algorithm = fedx(assigned=plain)
    site = tiny_site(algorithm)
    sent = coding.encode_plan(algorithm.plan(start_of(algorithm, site), context_of(site, 0)), site.pool, Codecs(), 0)
    of = {(site.fleet[o.client].tier, site.pool[o.level].name): o.codecs for o in sent.assignments}
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
    ("options", "path"),
    [
        ({"assigned": {"weak": Assigned("smal")}}, "algorithm.assigned.weak.level"),
        ({"assigned": SOME, "level": "small"}, "algorithm.level"),
        ({"seconds": 0.5, "aggregation": Private()}, "algorithm.seconds"),
        ({"assigned": {**SOME, "weak": Assigned("large", 8)}}, "algorithm.assigned"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], path: str) -> None:
    algorithm = fedx(**options)
    with pytest.raises(BadInput) as caught:
        start_of(algorithm, tiny_site(algorithm))
    assert caught.value.path == path


@pytest.mark.parametrize("selection", [Uniform(model="largest"), Oort(), ResourceTable()], ids=lambda s: s.name)
def test_tier_decides_the_level_for_every_selection(selection: Any) -> None:
    algorithm = fedx(assigned=SOME, selection=selection)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    level = {"weak": 0, "medium": 0, "strong": 2}
    for round in range(6):
        for assignment in algorithm.plan(state, context_of(site, round)).assignments:
            tier = site.fleet[assignment.client].tier
            assert assignment.level == level[tier] == level_of(site.fleet[assignment.client], site.pool)
            assert assignment.codecs == Codecs(Qsgd(bits=SOME[tier].bits or 0))


def test_payload_is_quantised_in_the_tiers_bits() -> None:
    algorithm = fedx(assigned=SOME)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = coding.encode_plan(algorithm.plan(state, context_of(site, 0)), site.pool, Codecs(), site.seed)
    layout, errors = site.family.layout(), dict[str, float]()
    for assignment in plan.assignments:
        exact = take(state.params, layout, assignment.spec)["fc.linear.weight"]
        away = (assignment.payload["fc.linear.weight"] - exact).norm() / exact.norm()
        errors[site.fleet[assignment.client].tier] = float(away)
        assert assignment.encoded is not None and coding.codec_up(assignment) is None
    assert 0 < errors["weak"] < errors["medium"], "11 and 9 bits of the same sub-network"


def test_merge_by_hand() -> None:
    """Three clients, four values of the hidden layer's bias: the small network has the first two, the large all four.
    Each counts alike, whatever it holds (Eq. 4)."""
    algorithm = fedx(widths=(0.5, 1.0), names=("small", "large"), assigned={"a": Assigned("small")})
    family = TinyNet(hidden=4)
    site = tiny_site(replace(algorithm, assigned={}), family)
    state = start_of(replace(algorithm, assigned={}), site)
    name = "fc.linear.bias"
    state = replace(state, params={**state.params, name: torch.tensor([9.0, 9.0, 9.0, 9.0])})
    values = ((0, [1.0, 2.0]), (0, [3.0, 4.0]), (1, [5.0, 6.0, 7.0, 8.0]))
    assignments, updates = [], []
    for client, (level, value) in enumerate(values):
        spec = site.pool[level].spec
        assignment = Assignment(0, client, spec, take(state.params, site.layout, spec), seed=client, level=level)
        payload = {**assignment.payload, name: torch.tensor(value)}
        assignments.append(assignment)
        updates.append(update_of(assignment, spec, payload, examples=10 ** (client + 1)))
    merged = algorithm.merge(state, RoundPlan(0, tuple(assignments)), updates, ServerSite(site))
    assert merged.params[name].tolist() == [(1 + 3 + 5) / 3, (2 + 4 + 6) / 3, 7.0, 8.0]
    untouched = {n: t for n, t in state.params.items() if n != name}
    for n, tensor in untouched.items():
        torch.testing.assert_close(merged.params[n], tensor)


def test_server_fine_tunes_the_merged_model() -> None:
    tuning = FineTuning(lr=0.1, gamma=0.5, batch_size=3)
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    for round in (0, 1):
        plan = algorithm.plan(state, context_of(site, round))
        updates = [
            update_of(o, o.spec, {n: t + 0.1 * o.client for n, t in o.payload.items()}, o.client + 1)
            for o in plan.assignments
        ]
        merged = algorithm.merge(state, plan, updates, server)
        found = replace(algorithm, fine_tuning=tuning).merge(state, plan, updates, server)
        seed = seeds.derive(plan.assignments[0].seed, "fine-tuning", round)
        assert_same_bits(found.params, server.train(tuning.task(seed), merged.params))
        assert any(not torch.equal(found.params[name], t) for name, t in merged.params.items())


def test_fine_tuning_of_sub_networks_trains_the_small_one() -> None:
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    plan = algorithm.plan(state, context_of(site, 0))
    updates = [update_of(o, o.spec, {n: t + 0.01 for n, t in o.payload.items()}) for o in plan.assignments]

    def losses(tuning: FineTuning | None) -> list[float]:
        params = replace(algorithm, fine_tuning=tuning).merge(state, plan, updates, server).params
        specs = [model.spec for model in site.pool]
        return [server.loss(spec, take(params, site.layout, spec), 100) for spec in specs]

    whole = FineTuning(epochs=20, lr=0.1, batch_size=4)
    before, one, every = losses(None), losses(whole), losses(replace(whole, sub_networks=True))
    assert every[0] < min(before[0], one[0]) and every[1] < one[1]
    assert one[2] < before[2] and every[2] < before[2]


@pytest.mark.parametrize("secret", [True, False])
def test_fine_tuning_seed_hides_the_first_client(secret: bool) -> None:
    private = Private(clip=1.0, noise_multiplier=1.0, secret_selection=secret)
    algorithm = fedx(assigned=SOME)
    tuning = replace(algorithm, fine_tuning=FineTuning(lr=0.1, batch_size=3), aggregation=private)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    merged = replace(state, params={name: tensor + 0.1 for name, tensor in state.params.items()})

    def after(first: int, noise_seed: bytes) -> Params:
        plan = algorithm.plan(state, context_of(site, 0))
        assignments = (replace(plan.assignments[0], seed=first), *plan.assignments[1:])
        plan = replace(plan, assignments=assignments, noise_seed=noise_seed)
        return dict(tuning.tuned(state, merged, plan, server).params)

    one = after(1, bytes(32))
    assert any(not torch.equal(one[n], t) for n, t in after(2, bytes(32)).items()) is not secret
    assert any(not torch.equal(one[n], t) for n, t in after(1, bytes([1] * 32)).items()) is secret


def test_diverging_fine_tuning_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """As long as an update may be, without a bound on norms."""
    algorithm = fedx(assigned=SOME)
    site = with_server(tiny_site(algorithm))
    state, server = start_of(algorithm, site), ServerSite(site)
    plan = algorithm.plan(state, context_of(site, 0))
    updates = [
        update_of(o, o.spec, {n: torch.full_like(t, 9e8) for n, t in o.payload.items()}) for o in plan.assignments
    ]
    tuned = replace(algorithm, fine_tuning=FineTuning(lr=0.1)).merge(state, plan, updates, server)
    assert_same_bits(tuned.params, algorithm.merge(state, plan, updates, server).params)
    assert "not fine-tuned" in caplog.text


@pytest.mark.parametrize(("level", "width"), [("small", 0.5), ("medium", 0.75), ("large", 1.0)])
def test_the_sub_network_is_the_whole_pool(level: Any, width: float) -> None:
    family = TinyNet()
    (model,) = tiny_pool(QuantizedFedAvg(level=level, bits=9), family)
    assert (model.name, model.spec) == (level, prefix(family.layout(), width))
    assert model.dispatched and model.reported and not model.static_bn
    assert model.share == count_params(family, model.spec) / count_params(family)
    assert model.codecs == Codecs(down=Qsgd(bits=9))


def test_weights_are_quantised_on_the_way_down_only() -> None:
    algorithm = QuantizedFedAvg(training=TRAINING, level="medium", bits=8)
    site = tiny_site(algorithm)
    state, spec = start_of(algorithm, site), site.pool[0].spec
    plan = coding.encode_plan(algorithm.plan(state, context_of(site, 0)), site.pool, Codecs(), SEED)
    plain = take(state.params, site.layout, spec)
    for assignment in plan.assignments:
        assert assignment.codecs == Codecs(down=Qsgd(bits=8))
        for name, tensor in assignment.payload.items():
            step = math.sqrt(512) * float(plain[name].abs().max()) / 255  # at most: a bucket's norm over its levels
            assert float((tensor - plain[name]).abs().max()) <= step
            assert not torch.equal(tensor, plain[name])
        assert tensor_bytes(assignment.travels) < tensor_bytes(plain) * 0.32, "9 of 32 bits, and norms"
        assert coding.encode_update(assignment, spec, assignment.payload, site.layout) is None, "as they are"


def test_only_the_sub_network_moves_and_is_reported(tmp_path: Path) -> None:
    algorithm = QuantizedFedAvg(training=replace(TRAINING, fraction=0.5), level="small", bits=9)
    site = tiny_site(algorithm)
    run = Run(algorithm, site, RoundsConfig(stop=6, commit_every=1))
    final, rows = rounds.federated(run, FolderStore(tmp_path))
    start, spec = start_of(algorithm, site).params, site.pool[0].spec
    for name, tensor in final.params.items():
        kept = kept_mask(site.layout, spec, name, tensor.shape)
        assert torch.equal(tensor[~kept], start[name][~kept]), name
        assert not torch.equal(tensor[kept], start[name][kept]), name
    for row in rows:
        assert row.metrics["full"] == row.metrics["avg"] == row.metrics["accuracy/small"]
        assert row.metrics["bits_up"] == 32 * site.pool[0].params * row.metrics["clients_trained"]
        assert row.metrics["bits_down"] < 11 * site.pool[0].params * len(row.clients), "10 bits a number, and norms"
        assert row.metrics["seconds_encode"] > 0
    assert rows[-1].metrics["loss/small"] < rows[0].metrics["loss/small"]
