"""Tests for algorithms whose clients keep a state (`KeepsClientState`). Subclass `ClientStateSuite` in addition to
`AlgorithmSuite`, and define the fixture `algorithm`. `fl_engine/algorithms/fedper.py` is an example."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import CONTRACT
from fl_engine.core.clients import header, kept_by_clients, split_state, with_prefix
from fl_engine.core.contracts import KeepsClientState, ModelFamily
from fl_engine.core.types import Assignment, ClientUpdate, Params, RoundPlan, Start, TaskContext
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.updates import check_state
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from fl_engine.storage.tensor_files import named
from fl_engine.testing import Suite, rounds, tiny
from fl_engine.testing.rounds import Recording, copied

ROUNDS = 4


class ClientStateSuite(Suite):
    """Test suite that requires a fixture `algorithm`."""

    @pytest.fixture
    def family(self) -> ModelFamily:
        return tiny.TinyNet()

    @pytest.fixture
    def site(self, algorithm: Any, family: ModelFamily) -> Site:
        """Return a site with only six clients, so that each client is selected several times."""
        return tiny.tiny_site(algorithm, family, fleet=tiny.tiny_fleet(6))

    @pytest.fixture
    def assignment(self, algorithm: Any, site: Site) -> Assignment:
        plan: RoundPlan = algorithm.plan(tiny.start_of(algorithm, site), tiny.context_of(site, 0, tiny.SEED))
        return plan.assignments[0]

    def test_state_has_the_declared_shapes_and_matters(
        self, algorithm: Any, site: Site, assignment: Assignment
    ) -> None:
        keeps: Any = KeepsClientState
        assert isinstance(algorithm, keeps) and CONTRACT.missing(type(algorithm)) == []
        declared = kept_by_clients(algorithm, site.family, site.pool)
        assert declared
        first = execute(algorithm, assignment, site)
        assert isinstance(first, ClientUpdate)
        again = execute(algorithm, with_state(assignment, first.state), site)
        assert isinstance(again, ClientUpdate)
        for update in (first, again):
            check_state(update.state, header(declared))
            assert not update.payload.keys() & declared.keys(), "updates do not contain the state"
        old, new = ({**update.payload, **with_prefix(update.state)} for update in (first, again))
        assert any(not new[name].equal(old[name]) for name in new)

    def test_begin_and_keep_are_pure(self, algorithm: Any, site: Site, assignment: Assignment) -> None:
        first = execute(algorithm, assignment, site)
        assert isinstance(first, ClientUpdate)
        given = with_state(assignment, first.state)
        before = [copied(params) for params in (given.payload, given.memory)]
        tiny.assert_same_results([execute(algorithm, given, site)], [execute(algorithm, given, site)])
        for params, was in zip((given.payload, given.memory), before, strict=True):
            tiny.assert_same_bits(params, was)
        context = TaskContext(site.layout, site.pool, site.fleet[assignment.client], 1e3)
        task = algorithm.task(given, context)
        for state in ({}, first.state):
            begun = [algorithm.begin(state, Start(dict(assignment.payload)), given, task, context) for _ in range(2)]
            tiny.assert_same_bits(begun[0].params, begun[1].params)
            tiny.assert_same_bits(begun[0].linear, begun[1].linear)
        tiny.assert_same_bits(assignment.payload, before[0])

    def test_client_receives_only_its_own_last_state(self, algorithm: Any, site: Site, tmp_path: Path) -> None:
        backend = Recording(site)
        federated(algorithm, site, tmp_path, ROUNDS, backend)
        known: dict[int, Params] = {}
        for assignment, result in backend.seen:
            tiny.assert_same_bits(split_state(assignment.memory)[1], known.get(assignment.client, {}))
            if isinstance(result, ClientUpdate):
                known[assignment.client] = result.state
        assert len(backend.seen) > len(known) > 1, "several clients took part again"

    def test_resumed_run_has_the_same_states(self, algorithm: Any, site: Site, tmp_path: Path) -> None:
        whole = federated(algorithm, site, tmp_path / "whole", ROUNDS)
        for stop in range(1, ROUNDS):
            federated(algorithm, site, tmp_path / "stopped", stop)
        tiny.assert_same_bits(federated(algorithm, site, tmp_path / "stopped", ROUNDS), whole)
        kept = [states_of(tmp_path / name) for name in ("whole", "stopped")]
        assert kept[0].keys() == kept[1].keys() and kept[0]
        for client, (_, state) in kept[0].items():
            tiny.assert_same_bits(kept[1][client][1], state)

    @pytest.mark.parametrize("lost", ["missing", "damaged"])
    def test_client_whose_state_is_lost_starts_without(
        self, algorithm: Any, site: Site, tmp_path: Path, lost: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        federated(algorithm, site, tmp_path, 1)
        store, files = FolderStore(tmp_path), states_of(tmp_path)
        victim, everyone = min(files), replace(algorithm, training=replace(algorithm.training, fraction=1.0))
        key = f"states/{files[victim][0]}"
        if lost == "missing":
            store.delete(key)
        else:
            store.put(key, store.get(key)[:-1] + b"\7")
        backend = Recording(site)
        with caplog.at_level(logging.WARNING):
            federated(everyone, site, tmp_path, 2, backend)
        assert [key in record.getMessage() for record in caplog.records] == [True]
        for assignment, result in backend.seen:
            state = {} if assignment.client == victim else split_state(assignment.memory)[1]
            assert bool(state) == (assignment.client in files and assignment.client != victim)
            tiny.assert_same_results([execute(everyone, with_state(assignment, state), site)], [result])


def with_state(assignment: Assignment, state: Params) -> Assignment:
    """Return a copy of the assignment in which `state` replaces the client state in `memory`."""
    return replace(assignment, memory={**split_state(assignment.memory)[0], **with_prefix(state)})


def federated(algorithm: Any, site: Site, folder: Path, stop: int, backend: Any = None) -> Params:
    """Start a run in `folder`, or resume the run if `folder` contains one. Return the final weights."""
    run = Run(algorithm, site, RoundsConfig(stop=stop, evaluate_every=100, commit_every=1))
    params: Params = rounds.federated(run, FolderStore(folder), backend)[0].params
    return params


def states_of(folder: Path) -> dict[int, tuple[str, Params]]:
    """Map each client to the file name and the tensors of the client's state in the last commit."""
    ledger = Ledger(FolderStore(folder))
    files = named(ledger.checkpoints.rest(ledger.checkpoints.commits()[-1]))
    return {client: (name, ledger.states.get(name)) for client, name in files.items()}
