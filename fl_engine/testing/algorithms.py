"""What every algorithm has to hold, for pytest: subclass `AlgorithmSuite`, give it an `algorithm` fixture, done.

    class TestMine(AlgorithmSuite):
        @pytest.fixture
        def algorithm(self): return Mine(training=TRAINING)

Runs on the tiny network, data and fleet of `fl_engine.testing.tiny`; override `family` for another network.
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_engine.aggregation.privacy import LEARN_NOTHING, Private
from fl_engine.aggregation.rules import Aggregation, TrimmedMean
from fl_engine.aggregation.server_opt import Average
from fl_engine.algorithms import CONTRACT
from fl_engine.codecs import Half
from fl_engine.core.clients import bounds_of, kept_by_clients
from fl_engine.core.contracts import Algorithm, KeepsClientState, ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.slicing import contains, full_shapes, initial_params, shapes, take
from fl_engine.core.types import FULL, ClientUpdate, Codecs, Outcome, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.exchange.client import Site
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.selection import Uniform
from fl_engine.selection.capacity import round_size
from fl_engine.storage.store import FolderStore
from fl_engine.testing.checks import check_search, check_silent
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.models import kept_mask
from fl_engine.testing.played import (
    LARGEST_R,
    assert_same_snapshot,
    copied,
    ending,
    federated,
    for_task,
    outcomes_of,
    played,
    snapshot,
    task_context,
    task_or_none,
    train_loss,
)
from fl_engine.testing.tiny import (
    SEED,
    TinyNet,
    assert_same_bits,
    assert_same_orders,
    context_of,
    failure_of,
    start_of,
    tiny_pool,
    tiny_site,
)
from fl_engine.training import strategy
from fl_engine.training.evaluation import published, weights_of

# Sites and states are immutable, so sharing them between examples is safe.
law = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors, HealthCheck.too_slow],
)

ROUNDS = st.integers(0, 2000)
SEEDS = st.integers(0, 2**40)
QUICK = ("next_token", "regression")
AGGREGATIONS = pytest.mark.parametrize(
    "aggregation",
    [TrimmedMean(clip=0.5), Private(noise_multiplier=0.01)],
    ids=lambda a: a.name,
)


class AlgorithmSuite:
    """Needs a fixture `algorithm`. `promises_to_fit`, `most_orders` and `ends_in_the_whole` may be overridden."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        raise NotImplementedError("an AlgorithmSuite needs an `algorithm` fixture")

    @pytest.fixture
    def family(self) -> ModelFamily:
        return TinyNet()

    @pytest.fixture
    def site(self, algorithm: Algorithm, family: ModelFamily) -> Site:
        return tiny_site(algorithm, family)

    @pytest.fixture
    def state(self, algorithm: Algorithm, site: Site) -> Any:
        return start_of(algorithm, site)

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        """Whether a device is only sent what it can hold at its maximum capacity."""
        return True

    def ends_in_the_whole(self, algorithm: Algorithm) -> bool:
        """Whether the pool's last member is the whole network, but for early exits."""
        return True

    def with_aggregation(self, algorithm: Algorithm, aggregation: Aggregation) -> Algorithm:
        """The algorithm with another aggregation, whose result is the new model as it is; and with whatever else it has
        to have for that. Skips the test where it takes none."""
        options = {f.name for f in fields(cast(Any, algorithm))}
        if "aggregation" not in options:
            pytest.skip("this algorithm has an aggregation of its own")
        if isinstance(aggregation, Private) and isinstance(algorithm, KeepsClientState):
            pytest.skip("what clients keep leaves them without noise")
        more: dict[str, Any] = {"server": Average()} if "server" in options else {}
        if isinstance(aggregation, Private) and not isinstance(getattr(algorithm, "selection", None), LEARN_NOTHING):
            more["selection"] = Uniform()
        return replace(cast(Any, algorithm), aggregation=aggregation, **more)  # type: ignore[no-any-return]

    def most_orders(self, algorithm: Algorithm, site: Site) -> int:
        """How many clients a round may have."""
        fraction: float = getattr(algorithm, "training").fraction  # noqa: B009 - not every algorithm has one
        return round_size(fraction, len(site.fleet))

    # --- before the rounds
    def test_it_has_what_an_algorithm_must_have(self, algorithm: Algorithm) -> None:
        assert CONTRACT.misfits(type(algorithm)) == []

    def test_the_pool_ascends_to_the_full_model(self, algorithm: Algorithm, site: Site) -> None:
        layout, whole = site.family.layout(), count_params(site.family)
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

    def test_building_the_pool_again_gives_the_same(self, algorithm: Algorithm, site: Site) -> None:
        assert tiny_pool(algorithm, site.family) == site.pool

    def test_init_keeps_the_parameters(self, algorithm: Algorithm, site: Site) -> None:
        params = initial_params(site.family, seed=1)
        assert_same_bits(start_of(algorithm, site, copied(params)).params, params)

    def test_an_algorithm_is_a_value(self, algorithm: Algorithm) -> None:
        assert copy.deepcopy(algorithm) == algorithm
        assert hash(copy.deepcopy(algorithm)) == hash(algorithm)

    def test_update_has_the_engines_and_the_declared_metrics(
        self, algorithm: Algorithm, site: Site, state: Any
    ) -> None:
        updates = [o for o in played(algorithm, site, state, rounds=1)[1] if isinstance(o, ClientUpdate)]
        assert updates, "every client failed"
        for update in updates:
            bounds = bounds_of(algorithm, coded=update.encoded is not None)
            assert update.metrics.keys() == bounds.keys()
            assert all(low <= update.metrics[name] <= high for name, (low, high) in bounds.items())

    def test_a_search_begins_with_what_is_configured(self, algorithm: Algorithm, family: ModelFamily) -> None:
        check_search(algorithm, family)

    def test_a_silent_client_is_asked_no_more_often(self, algorithm: Algorithm, site: Site) -> None:
        """By the algorithm's selection, and the sub-models that it may be sent."""
        selector = getattr(algorithm, "selector", None)
        if selector is None:
            pytest.skip("this algorithm draws its clients itself")
        check_silent(selector(site.pool), site.pool)

    # --- plan
    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_plan_is_pure(self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int) -> None:
        before = snapshot(state)
        torch.manual_seed(1)
        first = algorithm.plan(state, context_of(site, round, seed))
        torch.manual_seed(2)
        algorithm.plan(state, context_of(site, round + 1, seed))
        assert_same_orders(algorithm.plan(state, context_of(site, round, seed)), first)
        assert_same_snapshot(snapshot(state), before)

    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_another_seed_and_another_round_give_other_orders(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int
    ) -> None:
        plans = [
            algorithm.plan(state, context_of(site, r, s))
            for r, s in ((round, seed), (round, seed + 1), (round + 1, seed))
        ]
        drawn = [seed for plan in plans for seed in (o.seed for o in plan.orders)]
        assert len(set(drawn)) == len(drawn), "two orders would train alike"

    def test_who_is_asked_changes_from_round_to_round(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        asked = [
            tuple((o.client, o.spec) for o in algorithm.plan(state, context_of(site, r, SEED)).orders)
            for r in range(30)
        ]
        assert len(set(asked)) > 1

    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_clients_are_distinct_known_and_not_too_many(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int
    ) -> None:
        plan = algorithm.plan(state, context_of(site, round, seed))
        clients = [o.client for o in plan.orders]
        assert plan.round == round
        assert all(o.round == round for o in plan.orders)
        assert 1 <= len(clients) <= self.most_orders(algorithm, site)
        assert len(set(clients)) == len(clients)
        assert set(clients) <= {d.client for d in site.fleet}

    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_clients_hold_what_they_are_sent(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int
    ) -> None:
        for order in algorithm.plan(state, context_of(site, round, seed)).orders:
            model = site.pool[order.level]
            assert model.dispatched, "only dispatched members are sent, or sub-models of their size"
            assert count_params(site.family, order.spec) == model.params
            if self.promises_to_fit(algorithm):
                device = site.fleet[order.client]
                assert device.most > 100 * model.share, (
                    "it sends more than fits: if on purpose, override `promises_to_fit`"
                )

    @law
    @given(round=ROUNDS, seed=SEEDS)
    def test_the_payload_is_the_slice(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, seed: int
    ) -> None:
        layout, full = site.family.layout(), full_shapes(site.family)
        for order in algorithm.plan(state, context_of(site, round, seed)).orders:
            assert order.payload.keys() == set(shapes(layout, order.spec, full))
            model = site.pool[order.level]
            if model.name in {name.partition("/")[0] for name in published(state)}:
                assert_same_bits(order.payload, weights_of(published(state), layout, model))
                continue
            assert_same_bits(order.payload, take(state.params, layout, order.spec))
            for name, tensor in order.payload.items():
                mask = kept_mask(layout, order.spec, name, full[name])
                assert torch.equal(tensor.flatten(), state.params[name][mask]), name
            assert json.loads(json.dumps(dict(order.hints))) == dict(order.hints), "hints travel as JSON"

    # --- task
    @law
    @given(round=ROUNDS, observed=st.floats(0, LARGEST_R))
    def test_a_client_never_trains_more_than_it_was_sent(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, observed: float
    ) -> None:
        layout = site.family.layout()
        for order in algorithm.plan(state, context_of(site, round, SEED)).orders:
            before = copied(order.payload)
            context = task_context(site, order.client, observed)
            task = task_or_none(algorithm, order, context)
            assert task == task_or_none(algorithm, order, context), "task is pure"
            assert_same_bits(order.payload, before)
            if task is None:
                continue
            assert contains(layout, order.spec, task.spec)
            take(order.payload, layout, task.spec, have=order.spec)
            assert task.epochs >= 1
            assert task.batch_size >= 1
            assert task.optimizer.lr > 0
            for teacher in task.distillation.teachers if task.distillation else ():
                assert contains(layout, task.spec, teacher), "a teacher is inside the model in training"
                assert count_params(site.family, teacher) < count_params(site.family, task.spec)

    def test_more_than_enough_is_enough(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        for order in algorithm.plan(state, context_of(site, 0, SEED)).orders:
            assert algorithm.task(order, task_context(site, order.client, LARGEST_R)).spec == order.spec

    # --- merge
    @law
    @given(round=ROUNDS, data=st.data())
    def test_merging_untouched_slices_changes_nothing(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, outcomes = outcomes_of(algorithm, site, state, round, data, noise=False)
        before = snapshot(state)
        assert_same_bits(algorithm.merge(state, plan, outcomes, ServerSite(site)).params, state.params)
        assert_same_snapshot(snapshot(state), before)

    @law
    @given(round=ROUNDS, data=st.data())
    def test_elements_nobody_trained_keep_their_value(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, outcomes = outcomes_of(algorithm, site, state, round, data)
        layout, merged = site.family.layout(), algorithm.merge(state, plan, outcomes, ServerSite(site)).params
        assert list(merged) == list(state.params)
        for name, old in state.params.items():
            trained = torch.zeros(old.shape, dtype=torch.bool)
            for outcome in outcomes:
                if name in outcome.payload:
                    trained |= kept_mask(layout, outcome.spec, name, old.shape)
            assert merged[name].dtype == old.dtype
            assert torch.equal(merged[name][~trained], old[~trained]), name
            assert torch.isfinite(merged[name]).all()

    @law
    @given(round=ROUNDS, data=st.data())
    def test_the_order_of_outcomes_does_not_matter(
        self, algorithm: Algorithm, site: Site, round: int, data: st.DataObject
    ) -> None:
        # In double precision, where the sums' own rounding can be seen.
        params = {name: t.double() for name, t in initial_params(site.family, SEED).items()}
        state = start_of(algorithm, site, params)
        plan, outcomes = outcomes_of(algorithm, site, state, round, data)
        merged = algorithm.merge(state, plan, outcomes, ServerSite(site)).params
        other = algorithm.merge(state, plan, data.draw(st.permutations(outcomes)), ServerSite(site)).params
        for name, tensor in merged.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-13, atol=1e-13)

    @law
    @given(round=ROUNDS, data=st.data())
    def test_one_failure_is_survived(
        self, algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject
    ) -> None:
        plan, outcomes = outcomes_of(algorithm, site, state, round, data)
        failed = data.draw(st.integers(0, len(plan.orders) - 1))
        survivors = [o for i, o in enumerate(outcomes) if i != failed]
        with_failure: list[Outcome] = list(outcomes)
        with_failure[failed] = failure_of(plan.orders[failed])
        merged = algorithm.merge(state, plan, with_failure, ServerSite(site))
        assert_same_bits(merged.params, algorithm.merge(state, plan, survivors, ServerSite(site)).params)
        assert algorithm.plan(merged, context_of(site, round + 1, SEED)).orders

    def test_when_all_fail_nothing_changes(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        plan = algorithm.plan(state, context_of(site, 0, SEED))
        merged = algorithm.merge(state, plan, [failure_of(o) for o in plan.orders], ServerSite(site))
        assert_same_bits(merged.params, state.params)
        assert algorithm.plan(merged, context_of(site, 1, SEED)).orders

    # --- with every aggregation
    @AGGREGATIONS
    def test_two_rounds_with_every_aggregation(
        self, algorithm: Algorithm, family: ModelFamily, aggregation: Aggregation
    ) -> None:
        chosen = self.with_aggregation(algorithm, aggregation)
        site = tiny_site(chosen, family)
        state = start_of(chosen, site)
        final, outcomes = played(chosen, site, state, rounds=2)
        assert any(not hasattr(o, "reason") for o in outcomes), "every client failed"
        before, after = published(state), published(final)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
        assert_same_bits(dict(published(played(chosen, site, state, rounds=2)[0])), dict(after))

    # --- all of it together
    def test_three_rounds_learn_something(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        final, outcomes = played(algorithm, site, state, rounds=3)
        assert any(not hasattr(o, "reason") for o in outcomes), "every client failed"
        before, after = train_loss(site, published(state)), train_loss(site, published(final))
        assert after < before

    def test_a_run_repeats_bit_for_bit(self, algorithm: Algorithm, site: Site, state: Any) -> None:
        torch.manual_seed(1)
        first = played(algorithm, site, state, rounds=2)[0].params
        torch.manual_seed(2)
        assert_same_bits(played(algorithm, site, state, rounds=2)[0].params, first)

    @pytest.mark.parametrize("keep_updates", [False, True], ids=["in memory", "through the ledger"])
    def test_a_resumed_run_equals_one_that_was_not_stopped(
        self, algorithm: Algorithm, site: Site, tmp_path: Path, keep_updates: bool
    ) -> None:
        whole = ending(algorithm, site, tmp_path / "whole", 3, keep_updates)
        for stop in (1, 2):
            ending(algorithm, site, tmp_path / "stopped", stop, keep_updates)
        assert_same_bits(ending(algorithm, site, tmp_path / "stopped", 3, keep_updates), whole)

    def test_encoded_weights_move_half_the_bytes_and_go_on(
        self, algorithm: Algorithm, site: Site, tmp_path: Path
    ) -> None:
        """In memory, through the ledger, and after a stop: the same bits. An algorithm that has codecs of its own has
        these alone, whatever the run's."""
        plain, half = Codecs(), Codecs(Half(), Half())
        finals, moved = [], {}
        for name, codecs, stops in (("plain", plain, (2,)), ("whole", half, (2,)), ("stopped", half, (1, 2))):
            for stop in stops:
                terms = RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, keep_updates=name == "stopped")
                final, rows = federated(Run(algorithm, site, terms, codecs=codecs), FolderStore(tmp_path / name))
            finals.append(dict(published(final)))
            moved[name] = rows[0].metrics
        assert_same_bits(finals[1], finals[2])
        if any(model.codecs is not None for model in site.pool):
            assert_same_bits(finals[0], finals[1])
            for way in ("bytes_down", "bytes_up"):
                assert moved["plain"][way] == moved["whole"][way] == moved["stopped"][way] > 0
            return
        assert any(not torch.equal(t, finals[0][name]) for name, t in finals[1].items())
        state = sum(4 * math.prod(shape) for shape in kept_by_clients(algorithm, site.family, site.pool).values())
        for way, uncoded in (("bytes_down", 0), ("bytes_up", state * moved["plain"]["clients_trained"])):
            weights = {name: metrics[way] - uncoded for name, metrics in moved.items()}
            assert weights["plain"] == 2 * weights["whole"] == 2 * weights["stopped"] > 0

    @pytest.mark.parametrize(
        "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.long) for k in sorted(KINDS)]
    )
    def test_other_samples_and_tasks_learn_and_go_on(self, algorithm: Algorithm, kind: str, tmp_path: Path) -> None:
        """Side by side where the network can; after a kill in the third round with the same bits."""
        family, data = KINDS[kind]
        algorithm = for_task(algorithm, data)
        try:
            site = tiny_site(algorithm, family, data=data)
        except (ModelError, PoolError) as refused:
            pytest.skip(str(refused))
        numerics = strategy.choose(family, data.task, 4, 5, "fp32")
        site = replace(site, numerics=numerics)
        whole, killed = tmp_path / "whole", tmp_path / "killed"

        def heard(round: int, answered: int, asked: int) -> None:
            if (round, answered) == (2, 2):  # an answer of the third round is stored
                shutil.copytree(whole, killed)

        final = ending(algorithm, site, whole, 4, keep_updates=True, heard=heard)
        assert train_loss(site, final) < train_loss(site, published(start_of(algorithm, site)))
        assert killed.exists()
        assert_same_bits(ending(algorithm, site, killed, 4, keep_updates=True), final)
