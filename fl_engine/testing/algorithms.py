"""Test suite for algorithms. Subclass `AlgorithmSuite` and define the fixture `algorithm`.

    class TestMine(AlgorithmSuite):
        @pytest.fixture
        def algorithm(self): return Mine(training=TRAINING)

The suite uses the network, data and fleet from `fl_engine.testing.tiny`. Override `family` to use another network.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.aggregation import Aggregation
from fl_engine.aggregation.geometric_median import GeometricMedian
from fl_engine.aggregation.privacy import LEARN_NOTHING, Private
from fl_engine.aggregation.rules import Mean, Median, TrimmedMean
from fl_engine.aggregation.server_opt import Average
from fl_engine.algorithms import CONTRACT
from fl_engine.codecs import Half
from fl_engine.core.clients import bounds_of, kept_by_clients, out_of_bounds
from fl_engine.core.contracts import Algorithm, KeepsClientState, MeasuresClients, ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ConfigError, ModelError, PoolError
from fl_engine.core.slicing import contains, full_shapes, initial_params, shapes, take
from fl_engine.core.types import FULL, ClientUpdate, Codecs, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.exchange.client import Site
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.verify import check_equal, verify_rounds
from fl_engine.selection import Uniform
from fl_engine.selection.capacity import round_size
from fl_engine.storage.store import FolderStore, tensor_bytes
from fl_engine.testing import Suite, law, rounds, tiny
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.models import kept_mask
from fl_engine.training import strategy
from fl_engine.training.evaluation import published, weights_of

ROUNDS = st.integers(0, 2000)
SEEDS = st.integers(0, 2**40)


class AlgorithmSuite(Suite):
    """Test suite that requires a fixture `algorithm`. Subclasses may override methods that are not tests."""

    @pytest.fixture
    def family(self) -> ModelFamily:
        return tiny.TinyNet()

    @pytest.fixture
    def site(self, algorithm: Algorithm, family: ModelFamily) -> Site:
        return tiny.tiny_site(algorithm, family)

    @pytest.fixture
    def state(self, algorithm: Algorithm, site: Site) -> Any:
        return tiny.start_of(algorithm, site)

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        """Return True if a device never receives a model that is larger than the device's maximum capacity."""
        return True

    def ends_in_the_whole(self, algorithm: Algorithm) -> bool:
        """Return True if the largest pool model is the full network, with or without early exits."""
        return True

    def with_aggregation(self, algorithm: Algorithm, aggregation: Aggregation) -> Algorithm:
        """Return a copy of the algorithm that uses `aggregation` and does not use a server optimizer. Skip the test if
        the algorithm does not support `aggregation`."""
        options = {f.name for f in fields(cast(Any, algorithm))}
        if "aggregation" not in options:
            pytest.skip("this algorithm has an aggregation of its own")
        if isinstance(aggregation, Private) and isinstance(algorithm, KeepsClientState | MeasuresClients):
            pytest.skip("client state or metrics leave clients without noise")
        more: dict[str, Any] = {"server": Average()} if "server" in options else {}
        if isinstance(aggregation, Private) and not isinstance(getattr(algorithm, "selection", None), LEARN_NOTHING):
            more["selection"] = Uniform()
        return replace(cast(Any, algorithm), aggregation=aggregation, **more)  # type: ignore[no-any-return]

    def most_assignments(self, algorithm: Algorithm, site: Site) -> int:
        """Return the maximum number of clients in a round."""
        fraction: float = getattr(algorithm, "training").fraction  # noqa: B009 - not every algorithm has one
        return round_size(fraction, len(site.fleet))

    # --- before the rounds
    def test_algorithm_fits_the_contract_and_is_a_value(self, algorithm: Algorithm) -> None:
        assert CONTRACT.missing(type(algorithm)) == []
        assert copy.deepcopy(algorithm) == algorithm
        assert hash(copy.deepcopy(algorithm)) == hash(algorithm)

    def test_pool_ascends_to_the_full_model(self, algorithm: Algorithm, site: Site) -> None:
        layout, whole = site.family.layout(), count_params(site.family)
        assert tiny.tiny_pool(algorithm, site.family) == site.pool, (
            "the pool follows from the algorithm and the network"
        )
        for model in site.pool:
            assert model.params == count_params(site.family, model.spec), model.name
            assert model.share == pytest.approx(model.params / whole, rel=1e-12)
            assert model.bytes == 4 * model.params
        for small, large in pairwise(site.pool):
            assert small.share < large.share
            if contains(layout, large.spec, small.spec):
                assert small.macs <= large.macs
        heads = {exit_name(block) for block in getattr(site.family, "exits", ())}
        whole_trunk = SubmodelSpec.of({}, [block for block in layout.blocks if block not in heads])
        last = site.pool[-1]
        if self.ends_in_the_whole(algorithm):
            assert contains(layout, last.spec, whole_trunk), "early exits' heads may be left out, nothing else"
        assert contains(layout, last.spec, FULL) == (last.share == 1)
        assert site.pool[-1].reported, "`full` is the accuracy of the last member"
        assert any(m.dispatched for m in site.pool)
        names, specs = {m.name for m in site.pool}, {m.spec for m in site.pool}
        assert len(names) == len(specs) == len(site.pool)

    def test_init_keeps_the_parameters(self, algorithm: Algorithm, site: Site) -> None:
        params = initial_params(site.family, seed=1)
        tiny.assert_same_bits(tiny.start_of(algorithm, site, rounds.copied(params)).params, params)

    def test_search_space_contains_the_configured_values(self, algorithm: Algorithm, family: ModelFamily) -> None:
        rounds.check_search(algorithm, family)

    def test_silent_client_is_not_selected_more_often(self, algorithm: Algorithm, site: Site) -> None:
        selector = getattr(algorithm, "selector", None)
        if selector is None:
            pytest.skip("this algorithm draws its clients itself")
        rounds.check_silent(selector(site.pool), site.pool)

    # --- plan
    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_plan_is_pure(self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int) -> None:
        before = rounds.snapshot(state)
        torch.manual_seed(1)
        first = algorithm.plan(state, tiny.context_of(site, round, seed))
        torch.manual_seed(2)
        algorithm.plan(state, tiny.context_of(site, round + 1, seed))
        tiny.assert_same_assignments(algorithm.plan(state, tiny.context_of(site, round, seed)), first)
        assert rounds.snapshot(state) == before

    def test_rounds_and_seeds_differ(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        plans = [
            algorithm.plan(state, tiny.context_of(site, r, s))
            for r, s in [*((r, tiny.SEED) for r in range(30)), (0, 99)]
        ]
        drawn = [assignment.seed for plan in plans for assignment in plan.assignments]
        assert len(set(drawn)) == len(drawn), "two assignments would train alike"
        assert len({tuple((a.client, a.spec) for a in plan.assignments) for plan in plans}) > 1

    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_assignments_fit_their_clients_and_send_slices(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int
    ) -> None:
        layout, full = site.family.layout(), full_shapes(site.family)
        plan = algorithm.plan(state, tiny.context_of(site, round, seed))
        clients = [assignment.client for assignment in plan.assignments]
        assert plan.round == round and all(assignment.round == round for assignment in plan.assignments)
        assert 1 <= len(clients) <= self.most_assignments(algorithm, site)
        assert len(set(clients)) == len(clients) and set(clients) <= {d.client for d in site.fleet}
        for assignment in plan.assignments:
            model = site.pool[assignment.level]
            assert model.dispatched, "only dispatched members are sent, or sub-models of their size"
            assert count_params(site.family, assignment.spec) == model.params
            if self.promises_to_fit(algorithm):
                most = site.fleet[assignment.client].most
                assert most > 100 * model.share, "does not fit: if on purpose, override `promises_to_fit`"
            assert json.loads(json.dumps(dict(assignment.hints))) == dict(assignment.hints), "hints travel as JSON"
            assert assignment.payload.keys() == set(shapes(layout, assignment.spec, full))
            if model.name in {name.partition("/")[0] for name in published(state)}:
                tiny.assert_same_bits(assignment.payload, weights_of(published(state), layout, model))
                continue
            tiny.assert_same_bits(assignment.payload, take(state.params, layout, assignment.spec))
            for name, tensor in assignment.payload.items():
                mask = kept_mask(layout, assignment.spec, name, full[name])
                assert torch.equal(tensor.flatten(), state.params[name][mask]), name

    # --- task
    @law
    @given(round=ROUNDS, observed=st.floats(0, rounds.LARGEST_R))
    def test_client_trains_at_most_what_it_was_sent(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, observed: float
    ) -> None:
        layout = site.family.layout()
        for assignment in algorithm.plan(state, tiny.context_of(site, round, tiny.SEED)).assignments:
            before = rounds.copied(assignment.payload)
            context = rounds.task_context(site, assignment.client, observed)
            task = rounds.task_or_none(algorithm, assignment, context)
            assert task == rounds.task_or_none(algorithm, assignment, context), "task is pure"
            tiny.assert_same_bits(assignment.payload, before)
            if task is None:
                continue
            assert contains(layout, assignment.spec, task.spec)
            take(assignment.payload, layout, task.spec, have=assignment.spec)
            assert task.epochs >= 1
            assert task.batch_size >= 1
            assert task.optimizer.lr > 0
            for teacher in task.distillation.teachers if task.distillation else ():
                assert contains(layout, task.spec, teacher), "a teacher is inside the model in training"
                assert count_params(site.family, teacher) < count_params(site.family, task.spec)

    def test_client_with_enough_memory_trains_everything(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        for assignment in algorithm.plan(state, tiny.context_of(site, 0, tiny.SEED)).assignments:
            assert (
                algorithm.task(assignment, rounds.task_context(site, assignment.client, rounds.LARGEST_R)).spec
                == assignment.spec
            )

    # --- merge
    @law
    @given(round=ROUNDS, data=st.data())
    def test_merging_untouched_slices_changes_nothing(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, results = rounds.results_of(algorithm, site, state, round, data, noise=False)
        before = rounds.snapshot(state)
        tiny.assert_same_bits(algorithm.merge(state, plan, results, ServerSite(site)).params, state.params)
        assert rounds.snapshot(state) == before

    @law
    @given(round=ROUNDS, data=st.data())
    def test_untrained_elements_keep_their_value(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, results = rounds.results_of(algorithm, site, state, round, data)
        layout, merged = site.family.layout(), algorithm.merge(state, plan, results, ServerSite(site)).params
        assert list(merged) == list(state.params)
        for name, old in state.params.items():
            trained = torch.zeros(old.shape, dtype=torch.bool)
            for result in results:
                if name in result.payload:
                    trained |= kept_mask(layout, result.spec, name, old.shape)
            assert merged[name].dtype == old.dtype
            assert torch.equal(merged[name][~trained], old[~trained]), name
            assert torch.isfinite(merged[name]).all()

    def test_merge_uses_the_option_aggregation(self, algorithm: Algorithm, family: ModelFamily) -> None:
        merged = []
        for aggregation in (Mean(), Median()):
            chosen = self.with_aggregation(algorithm, aggregation)
            site = tiny.tiny_site(chosen, family)
            merged.append(rounds.played(chosen, site, start_or_skip(chosen, site), rounds=1)[0].params)
        different = any(not torch.equal(tensor, merged[1][name]) for name, tensor in merged[0].items())
        assert different, "merge ignores the option `aggregation`: call `self.aggregation.start`, or remove the option"

    @law
    @given(round=ROUNDS, data=st.data())
    def test_order_of_results_does_not_matter(
        self, algorithm: Algorithm, site: Site, round: int, data: st.DataObject
    ) -> None:
        # Use float64, because rounding errors of float32 would hide a difference.
        params = {name: t.double() for name, t in initial_params(site.family, tiny.SEED).items()}
        state = tiny.start_of(algorithm, site, params)
        plan, results = rounds.results_of(algorithm, site, state, round, data)
        merged = algorithm.merge(state, plan, results, ServerSite(site)).params
        other = algorithm.merge(state, plan, data.draw(st.permutations(results)), ServerSite(site)).params
        for name, tensor in merged.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-13, atol=1e-13)

    @law
    @given(round=ROUNDS, data=st.data())
    def test_failures_do_not_stop_a_round(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, results = rounds.results_of(algorithm, site, state, round, data)
        failed = data.draw(st.integers(0, len(plan.assignments) - 1))
        failures = [tiny.failure_of(assignment) for assignment in plan.assignments]
        survivors = [result for i, result in enumerate(results) if i != failed]
        with_failure = [failures[i] if i == failed else result for i, result in enumerate(results)]
        merged = algorithm.merge(state, plan, with_failure, ServerSite(site))
        tiny.assert_same_bits(merged.params, algorithm.merge(state, plan, survivors, ServerSite(site)).params)
        unchanged = algorithm.merge(state, plan, failures, ServerSite(site))
        tiny.assert_same_bits(unchanged.params, state.params)
        for later in (merged, unchanged):
            assert algorithm.plan(later, tiny.context_of(site, round + 1, tiny.SEED)).assignments

    # --- whole runs
    @pytest.mark.parametrize(
        "aggregation", [TrimmedMean(clip=0.5), GeometricMedian(), Private(noise_multiplier=0.01)], ids=lambda a: a.name
    )
    def test_two_rounds_with_other_aggregations(
        self, algorithm: Algorithm, family: ModelFamily, aggregation: Aggregation
    ) -> None:
        chosen = self.with_aggregation(algorithm, aggregation)
        site = tiny.tiny_site(chosen, family)
        state = start_or_skip(chosen, site)
        final, results = rounds.played(chosen, site, state, rounds=2)
        assert any(not hasattr(o, "reason") for o in results), "every client failed"
        before, after = published(state), published(final)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
        tiny.assert_same_bits(dict(published(rounds.played(chosen, site, state, rounds=2)[0])), dict(after))

    def test_three_rounds_learn_and_repeat_bit_for_bit(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        """Updates must have the engine's and the declared metrics."""
        torch.manual_seed(1)
        final, results = rounds.played(algorithm, site, state, rounds=3)
        torch.manual_seed(2)
        tiny.assert_same_bits(rounds.played(algorithm, site, state, rounds=3)[0].params, final.params)
        updates = [result for result in results if isinstance(result, ClientUpdate)]
        assert updates, "every client failed"
        for update in updates:
            assert not out_of_bounds(update.metrics, bounds_of(algorithm, coded=update.encoded is not None))
        assert rounds.train_loss(site, published(final)) < rounds.train_loss(site, published(state))

    def test_encoding_weights_halves_the_bytes(self, algorithm: Algorithm, site: Site, tmp_path: Path) -> None:
        """An uninterrupted and a resumed run must produce the same model, bit for bit. If the algorithm defines codecs,
        these codecs replace the run's codecs."""
        plain, half = Codecs(), Codecs(Half(), Half())
        finals, moved, memory = [], {}, 0
        for name, codecs, stops in (("plain", plain, (2,)), ("whole", half, (2,)), ("stopped", half, (1, 2))):
            for stop in stops:
                options = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, keep_updates=name == "stopped")
                run, backend = Run(algorithm, site, options, codecs=codecs), rounds.Recording(site)
                final, rows = rounds.federated(run, FolderStore(tmp_path / name), backend)
                memory += sum(
                    tensor_bytes(each.memory) for each, _ in backend.seen if (each.round, name) == (0, "plain")
                )
            finals.append(dict(published(final)))
            moved[name] = rows[0].metrics
        tiny.assert_same_bits(finals[1], finals[2])
        own = any(model.codecs is not None for model in site.pool)
        assert own == all(torch.equal(tensor, finals[0][name]) for name, tensor in finals[1].items())
        state = sum(4 * math.prod(shape) for shape in kept_by_clients(algorithm, site.family, site.pool).values())
        for way, uncoded in (("bytes_down", memory), ("bytes_up", state * moved["plain"]["clients_trained"])):
            weights = {name: metrics[way] - uncoded for name, metrics in moved.items()}
            assert weights["plain"] == (1 if own else 2) * weights["whole"] > 0
            assert weights["whole"] == weights["stopped"]

    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_other_samples_and_tasks_learn_and_resume(self, algorithm: Algorithm, kind: str, tmp_path: Path) -> None:
        """A run that is killed in the third round and resumed must match an uninterrupted run bit for bit."""
        family, data = KINDS[kind]
        try:
            site = tiny.tiny_site(algorithm, family, data=data)
            kept_by_clients(algorithm, family, site.pool)
        except (ModelError, PoolError) as refused:
            pytest.skip(str(refused))
        site = replace(site, numerics=strategy.choose(family, data.task, 4, 5, "fp32"))
        run = Run(algorithm, site, RoundsConfig(stop=4, evaluate_every=100, commit_every=1, keep_updates=True))
        whole, killed = tmp_path / "whole", tmp_path / "killed"

        def on_result(round: int, results: int, clients: int) -> None:
            if (round, results) == (2, 2):  # Copy the store after a result of the third round has arrived.
                shutil.copytree(whole, killed)

        state, rows = rounds.federated(run, FolderStore(whole), on_result=on_result)
        final = published(state)
        assert rounds.train_loss(site, final) < rounds.train_loss(site, published(tiny.start_of(algorithm, site)))
        again, rows_again = rounds.federated(run, FolderStore(killed))
        tiny.assert_same_bits(published(again), final)
        for row, other in zip(rows, rows_again, strict=True):
            check_equal(row, other)

    def test_kept_rounds_are_merged_and_trained_again(self, algorithm: Algorithm, site: Site, tmp_path: Path) -> None:
        run = Run(algorithm, site, RoundsConfig(stop=3, evaluate_every=100))
        rounds.federated(run, FolderStore(tmp_path), keep_rounds=math.inf)
        ledger = Ledger(FolderStore(tmp_path), rules=replace(site.rules, algorithm=algorithm))
        start, backend, again = tiny.start_of(algorithm, site), rounds.Recording(site), dict[int, str]()
        for chosen, train in (((1, 2), False), ((0,), True)):
            again |= dict(verify_rounds(run, start, backend, ledger, chosen, train))
        merged = "trained" if run.client_state else "merged"  # old client states are not kept
        assert again == {0: "trained", 1: merged, 2: merged}


def start_or_skip(algorithm: Algorithm, site: Site) -> Any:
    """Return the state before the first round. Skip the test if the algorithm does not support `aggregation`."""
    try:
        return tiny.start_of(algorithm, site)
    except ConfigError as error:
        if error.path != "algorithm.aggregation":
            raise
        pytest.skip(str(error))
