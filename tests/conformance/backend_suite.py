"""Test suite for backends. Subclasses of `BackendSuite` define the fixture `make`.

For each assignment, a backend must return the same result as `client.execute`, bit for bit.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import DepthFL, FedAvg, FedPer, FlexFL
from fl_engine.codecs import Half
from fl_engine.core.augmentation import Crop, Flip
from fl_engine.core.clients import with_prefix
from fl_engine.core.contracts import Algorithm, Backend, ModelFamily
from fl_engine.core.slicing import initial_params
from fl_engine.core.steps import Balanced, Cosine
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, Codecs, Device, Params, RoundPlan
from fl_engine.data.partitioning import hold_out
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, deliver, execute
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import tensor_bytes
from fl_engine.testing import Suite, tiny
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.rounds import copied
from fl_engine.training.lanes import can_run
from fl_engine.training.numerics import SINGLE, Numerics

Make = Callable[[Site, Sequence[str]], Backend]

ALGORITHM = FlexFL(training=tiny.TRAINING)
TWO = ("cpu", "cpu")
DEVICES: tuple[tuple[str, ...], ...] = (("cpu",), TWO)
NUMERICS = pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 2)], ids=["single", "batched"])

FAMILIES: dict[str, ModelFamily] = {
    "tiny": tiny.TinyNet(),
    "batch_norm": SmallCNN((1, 8, 8), 4, width=0.5),
    "dropout": tiny.TinyNet(dropout=0.5),
}


class BackendSuite(Suite):
    """Test suite that requires a fixture `make`, a function (site, device names) -> backend."""

    @pytest.fixture(autouse=True)
    def one_thread(self, restore_settings: None) -> None:
        """Set torch to one thread, so that `execute` and the clients of a backend use the same number of threads."""
        torch.set_num_threads(1)

    @pytest.mark.parametrize("devices", DEVICES, ids="-".join)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_bits_equal_those_of_one_after_the_other(self, make: Make, family: str, devices: Sequence[str]) -> None:
        site, plan = _work(ALGORITHM, FAMILIES[family])
        _check_bits(make(site, devices), ALGORITHM, site, plan)
        assert list(make(site, devices).run(ALGORITHM, replace(plan, assignments=()))) == []

    @NUMERICS
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_bits_are_equal_for_other_samples_and_tasks(self, make: Make, kind: str, numerics: Numerics) -> None:
        family, data = KINDS[kind]
        site = tiny.tiny_site(ALGORITHM, family, data=data)
        site = replace(site, numerics=numerics if can_run(family.module()) else SINGLE)
        _check_bits(make(site, TWO), ALGORITHM, site, tiny.first_plan(ALGORITHM, site))

    def test_bits_are_equal_with_encoded_weights(self, make: Make) -> None:
        """If a backend has a mailbox, the mailbox uses `site.rules` to decode updates."""
        site, plan = _work(ALGORITHM, FAMILIES["batch_norm"])
        plan = coding.encode_plan(plan, site.pool, Codecs(Half(), Half()), tiny.SEED)
        found = _sorted(make(site, TWO).run(ALGORITHM, plan))
        expected = (deliver(ALGORITHM, execute(ALGORITHM, a, site), a, site) for a in plan.assignments)
        tiny.assert_same_results(found, _sorted(expected))
        for result in found:
            assert isinstance(result, ClientUpdate)
            assert tensor_bytes(result.travels) < tensor_bytes(result.payload)

    def test_finished_round_is_freed(self, make: Make) -> None:
        """After a round, a backend must not keep references to the round's plan, because plans contain models."""
        site, plan = _work(ALGORITHM, FAMILIES["tiny"])
        backend, left = make(site, ("cpu",)), weakref.ref(plan)
        assert len(_sorted(backend.run(ALGORITHM, plan))) == len(plan.assignments)
        del plan
        gc.collect()
        assert left() is None

    @pytest.mark.parametrize("kind", [DepthFL, FedPer])
    def test_client_state_travels_both_ways(self, make: Make, kind: Any) -> None:
        """An assignment contains the client's stored state, and a result contains the client's new state."""
        algorithm = kind(training=replace(tiny.TRAINING, fraction=1.0, epochs=1))
        site = tiny.tiny_site(algorithm, fleet=tiny.tiny_fleet(3))
        vars(site)["rules"] = replace(site.rules, algorithm=algorithm)  # as in a run
        backend, state = make(site, ("cpu", "cpu")), tiny.start_of(algorithm, site)
        states: dict[int, Params] = {}
        for round in range(2):
            plan = algorithm.plan(state, tiny.context_of(site, round, tiny.SEED))
            assignments = tuple(
                replace(a, memory={**a.memory, **with_prefix(states.get(a.client, {}))}) for a in plan.assignments
            )
            plan = replace(plan, assignments=assignments)
            assert [bool(assignment.memory) for assignment in plan.assignments] == [round > 0] * 3
            found = _check_bits(backend, algorithm, site, plan)
            states = {result.client: result.state for result in found}
            state = algorithm.merge(state, plan, found, ServerSite(site))

    @NUMERICS
    def test_bits_are_equal_with_sampler_augmentation_and_schedule(self, make: Make, numerics: Numerics) -> None:
        augment = (Crop(padding=1), Flip())
        training = replace(tiny.TRAINING, sampler=Balanced(), augment=augment, schedule=Cosine(restart=1))
        algorithm = FlexFL(training=training)
        site = replace(tiny.tiny_site(algorithm), numerics=numerics)
        plan = tiny.first_plan(algorithm, site)
        for result in _check_bits(make(site, TWO), algorithm, site, plan):
            plain = execute(ALGORITHM, plan.assignment_of[result.client], site)
            assert isinstance(plain, ClientUpdate)
            assert any(not torch.equal(tensor, result.payload[name]) for name, tensor in plain.payload.items())
            assert plain.metrics["macs"] == result.metrics["macs"]

    @NUMERICS
    def test_denormal_weights_are_zero(self, make: Make, numerics: Numerics) -> None:
        """A backend must call `prepare_process` in each process that trains."""
        algorithm = FedAvg(training=replace(tiny.TRAINING, epochs=1, batch_size=100, fraction=1.0), eligible="all")
        site = tiny.tiny_site(algorithm, fleet=tuple(Device(c, "strong", 110.0, 0.0) for c in range(4)))
        site = replace(site, numerics=numerics)
        start = initial_params(site.family, tiny.SEED)
        denormal = torch.full_like(start["extra.linear.weight"], 2.0**-130)
        # With classifier weights of zero, the layer `extra` gets no gradient in the first step.
        start |= {"extra.linear.weight": denormal, "classifier.weight": torch.zeros_like(start["classifier.weight"])}
        plan = algorithm.plan(tiny.start_of(algorithm, site, start), tiny.context_of(site, 0, tiny.SEED))
        torch.set_flush_denormal(True)
        for result in _check_bits(make(site, TWO), algorithm, site, plan):
            assert not result.payload["extra.linear.weight"].view(torch.int32).any()

    def test_failures_are_results_like_any_other(self, make: Make) -> None:
        """Client 1 fails, because it has no samples. Client 3 fails, because its loss is not finite."""
        algorithm = FedAvg(training=replace(tiny.TRAINING, fraction=1.0), eligible="all")
        site = tiny.tiny_site(algorithm, sizes=(8, 0, 8, 8, 8), fleet=tiny.tiny_fleet(5))
        plan = tiny.first_plan(algorithm, site)
        nan = replace(
            plan.assignments[3], payload={n: t * float("nan") for n, t in plan.assignments[3].payload.items()}
        )
        assignments = (*plan.assignments[:3], nan, *plan.assignments[4:])
        found = _sorted(make(site, TWO).run(algorithm, replace(plan, assignments=assignments)))
        failed = {result.client: result.stage for result in found if isinstance(result, ClientFailure)}
        assert failed == {1: "train", 3: "train"}
        expected = _sorted(execute(algorithm, a, site) for a in plan.assignments if a.client not in failed)
        tiny.assert_same_results([result for result in found if result.client not in failed], expected)

    def test_device_with_too_little_memory_fails_to_prune(self, make: Make) -> None:
        fleet = tuple(Device(c, "strong", 100.5, 40.0) for c in range(6))
        algorithm = FedAvg(training=replace(tiny.TRAINING, fraction=1.0, epochs=1), eligible="capable")
        site = tiny.tiny_site(algorithm, fleet=fleet)
        found = list(make(site, TWO).run(algorithm, tiny.first_plan(algorithm, site)))
        assert {result.stage for result in found if isinstance(result, ClientFailure)} == {"prune"}

    def test_global_generator_and_plan_stay_as_they_are(self, make: Make) -> None:
        """Assignments share memory with the global model, so a backend must not change the tensors of an assignment."""
        site, plan = _work(ALGORITHM, FAMILIES["dropout"])
        before = replace(plan, assignments=tuple(replace(a, payload=copied(a.payload)) for a in plan.assignments))
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            expected = torch.get_rng_state()
            found.append(_sorted(make(site, TWO).run(ALGORITHM, plan)))
            assert torch.equal(torch.get_rng_state(), expected)
        tiny.assert_same_results(*found)
        tiny.assert_same_assignments(plan, before)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_evaluating_assignments_give_equal_metrics(self, make: Make, family: str) -> None:
        """Clients do not train. A client without held-out samples fails."""
        site, plan = _work(ALGORITHM, FAMILIES[family])
        partition, held = hold_out(site.partition, 0.5, tiny.SEED, site.data)
        first = plan.assignments[0].client
        site = replace(site, partition=partition, held=tuple(p[:0] if c == first else p for c, p in enumerate(held)))
        backend = make(site, TWO)
        _check_bits(backend, ALGORITHM, site, plan)
        evaluation = replace(
            plan, assignments=tuple(replace(a, evaluates=True) for a in plan.assignments), evaluates=True
        )
        found = _sorted(backend.run(ALGORITHM, evaluation))
        tiny.assert_same_results(found, _sorted(execute(ALGORITHM, a, site) for a in evaluation.assignments))
        for result in found:
            if result.client == first:
                assert isinstance(result, ClientFailure) and result.stage == "evaluate"
            else:
                assert isinstance(result, ClientUpdate) and not result.payload
                assert result.num_examples == len(held[result.client])
                assert result.metrics.keys() == {"accuracy", "loss"}


def _work(algorithm: Algorithm, family: ModelFamily | None = None) -> tuple[Site, RoundPlan]:
    site = tiny.tiny_site(algorithm, family)
    return site, tiny.first_plan(algorithm, site)


def _sorted(results: Iterable[ClientResult]) -> list[ClientResult]:
    return sorted(results, key=lambda result: result.client)


def _check_bits(backend: Backend, algorithm: Algorithm, site: Site, plan: RoundPlan) -> list[ClientUpdate]:
    """Check that the backend returns the same results as `execute`, and that updates do not share memory with later
    updates. Return the backend's updates."""
    updates, payloads = list[ClientUpdate](), list[Params]()
    for result in backend.run(algorithm, plan):
        assert isinstance(result, ClientUpdate)
        updates.append(result)
        payloads.append(copied(result.payload))
    for update, payload in zip(updates, payloads, strict=True):
        tiny.assert_same_bits(update.payload, payload)
    updates.sort(key=lambda update: update.client)
    tiny.assert_same_results(updates, _sorted(execute(algorithm, assignment, site) for assignment in plan.assignments))
    return updates
