"""What every algorithm has to hold whose clients keep something (`KeepsClientState`), for pytest: subclass
`ClientStateSuite`, beside an `AlgorithmSuite`, and give it an `algorithm` fixture.

    class TestMine(ClientStateSuite):
        @pytest.fixture
        def algorithm(self): return Mine(training=TRAINING)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import CONTRACT
from fl_engine.backends import InProcess
from fl_engine.core.clients import apart, header, kept_by_clients, travelling
from fl_engine.core.contracts import Algorithm, KeepsClientState, ModelFamily
from fl_engine.core.types import ClientUpdate, Outcome, Params, RoundPlan, Start, TaskContext, WorkOrder
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.updates import check_state
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore
from fl_engine.storage.tensor_files import named
from fl_engine.testing import played
from fl_engine.testing.played import copied
from fl_engine.testing.tiny import (
    SEED,
    TinyNet,
    assert_same_bits,
    assert_same_outcomes,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)

ROUNDS = 4


@dataclass
class Watching(InProcess):
    """Remembers every order, and what came of it."""

    site: Site
    seen: list[tuple[WorkOrder, Outcome]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(self.site)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        for outcome in super().run(algorithm, plan):
            self.seen.append((plan.order_of[outcome.client], outcome))
            yield outcome


class ClientStateSuite:
    """Needs a fixture `algorithm`."""

    @pytest.fixture
    def algorithm(self) -> Any:
        raise NotImplementedError("a ClientStateSuite needs an `algorithm` fixture")

    @pytest.fixture
    def family(self) -> ModelFamily:
        return TinyNet()

    @pytest.fixture
    def site(self, algorithm: Any, family: ModelFamily) -> Site:
        """Six clients, so that each is asked again soon."""
        return tiny_site(algorithm, family, fleet=tiny_fleet(6))

    @pytest.fixture
    def order(self, algorithm: Any, site: Site) -> WorkOrder:
        plan: RoundPlan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        return plan.orders[0]

    def test_it_keeps_what_it_declares(self, algorithm: Any, site: Site, order: WorkOrder) -> None:
        keeps: Any = KeepsClientState
        assert isinstance(algorithm, keeps) and CONTRACT.misfits(type(algorithm)) == []
        declared = kept_by_clients(algorithm, site.family, site.pool)
        assert declared, "what a client keeps has names"
        update = execute(algorithm, order, site)
        assert isinstance(update, ClientUpdate)
        check_state(update.state, header(declared))
        assert not update.payload.keys() & declared.keys(), "what a client keeps to itself is not sent as weights"
        again = execute(algorithm, with_state(order, update.state), site)
        assert isinstance(again, ClientUpdate)
        check_state(again.state, header(declared))

    def test_what_is_kept_matters(self, algorithm: Any, site: Site, order: WorkOrder) -> None:
        first = execute(algorithm, order, site)
        assert isinstance(first, ClientUpdate)
        again = execute(algorithm, with_state(order, first.state), site)
        assert isinstance(again, ClientUpdate)
        new, old = ({**u.payload, **travelling(u.state)} for u in (again, first))
        assert any(not new[name].equal(old[name]) for name in new)

    def test_to_begin_and_to_keep_are_pure(self, algorithm: Any, site: Site, order: WorkOrder) -> None:
        first = execute(algorithm, order, site)
        assert isinstance(first, ClientUpdate)
        given = with_state(order, first.state)
        before = [copied(params) for params in (given.payload, given.memory)]
        assert_same_outcomes([execute(algorithm, given, site)], [execute(algorithm, given, site)])
        for params, was in zip((given.payload, given.memory), before, strict=True):
            assert_same_bits(params, was)
        context = TaskContext(site.layout, site.pool, site.fleet[order.client], 1e3)
        task = algorithm.task(given, context)
        for state in ({}, first.state):
            begun = [algorithm.begin(state, Start(dict(order.payload)), given, task, context) for _ in range(2)]
            assert_same_bits(begun[0].params, begun[1].params)
            assert_same_bits(begun[0].linear, begun[1].linear)
        assert_same_bits(order.payload, before[0])

    def test_each_client_gets_its_own_and_no_others(self, algorithm: Any, site: Site, tmp_path: Path) -> None:
        """What it brought when it last took part, nothing before that."""
        backend = Watching(site)
        federated(algorithm, site, tmp_path, ROUNDS, backend)
        known: dict[int, Params] = {}
        for order, outcome in backend.seen:
            assert_same_bits(apart(order.memory)[1], known.get(order.client, {}))
            if isinstance(outcome, ClientUpdate):
                known[order.client] = outcome.state
        assert len(backend.seen) > len(known) > 1, "several clients took part again"

    def test_it_survives_the_store_and_a_resumed_run(self, algorithm: Any, site: Site, tmp_path: Path) -> None:
        whole = federated(algorithm, site, tmp_path / "whole", ROUNDS)
        for stop in range(1, ROUNDS):
            federated(algorithm, site, tmp_path / "stopped", stop)
        assert_same_bits(federated(algorithm, site, tmp_path / "stopped", ROUNDS), whole)
        kept = [states_of(tmp_path / name) for name in ("whole", "stopped")]
        assert kept[0].keys() == kept[1].keys() and kept[0]
        for client, state in kept[0].items():
            assert_same_bits(kept[1][client], state)

    @pytest.mark.parametrize("lost", ["missing", "damaged"])
    def test_one_that_is_lost_begins_as_one_that_never_took_part(
        self, algorithm: Any, site: Site, tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        federated(algorithm, site, tmp_path, 1)
        store, files = FolderStore(tmp_path), files_of(tmp_path)
        victim, everyone = min(files), replace(algorithm, training=replace(algorithm.training, fraction=1.0))
        key = f"states/{files[victim]}"
        if lost == "missing":
            store.delete(key)
        else:
            store.put(key, store.get(key)[:-1] + b"\7")
        backend = Watching(site)
        with caplog.at_level(logging.WARNING):
            federated(everyone, site, tmp_path, 2, backend)
        told = [r.getMessage() for r in caplog.records if "state is lost" in r.getMessage()]
        assert len(told) == 1 and f"client {victim}: " in told[0] and key in told[0]
        for order, outcome in backend.seen:
            state = {} if order.client == victim else apart(order.memory)[1]
            assert bool(state) == (order.client in files and order.client != victim)
            assert_same_outcomes([execute(everyone, with_state(order, state), site)], [outcome])


# -------------------------------------------------------------------------------------------------- helpers
def with_state(order: WorkOrder, state: Params) -> WorkOrder:
    """The order with this state, and with what the server itself has put into its memory."""
    return replace(order, memory={**apart(order.memory)[0], **travelling(state)})


def federated(algorithm: Any, site: Site, folder: Path, stop: int, backend: Any = None) -> Params:
    """What a run (or the rest of it) in this folder ends with."""
    run = Run(algorithm, site, RoundsConfig(stop=stop, evaluate_every=100, commit_every=1))
    params: Params = played.federated(run, FolderStore(folder), backend)[0].params
    return params


def ledger_of(folder: Path) -> Ledger:
    return ledger_in(FolderStore(folder))


def files_of(folder: Path) -> dict[int, str]:
    """By client, as the last commit names them."""
    checkpoints = ledger_of(folder).checkpoints
    return named(checkpoints.rest(checkpoints.commits()[-1]))


def states_of(folder: Path) -> dict[int, Params]:
    ledger = ledger_of(folder)
    return {client: ledger.states.get(name) for client, name in files_of(folder).items()}
