"""Asynchronous rounds: who is merged when, by how much, and that no kill and no backend changes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.aggregation.privacy import Private
from fl_engine.algorithms import ALGORITHMS, Decoupled, DepthFL, FedAvg, FlexFL, HeteroFL
from fl_engine.backends import InProcess, Processes
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import ClientUpdate, Codecs
from fl_engine.exchange.client import execute
from fl_engine.fleet.trace import Trace, trace_of
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds import buffer, loop, pending
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection.oort import Oort
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore, encode
from fl_engine.testing import played
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import TRAINING, Memory, assert_same_bits, on_devices_alone, start_of, tiny_fleet, tiny_site

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
    **terms: Any,
) -> Any:
    settings = RoundsConfig(**{"stop": stop, **TERMS, **terms})
    run = Run(algorithm, tiny_site(algorithm, fleet=FLEET), settings, codecs=codecs, trace=trace)
    return played.federated(run, store, discard_damaged=discard_damaged)[0]


def lines(store: Any) -> list[dict[int, dict[str, Any]]]:
    return [{line["client"]: line for line in row.clients} for row in Checkpoints(store).rows()]


def test_it_is_fedbuff_computed_step_by_step(memory_store: Any) -> None:
    algorithm = FedAvg(training=ASKED, eligible="all")
    site = tiny_site(algorithm, fleet=FLEET)
    run = Run(algorithm, site, RoundsConfig(stop=5, **TERMS))
    state = start_of(algorithm, site)
    clock, working = 0.0, dict[int, tuple[float, int, ClientUpdate, Any]]()
    merged = []
    for round in range(5):
        plan = algorithm.plan(state, run.context(round, clock, working))
        assert len(plan.orders) + len(working) == 4 and not plan.order_of.keys() & working.keys()
        for order in plan.orders:
            update = execute(algorithm, order, site)
            assert isinstance(update, ClientUpdate)
            took = run.times(update, order, clock)
            assert took is not None
            working[order.client] = (clock + took.total, round, update, order)
        first = sorted(working, key=lambda client: working[client][0])[:2]
        clock = working[first[-1]][0]
        weights = torch.tensor([float(working[client][2].num_examples) for client in first], dtype=torch.float64)
        params = {}
        for name, now in state.params.items():
            changes = []
            for client in first:
                _, began, update, order = working[client]
                change = update.payload[name].double() - order.payload[name].double()
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
    assert [row.metrics["clients_flying"] for row in rows] == [2.0] * 5
    assert [row.metrics["staleness"] for row in rows] == [sum(ages.values()) / 2 for ages in merged]


# Some devices of FLEET cannot hold the one model that fedx_large and fedx_medium send.
@pytest.mark.parametrize("name", ["adagq", "fedavg", "fedrolex", "flexfl"])
def test_with_a_buffer_of_all_it_is_the_synchronous_run(name: str, new_store: Any, timeless: Any) -> None:
    algorithm: Any = on_devices_alone(ALGORITHMS[name](training=ASKED))  # type: ignore[call-arg]
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
def test_a_run_that_is_killed_anywhere_merges_the_same(
    name: str,
    new_store: Any,
    dying: Any,
    killed: type[BaseException],
    timeless: Callable[[Any], Sequence[Any]],
    keep_updates: bool,
) -> None:
    algorithm, undisturbed = SOME[name], new_store()
    expected = encode(federated(algorithm, undisturbed, 4, keep_updates=keep_updates).params)
    writes = dying(new_store(), 10**6)
    federated(algorithm, writes, 4, keep_updates=keep_updates)
    total = 10**6 - writes.left
    for place in range(0, total, 5 + 4 * keep_updates):
        store = new_store()
        with pytest.raises(killed):
            federated(algorithm, dying(store, place), 4, keep_updates=keep_updates)
        final = federated(algorithm, store, 4, keep_updates=keep_updates)
        assert encode(final.params) == expected, place
        assert timeless(store) == timeless(undisturbed), place
        assert set(store.list("flights/")) == set(undisturbed.list("flights/")), "files are left, or gone"


def test_variances_that_a_network_stores_stay_above_zero(memory_store: Any, tmp_path: Path) -> None:
    algorithm = FedAvg(training=replace(ASKED, epochs=8), eligible="all")
    site = tiny_site(algorithm, SmallCNN((1, 8, 8), 3, width=0.25, norm="static"), fleet=FLEET)
    terms = RoundsConfig(stop=6, **TERMS | {"buffer": 1, "staleness": 0.0})
    run, finals, failed = Run(algorithm, site, terms), [], []
    for store, workers in ((memory_store, False), (FolderStore(tmp_path), True)):
        ledger = ledger_in(store, None, replace(site.rules, algorithm=algorithm))
        processes: Any = closing(Processes(site, ("cpu", "cpu"))) if workers else None
        with processes or nullcontext(InProcess(site)) as on:
            finals.append(loop.federate(run, start_of(algorithm, site), on, ledger, Memory()).params)
        failed.append(sum(row.metrics["clients_failed"] for row in ledger.checkpoints.rows()))
    assert max(line.get("staleness", 0) for of in lines(memory_store) for line in of.values()) > 1
    for name, tensor in finals[0].items():
        assert not name.endswith("running_var") or tensor.min() > 0, name
    assert failed == [0, 0]
    assert_same_bits(*finals)


def test_with_a_trace_nobody_waits_for_others_to_come_online(new_store: Any, dying: Any, killed: Any) -> None:
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


def test_a_damaged_file_is_named(memory_store: Any) -> None:
    federated(SOME["all_large"], memory_store, 3)
    for key in memory_store.list(pending.FOLDER):
        memory_store.put(key, encode({"a": torch.zeros(1)}))
    with pytest.raises(IntegrityError, match=r"flights/.* is damaged"):
        federated(SOME["all_large"], memory_store, 6)


@pytest.mark.parametrize(
    ("algorithm", "terms", "said"),
    [
        (SOME["all_large"], {"over_provision": 1.3}, r"set rounds\.over_provision=1$"),
        (SOME["all_large"], {"deadline_s": 3.0, "quorum": 0.5}, r"set rounds\.deadline_s=null, rounds\.quorum=0$"),
        (SOME["all_large"], {"mode": "synchronous"}, r"rounds\.mode=buffered"),
        (PersonalHeads(training=ASKED), {}, "clients keep"),
        (FedAvg(training=ASKED, aggregation=Private(clip=1.0)), {}, "a private aggregation counts"),
        (DepthFL(training=ASKED), {}, "the server of DepthFL remembers how far each client moved what it was sent"),
    ],
)
def test_what_does_not_go_together_is_refused(algorithm: Any, terms: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        buffer.check(algorithm, RoundsConfig(stop=1, **(TERMS | terms)))


def test_levels_with_weights_of_their_own_are_refused(memory_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InProcess, "run", lambda *_: pytest.fail("clients train"))
    with pytest.raises(ConfigError, match=r"levels of Decoupled have weights of their own.* rounds\.mode=synchronous"):
        federated(Decoupled(training=ASKED), memory_store)
