"""Aggregations that drop updates: `judged` and `fltrust` use the server's data, and `multi_krum` compares updates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.aggregation.fltrust import FLTrust
from fl_engine.aggregation.judged import MARGIN, Judged
from fl_engine.aggregation.multi_krum import MultiKrum
from fl_engine.aggregation.privacy import Public
from fl_engine.aggregation.rules import Median
from fl_engine.algorithms import Decoupled, FedAvg, FederatedDropout, FedPer, FlexFL, HeteroFL
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.slicing import initial_params, put, take
from fl_engine.core.types import FULL, Assignment, Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.exchange.client import Site
from fl_engine.rounds.fault_injection import fault_of, parse
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import SEED, TRAINING, TinyNet, assert_same_bits, start_of, tiny_site, update_of
from tests.harness.stores import MemoryStore

BYZANTINE = "scale=0.34x300,always"
REVERSED = "flip=0.34,always"
ALL = replace(TRAINING, fraction=1.0)


def with_proxy(algorithm: Any) -> Site:
    site = tiny_site(algorithm)
    count = len(site.data.train_y)
    own = np.arange(count - 16, count)
    return replace(site, partition=replace(site.partition, proxy_train=own, proxy_test=own[:0]))


def run_of(algorithm: Any, faults: str | None = None) -> Run:
    options = RoundsConfig(stop=3, evaluate_every=1000, commit_every=1, faults=faults)
    return Run(algorithm, with_proxy(algorithm), options)


def failures(rows: Any) -> set[int]:
    return {line["client"] for row in rows for line in row.clients if "failure" in line}


def scores(rows: Any) -> list[tuple[int, float, bool]]:
    return [
        (line["client"], line["score"], "failure" in line) for row in rows for line in row.clients if "score" in line
    ]


@given(st.data())
def test_put_writes_only_the_elements_of_the_submodel(data: st.DataObject) -> None:
    family = TinyNet()
    layout, whole = family.layout(), initial_params(family, SEED)
    keep = {}
    for group, width in layout.groups.items():
        keep[group] = tuple(sorted(data.draw(st.sets(st.integers(0, width - 1), min_size=1), label=group)))
    spec = SubmodelSpec.of(keep)
    part = {name: torch.full_like(t, 7.0) for name, t in take(whole, layout, spec).items()}
    found = put(part, layout, spec, whole, FULL)
    assert_same_bits(take(found, layout, spec), part)
    changed = sum(int((found[name] != whole[name]).sum()) for name in whole)
    assert changed == sum(t.numel() for t in part.values())


def test_lowest_score_is_three_medians_below_the_median() -> None:
    assert MARGIN == 3
    assert Judged().lowest({0: -2.0, 1: -1.0, 2: -9.0}) == pytest.approx(-8.0)
    assert Judged().lowest({0: -1.0, 1: -9.0}) == pytest.approx(-4.0)  # half of the clients are Byzantine
    assert Judged().lowest({0: 0.5, 1: 0.1, 2: 0.2}) == -1.0  # an update may double the loss


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        *((kind, Judged()) for kind in (FedAvg, FlexFL, HeteroFL, FederatedDropout)),
        *((kind, MultiKrum(byzantine=0.45)) for kind in (FedAvg, FlexFL, HeteroFL)),
    ],
    ids=lambda each: getattr(each, "name", getattr(each, "__name__", "")),
)
def test_harmful_updates_are_dropped(kind: Any, rule: Any) -> None:
    run = run_of(kind(training=ALL, aggregation=rule), BYZANTINE)
    harmful = {
        client
        for client in range(len(run.site.fleet))
        if fault_of(parse(BYZANTINE), SEED, 0, client, len(run.site.fleet))
    }
    _, rows = federated(run, MemoryStore())
    assert harmful and harmful <= failures(rows)
    found = {client: score for client, score, _ in scores(rows[:1])}
    assert max(found[client] for client in harmful) < min(found[client] for client in found.keys() - harmful)


def test_multi_krum_equals_hand_computed_scores() -> None:
    layout = ParamLayout({"w": 2}, {"w": Slot("all", (Axis("w"),))})
    small, values = SubmodelSpec.of({"w": 1}), (0.0, 1.0, 3.0, 10.0)
    assignment = Assignment(0, 0, FULL, {}, 0, 0)
    updates = [
        update_of(replace(assignment, client=client), spec, {"w": torch.tensor([value, 99.0 * client][:width])})
        for client, (value, (spec, width)) in enumerate(zip(values, [(FULL, 2), (small, 1)] * 2, strict=True))
    ]
    rule: Any = MultiKrum(byzantine=0.25)
    found = rule.scores(((assignment, update) for update in updates), layout, None, None)
    # f = 1, so a score is the negative squared distance to the nearest other update.
    assert found == {0: -1.0, 1: -1.0, 2: -4.0, 3: -49.0}
    assert rule.lowest(found) == -4.0


def test_fltrust_equals_hand_computed_mean() -> None:
    layout, old = ParamLayout({"w": 2}, {"w": Slot("all", (Axis("w"),))}), {"w": torch.zeros(2)}

    def reference(spec: SubmodelSpec, start: Any, samples: int) -> Any:
        return {"w": torch.tensor([3.0, 4.0]) if spec == FULL else torch.tensor([9.0])}

    rule = FLTrust().start(old, layout, Public(4, (FULL,), None, reference=reference))
    for values in ([6.0, 8.0], [0.0, 100.0], [-3e6, -4e6], [2.0]):  # cosines 1, 0.8, -1 and 1
        rule.add({"w": torch.tensor(values)}, FULL if len(values) == 2 else SubmodelSpec.of({"w": 1}), 1e9)
    # The scaled changes are (3, 4), (0, 5) and (9).
    torch.testing.assert_close(rule.result()["w"], torch.tensor([(3 + 9) / 2.8, (4 + 0.8 * 5) / 1.8]))


@pytest.mark.parametrize("kind", [FedAvg, FlexFL, HeteroFL, Decoupled])
def test_fltrust_drops_reversed_updates(kind: Any) -> None:
    run = run_of(kind(training=ALL, aggregation=FLTrust()), REVERSED)
    last = federated(run, MemoryStore())[1][-1:]
    reversed_ones = [client for client, _, _ in scores(last) if fault_of(parse(REVERSED), SEED, 2, client, 20)]
    assert reversed_ones and set(reversed_ones) <= failures(last)


def test_other_rule_merges_the_updates_that_are_not_dropped() -> None:
    judged, median = (
        federated(run_of(FedAvg(training=ALL, aggregation=rule)), MemoryStore())[0].params
        for rule in (Judged(rule=Median(), samples=1000), Median())
    )
    assert_same_bits(judged, median)


@pytest.mark.parametrize("rule", [Judged(), FLTrust()], ids=lambda rule: rule.name)
def test_resumed_run_drops_the_same_updates(rule: Any) -> None:
    run, stores = run_of(FedAvg(training=ALL, aggregation=rule), BYZANTINE), (MemoryStore(), MemoryStore())
    whole, rows = federated(run, stores[0])
    count = iter(range(1000))
    with pytest.raises(Stopped):
        federated(run, stores[1], should_stop=lambda: next(count) == 4)
    resumed, again = federated(replace(run), stores[1])
    assert_same_bits(resumed.params, whole.params)
    assert scores(again) == scores(rows)


@pytest.mark.parametrize("rule", [Judged(), FLTrust()], ids=lambda rule: rule.name)
@pytest.mark.parametrize(
    ("kind", "site_of", "path"),
    [(FedAvg, tiny_site, "partition.proxy"), (FedPer, with_proxy, "algorithm.aggregation")],
)
def test_refused_without_proxy_or_with_client_state(kind: Any, site_of: Any, path: str, rule: Any) -> None:
    algorithm = kind(training=ALL, aggregation=rule)
    site = site_of(algorithm)
    with pytest.raises(ConfigError) as error:
        start_of(algorithm, site)
    assert error.value.path == path
