"""What every backend has to hold, for pytest: subclass `BackendSuite`, give it a `make` fixture, done.

    class TestMine(BackendSuite):
        @pytest.fixture
        def make(self): return lambda site, devices: Mine(site, devices)

The measure is `client.execute`, one order after the other: whatever a backend does, it gives the same bits.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import DepthFL, FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.codecs import Half
from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.clients import travelling
from fl_engine.core.contracts import Algorithm, Backend, ModelFamily
from fl_engine.core.samplers import Balanced
from fl_engine.core.schedules import Cosine
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import ClientFailure, ClientUpdate, Codecs, Device, Outcome, Params, RoundPlan
from fl_engine.data.partition import hold_out
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, delivered, execute
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import tensor_bytes
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    TinyNet,
    assert_same_bits,
    assert_same_orders,
    assert_same_outcomes,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)
from fl_engine.training.lanes import can_run
from fl_engine.training.numerics import SINGLE, Numerics, flushes_now

Make = Callable[[Site, Sequence[str]], Backend]

DEVICES: tuple[tuple[str, ...], ...] = (("cpu",), ("cpu", "cpu"))

FAMILIES: dict[str, ModelFamily] = {
    "tiny": TinyNet(),
    "batch_norm": SmallCNN((1, 8, 8), 4, width=0.5),
    "dropout": TinyNet(dropout=0.5),
}


class BackendSuite:
    """Needs a fixture `make`: (site, device names) to a backend."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError("a BackendSuite needs a `make` fixture")

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """`execute` called by hand has the thread count that a backend gives its clients."""
        before, flushed = torch.get_num_threads(), flushes_now()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
        torch.set_flush_denormal(flushed)

    @pytest.mark.parametrize("devices", DEVICES, ids="-".join)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_equal_bits_to_one_order_after_the_other(self, make: Make, family: str, devices: Sequence[str]) -> None:
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm, FAMILIES[family])
        found = _sorted(make(site, devices).run(algorithm, plan))
        assert_same_outcomes(found, _sorted(execute(algorithm, order, site) for order in plan.orders))
        assert all(isinstance(o, ClientUpdate) for o in found)

    @pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 2)], ids=["single", "batched"])
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_equal_bits_for_other_samples_and_tasks(self, make: Make, kind: str, numerics: Numerics) -> None:
        family, data = KINDS[kind]
        if not can_run(family.module()):
            numerics = SINGLE
        algorithm = FlexFL(training=TRAINING)
        site = replace(tiny_site(algorithm, family, data=data), numerics=numerics)
        plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        found = _sorted(make(site, ("cpu", "cpu")).run(algorithm, plan))
        assert_same_outcomes(found, _sorted(execute(algorithm, order, site) for order in plan.orders))
        assert all(isinstance(o, ClientUpdate) for o in found)

    def test_equal_bits_where_weights_are_encoded(self, make: Make) -> None:
        """A backend that keeps updates in a mailbox has to give it `site.rules`, by which they are decoded."""
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm, FAMILIES["batch_norm"])
        plan = coding.sent(plan, site.pool, Codecs(Half(), Half()), SEED)
        found = _sorted(make(site, ("cpu", "cpu")).run(algorithm, plan))
        answers = [(execute(algorithm, order, site), order) for order in plan.orders]
        assert_same_outcomes(found, _sorted(delivered(algorithm, answer, order, site) for answer, order in answers))
        for outcome in found:
            assert isinstance(outcome, ClientUpdate)
            assert tensor_bytes(outcome.travels) < tensor_bytes(outcome.payload)

    def test_a_round_that_is_over_is_let_go_of(self, make: Make) -> None:
        """Otherwise two rounds' models would be in memory."""
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm, FAMILIES["tiny"])
        backend, left = make(site, ("cpu",)), weakref.ref(plan)
        assert len(_sorted(backend.run(algorithm, plan))) == len(plan.orders)
        del plan
        gc.collect()
        assert left() is None

    @pytest.mark.parametrize("kind", [DepthFL, PersonalHeads])
    def test_what_is_kept_for_a_client_travels_both_ways(self, make: Make, kind: Any) -> None:
        """State held by the server (DepthFL) is sent with the assignment; a client's own state travels both ways."""
        algorithm = kind(training=replace(TRAINING, fraction=1.0, epochs=1))
        site = tiny_site(algorithm, fleet=tiny_fleet(3))
        vars(site)["rules"] = replace(site.rules, algorithm=algorithm)  # in a run the algorithm sets the rules too
        backend, state = make(site, ("cpu", "cpu")), start_of(algorithm, site)
        kept: dict[int, Params] = {}
        for round in range(2):
            plan = algorithm.plan(state, context_of(site, round, SEED))
            orders = (replace(o, memory={**o.memory, **travelling(kept.get(o.client, {}))}) for o in plan.orders)
            plan = replace(plan, orders=tuple(orders))
            assert [bool(order.memory) for order in plan.orders] == [round > 0] * 3
            found = _sorted(backend.run(algorithm, plan))
            assert_same_outcomes(found, _sorted(execute(algorithm, order, site) for order in plan.orders))
            kept = {outcome.client: outcome.state for outcome in found if isinstance(outcome, ClientUpdate)}
            state = algorithm.merge(state, plan, found, ServerSite(site))

    @pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 2)], ids=["single", "batched"])
    def test_equal_bits_for_samples_that_are_drawn_and_changed(self, make: Make, numerics: Numerics) -> None:
        """The reference executes one assignment at a time; other threads and processes must give its bits."""
        work: dict[str, Any] = {
            "sampler": Balanced(),
            "augment": (Crop(padding=1), Flip()),
            "schedule": Cosine(restart=1),
        }
        plain, algorithm = FlexFL(training=TRAINING), FlexFL(training=replace(TRAINING, **work))
        site = replace(tiny_site(algorithm), numerics=numerics)
        plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        found = _sorted(make(site, ("cpu", "cpu")).run(algorithm, plan))
        assert_same_outcomes(found, _sorted(execute(algorithm, order, site) for order in plan.orders))
        for other, order in zip(found, plan.orders, strict=True):
            without = execute(plain, order, site)
            assert isinstance(without, ClientUpdate) and isinstance(other, ClientUpdate)
            assert any(not torch.equal(t, other.payload[name]) for name, t in without.payload.items())
            assert without.metrics["macs"] == other.metrics["macs"]

    @pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 2)], ids=["single", "batched"])
    def test_denormal_weights_are_zero(self, make: Make, numerics: Numerics) -> None:
        """A backend calls `prepare_process` in each process that trains."""
        algorithm = FedAvg(training=replace(TRAINING, epochs=1, batch_size=100, fraction=1.0), eligible="all")
        site = tiny_site(algorithm, fleet=tuple(Device(c, "strong", 110.0, 0.0) for c in range(4)))
        site = replace(site, numerics=numerics)
        start = initial_params(site.family, SEED)
        denormal = torch.full_like(start["extra.linear.weight"], 2.0**-130)
        # Behind weights of zero a layer has no gradient in its first step.
        start |= {"extra.linear.weight": denormal, "classifier.weight": torch.zeros_like(start["classifier.weight"])}
        plan = algorithm.plan(start_of(algorithm, site, start), context_of(site, 0, SEED))
        backend = make(site, ("cpu", "cpu"))
        torch.set_flush_denormal(True)
        expected = _sorted(execute(algorithm, order, site) for order in plan.orders)
        found = _sorted(backend.run(algorithm, plan))
        assert_same_outcomes(found, expected)
        for outcome in found:
            assert isinstance(outcome, ClientUpdate)
            assert not outcome.payload["extra.linear.weight"].view(torch.int32).any()

    def test_failures_are_outcomes_like_any_other(self, make: Make) -> None:
        """One client has no samples, one a loss that is not finite, and both stay their own business."""
        algorithm = FedAvg(training=replace(TRAINING, fraction=1.0), eligible="all")
        fleet = tiny_fleet(5)
        site = tiny_site(algorithm, sizes=(8, 0, 8, 8, 8), fleet=fleet)
        plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        poisoned = {name: t * float("nan") for name, t in plan.orders[3].payload.items()}
        orders = list(plan.orders)
        orders[3] = replace(orders[3], payload=poisoned)
        found = _sorted(make(site, ("cpu", "cpu")).run(algorithm, replace(plan, orders=tuple(orders))))
        failed = {o.client: o for o in found if isinstance(o, ClientFailure)}
        assert set(failed) == {1, 3}
        assert {o.stage for o in failed.values()} == {"train"}
        expected = _sorted(execute(algorithm, o, site) for o in plan.orders if o.client not in failed)
        assert_same_outcomes([o for o in found if o.client not in failed], expected)

    def test_a_device_that_cannot_fails_in_pruning(self, make: Make) -> None:
        fleet = tuple(Device(c, "strong", 100.5, 40.0) for c in range(6))
        algorithm = FedAvg(training=replace(TRAINING, fraction=1.0, epochs=1), eligible="capable")
        site = tiny_site(algorithm, fleet=fleet)
        plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
        found = list(make(site, ("cpu", "cpu")).run(algorithm, plan))
        assert {o.stage for o in found if isinstance(o, ClientFailure)} == {"prune"}

    def test_the_global_generator_neither_moves_nor_matters(self, make: Make) -> None:
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm, FAMILIES["dropout"])
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = torch.get_rng_state()
            found.append(_sorted(make(site, ("cpu", "cpu")).run(algorithm, plan)))
            assert torch.equal(torch.get_rng_state(), expected)
        assert_same_outcomes(*found)

    def test_the_plan_is_only_read(self, make: Make) -> None:
        """Orders of one round share the memory of the global model."""
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm)
        copied = tuple(replace(o, payload={n: t.clone() for n, t in o.payload.items()}) for o in plan.orders)
        for _ in make(site, ("cpu", "cpu")).run(algorithm, plan):
            pass
        assert_same_orders(plan, replace(plan, orders=copied))

    @pytest.mark.parametrize("family", FAMILIES)
    def test_evaluating_assignments_give_equal_figures(self, make: Make, family: str) -> None:
        """In one round, of the same clients. A client that holds out nothing fails; nothing is trained."""
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm, FAMILIES[family])
        partition, held = hold_out(site.partition, 0.5, SEED)
        first = plan.orders[0].client
        site = replace(site, partition=partition, held=tuple(p[:0] if c == first else p for c, p in enumerate(held)))
        backend = make(site, ("cpu", "cpu"))
        trained = _sorted(backend.run(algorithm, plan))
        asked = replace(plan, orders=tuple(replace(o, evaluates=True) for o in plan.orders), evaluates=True)
        found = _sorted(backend.run(algorithm, asked))
        assert_same_outcomes(found, _sorted(execute(algorithm, order, site) for order in asked.orders))
        assert_same_outcomes(trained, _sorted(execute(algorithm, order, site) for order in plan.orders))
        for outcome in found:
            if outcome.client == first:
                assert isinstance(outcome, ClientFailure) and outcome.stage == "evaluate"
            else:
                assert isinstance(outcome, ClientUpdate) and not outcome.payload
                assert outcome.num_examples == len(held[outcome.client])
                assert outcome.metrics.keys() == {"accuracy", "loss"}

    def test_no_orders_no_outcomes(self, make: Make) -> None:
        algorithm = FlexFL(training=TRAINING)
        site, plan = _work(algorithm)
        for devices in DEVICES:
            assert list(make(site, devices).run(algorithm, replace(plan, orders=()))) == []

    def test_an_outcome_outlives_the_next(self, make: Make) -> None:
        """Updates are kept until all are there: none may be a view of memory that a later client reuses."""
        algorithm = FlexFL(training=Training(fraction=0.25, epochs=1, batch_size=4, lr=0.5))
        site, plan = _work(algorithm)
        kept: list[tuple[Outcome, Any]] = []
        for outcome in make(site, ("cpu", "cpu")).run(algorithm, plan):
            assert isinstance(outcome, ClientUpdate)
            kept.append((outcome, {n: t.clone() for n, t in outcome.payload.items()}))
        for outcome, payload in kept:
            assert isinstance(outcome, ClientUpdate)
            assert_same_bits(outcome.payload, payload)


# -------------------------------------------------------------------------------------------------- helpers
def _work(algorithm: Algorithm, family: ModelFamily | None = None, round: int = 0) -> tuple[Site, RoundPlan]:
    site = tiny_site(algorithm, family)
    return site, algorithm.plan(start_of(algorithm, site), context_of(site, round, SEED))


def _sorted(outcomes: Any) -> list[Outcome]:
    return sorted(outcomes, key=lambda o: o.client)
