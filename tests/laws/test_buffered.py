"""Asynchronous rounds: who is merged when, by how much, and that no kill and no backend changes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.aggregation.fltrust import FLTrust
from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import ALGORITHMS, Decoupled, DepthFL, FedAvg, FedPer, FlexFL, HeteroFL
from fl_engine.backends import InProcess
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientUpdate, Codecs
from fl_engine.exchange.client import execute
from fl_engine.fleet.trace import Trace
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds import buffer, loop
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.selection.oort import Oort
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import encode
from fl_engine.testing import rounds
from fl_engine.testing.tiny import TRAINING, Memory, start_of, tiny_fleet, tiny_site
from tests.harness.made_up import trace_of, without_fine_tuning

ASKED = replace(TRAINING, fraction=0.6, epochs=1)
FLEET = tuple(replace(d, bandwidth=d.bandwidth / (1 + 3 * d.client)) for d in tiny_fleet(8))
"""The higher its number, the slower a client."""
TERMS = {"mode": "buffered", "buffer": 2, "evaluate_every": 1000, "commit_every": 1, "norm_bound": None}


def federated(
    algorithm: Any,
    store: Any,
    stop: int = 5,
    codecs: Codecs = Codecs(),  # noqa: B008
    trace: Trace | None = None,
    discard_damaged: bool = False,
    **options: Any,
) -> Any:
    settings = RoundsConfig(**{"stop": stop, **TERMS, **options})
    run = Run(algorithm, tiny_site(algorithm, fleet=FLEET), settings, codecs=codecs, trace=trace)
    return rounds.federated(run, store, discard_damaged=discard_damaged)[0]


def lines(store: Any) -> list[dict[int, dict[str, Any]]]:
    return [{line["client"]: line for line in row.clients} for row in Checkpoints(store).rows()]


def test_buffered_rounds_equal_fedbuff_step_by_step(memory_store: Any) -> None:
    algorithm = FedAvg(training=ASKED, eligible="all")
    site = tiny_site(algorithm, fleet=FLEET)
    run = Run(algorithm, site, RoundsConfig(stop=5, **TERMS))
    state = start_of(algorithm, site)
    clock, working = 0.0, dict[int, tuple[float, int, ClientUpdate, Any]]()
    merged = []
    for round in range(5):
        plan = algorithm.plan(state, run.context(round, clock, working))
        assert len(plan.assignments) + len(working) == 4 and not plan.assignment_of.keys() & working.keys()
        for assignment in plan.assignments:
            update = execute(algorithm, assignment, site)
            assert isinstance(update, ClientUpdate)
            took = run.times(update, assignment, clock)
            assert took is not None
            working[assignment.client] = (clock + took.total, round, update, assignment)
        first = sorted(working, key=lambda client: working[client][0])[:2]
        clock = working[first[-1]][0]
        weights = torch.tensor([float(working[client][2].num_examples) for client in first], dtype=torch.float64)
        params = {}
        for name, now in state.params.items():
            changes = []
            for client in first:
                _, began, update, assignment = working[client]
                change = update.payload[name].double() - assignment.payload[name].double()
                changes.append(change / (1 + round - began) ** 0.5)
            total = sum(w * change for w, change in zip(weights, changes, strict=True))
            params[name] = (now.double() + total / weights.sum()).float()
        state = replace(state, params=params)
        merged.append({client: round - working.pop(client)[1] for client in sorted(first)})
    found = federated(algorithm, memory_store)
    assert max(age for ages in merged for age in ages.values()) > 1, "some are stale"
    assert [{c: line["staleness"] for c, line in of.items()} for of in lines(memory_store)] == merged
    for name, tensor in state.params.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=1e-4, atol=1e-6)
    rows = Checkpoints(memory_store).rows()
    assert sum(row.metrics["seconds_simulated"] for row in rows) == pytest.approx(clock)
    assert [row.metrics["clients_pending"] for row in rows] == [2.0] * 5
    assert [row.metrics["staleness"] for row in rows] == [sum(ages.values()) / 2 for ages in merged]


# Some devices of FLEET cannot hold the one model that fedx_large and fedx_medium send.
@pytest.mark.parametrize("name", ["adagq", "fedavg", "fedrolex", "flexfl"])
def test_buffer_of_all_clients_equals_the_synchronous_run(name: str, new_store: Any, timeless: Any) -> None:
    algorithm: Any = without_fine_tuning(ALGORITHMS[name](training=ASKED))  # type: ignore[call-arg]
    stores = {mode: new_store() for mode in ("synchronous", "buffered", "null")}
    for mode, store in stores.items():
        count = 4 if mode == "buffered" else None
        final = federated(algorithm, store, 3, mode=mode if mode != "null" else "buffered", buffer=count)
        stores[mode] = (final, store)
    (one, before), *others = stores.values()
    for other, _ in others:
        assert encode(other.params) == encode(one.params)
    assert lines(before) == [
        {
            client: {k: v for k, v in line.items() if k != "staleness"} | _seconds(a[client])
            for client, line in b.items()
        }
        for a, b in zip(lines(before), lines(others[0][1]), strict=True)
    ]


def _seconds(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line[key] for key in ("seconds", "seconds_encode") if key in line}


SOME = {
    "all_large": FedAvg(training=ASKED, eligible="all"),
    "flexfl": FlexFL(training=ASKED, use_apoz=False),
    "heterofl": HeteroFL(training=ASKED),
    "oort": FedAvg(training=ASKED, eligible="all", selection=Oort(model="largest")),
}


@pytest.mark.parametrize(("name", "keep_updates"), [("flexfl", True), ("oort", False)])
def test_killed_buffered_run_merges_the_same(name: str, killed_at_writes: Any, keep_updates: bool) -> None:
    def run(store: Any) -> bytes:
        return encode(federated(SOME[name], store, 4, keep_updates=keep_updates).params)

    killed_at_writes(run, 5 + 4 * keep_updates, also=lambda store: store.list("pending/"))


def test_variances_that_a_network_stores_stay_above_zero(memory_store: Any) -> None:
    algorithm = FedAvg(training=replace(ASKED, epochs=8), eligible="all")
    site = tiny_site(algorithm, SmallCNN((1, 8, 8), 3, width=0.25, norm="static"), fleet=FLEET)
    options = RoundsConfig(stop=6, **TERMS | {"buffer": 1, "staleness": 0.0})
    ledger = Ledger(memory_store, None, replace(site.rules, algorithm=algorithm))
    run = Run(algorithm, site, options)
    final = loop.federate(run, start_of(algorithm, site), InProcess(site), ledger, Memory()).params
    assert max(line.get("staleness", 0) for of in lines(memory_store) for line in of.values()) > 1
    assert all(tensor.min() > 0 for name, tensor in final.items() if name.endswith("running_var"))
    assert sum(row.metrics["clients_failed"] for row in ledger.checkpoints.rows()) == 0


def test_pending_updates_are_merged_without_waiting(new_store: Any, dying: Any, killed: Any) -> None:
    """All leave after 0.2 s and come back after 0.5: what is under way is merged, who was too slow dropped out."""
    rows = [[(0.0, True, d.speed, d.bandwidth), (0.2, False, 1.0, 1.0)] for d in FLEET]
    trace = trace_of(rows, 0.5)
    algorithm, undisturbed = SOME["all_large"], new_store()
    one = Run(algorithm, tiny_site(algorithm, fleet=FLEET), RoundsConfig(stop=1, **TERMS), trace=trace)
    expected = federated(algorithm, undisturbed, 30, trace=trace)
    found = Checkpoints(undisturbed).rows()
    clock = 0.0
    for row in found:
        assert row.metrics["seconds_simulated"] >= 0
        clock += row.metrics["seconds_simulated"]
    assert clock > 0.5 and any(row.metrics["simulated_wait"] > 0 for row in found)
    assert sum(row.metrics["clients_trained"] for row in found) > 20
    assert one.context(0, 0.3).available == ()
    store = new_store()
    with pytest.raises(killed):
        federated(algorithm, dying(store, 40), 30, trace=trace)
    assert encode(federated(algorithm, store, 30, trace=trace).params) == encode(expected.params)


@pytest.mark.parametrize(
    ("algorithm", "options", "path"),
    [
        (SOME["all_large"], {"over_provision": 1.3}, "rounds.over_provision"),
        (SOME["all_large"], {"deadline_s": 3.0}, "rounds.deadline_s"),
        (SOME["all_large"], {"mode": "synchronous"}, "rounds.buffer"),
        (FedPer(training=ASKED), {}, "rounds.mode"),
        (FedAvg(training=ASKED, aggregation=Private(clip=1.0)), {}, "rounds.mode"),
        (FedAvg(training=ASKED, aggregation=FLTrust()), {}, "rounds.mode"),
        (DepthFL(training=ASKED), {}, "rounds.mode"),
    ],
)
def test_unsupported_options_and_algorithms_are_refused(algorithm: Any, options: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        buffer.check(algorithm, RoundsConfig(stop=1, **(TERMS | options)))
    assert error.value.path == path


def test_levels_with_weights_of_their_own_are_refused(memory_store: Any) -> None:
    with pytest.raises(ConfigError) as error:
        federated(Decoupled(training=ASKED), memory_store)
    assert error.value.path == "rounds.mode"
    assert not memory_store.files, "refused before a round is committed"
