"""Clients that evaluate: what they hold out, what they are sent and may answer, and what the round makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import Ditto, FedPer, FlexFL
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate
from fl_engine.data.partitioning import hold_out
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import ResultManifest, assignment_sum, key_of, sign
from fl_engine.exchange.updates import payload_bytes
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.at_clients import ClientScore, metrics_of, plan_evaluation
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import EvaluateConfig, RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import Store, encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, Memory, context_of, start_of, tiny_site
from fl_engine.training.evaluation import evaluate
from tests.harness.stores import MemoryStore

ALGORITHM = FlexFL(training=TRAINING)


def site_of(algorithm: Any = ALGORITHM, share: float = 0.5, **more: Any) -> Any:
    site = tiny_site(algorithm, **more)
    partition, held = hold_out(site.partition, share, SEED, site.data)
    return replace(site, partition=partition, held=held)


SITE = site_of()
RUN = Run(ALGORITHM, SITE, RoundsConfig(), evaluation=EvaluateConfig(on="clients"))
STATE = start_of(ALGORITHM, SITE)
PLAN = plan_evaluation(RUN, STATE, 3, 0.0)
ASSIGNMENT = PLAN.assignments[0]


def asked(run: Run, round: int) -> list[int]:
    return [assignment.client for assignment in plan_evaluation(run, STATE, round, 0.0).assignments]


def test_evaluating_clients_are_drawn_by_round_and_seed() -> None:
    run = replace(RUN, evaluation=EvaluateConfig(on="clients", share=0.3))
    drawn = [asked(run, round) for round in range(4)]
    assert {len(clients) for clients in drawn} == {round(0.3 * len(SITE.fleet))}
    assert len({tuple(clients) for clients in drawn}) == 4 and all(clients == sorted(clients) for clients in drawn)
    assert drawn == [asked(run, round) for round in range(4)]


def test_clients_without_held_out_samples_do_not_evaluate() -> None:
    few = replace(SITE, held=tuple(p[:0] if c % 2 else p for c, p in enumerate(SITE.held)))
    assert all(client % 2 == 0 for client in asked(replace(RUN, site=few), 0))


def test_client_scores_its_model_as_the_server_would() -> None:
    result = execute(ALGORITHM, ASSIGNMENT, SITE)
    held = torch.from_numpy(SITE.held[ASSIGNMENT.client])
    x, y = SITE.data.train_x[held], SITE.data.train_y[held]
    score = evaluate(SITE.family, ASSIGNMENT.payload, ASSIGNMENT.spec, SITE.data, x, y)
    assert isinstance(result, ClientUpdate) and result.payload == {} and result.num_examples == len(held)
    assert result.metrics == {"accuracy": score.value, "loss": score.loss}
    assert not set(SITE.held[ASSIGNMENT.client]) & set(SITE.partition.clients[ASSIGNMENT.client])


def test_a_model_that_diverged_is_a_failure_and_not_a_figure() -> None:
    poisoned = {name: t * float("nan") for name, t in ASSIGNMENT.payload.items()}
    result = execute(ALGORITHM, replace(ASSIGNMENT, payload=poisoned), SITE)
    assert isinstance(result, ClientFailure) and result.stage == "evaluate"


def files_of(changes: dict[str, Any], value: bytes | None = None) -> ClientResult:
    store, key = MemoryStore(), key_of(b"secret")
    box = Mailbox(store, replace(SITE.rules, algorithm=ALGORITHM), key)
    honest = execute(ALGORITHM, ASSIGNMENT, SITE)
    box.put_result(PLAN, honest)
    base = f"rounds/00003/evaluation/updates/{ASSIGNMENT.client}"
    assert box.clients_with_results(3) == set() and box.clients_with_results(3, evaluates=True) == {ASSIGNMENT.client}
    value = store.files[f"{base}.safetensors"] if value is None else value
    told = ResultManifest.model_validate_json(store.files[f"{base}.json"])
    told = told.model_copy(update={"signature": None, "sha256": sha256(value), **changes})
    store.put(f"{base}.json", sign(told, key(ASSIGNMENT)).model_dump_json().encode())
    store.put(f"{base}.safetensors", value)
    return box.receive(PLAN, ASSIGNMENT.client)


def test_honest_evaluation_is_accepted_and_small() -> None:
    assert files_of({}) == execute(ALGORITHM, ASSIGNMENT, SITE)
    assert payload_bytes(ASSIGNMENT) < 2**11 < payload_bytes(replace(ASSIGNMENT, evaluates=False))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"num_examples": 10**6}, "examples"),
        ({"metrics": {"accuracy": 1.0000001, "loss": 1.0}}, "metrics"),
        ({"metrics": {"accuracy": -0.1, "loss": 1.0}}, "metrics"),
        ({"metrics": {"accuracy": 0.5, "loss": 1e300}}, "metrics"),
        ({"metrics": {"accuracy": 0.5}}, "metrics"),
        ({"metrics": {"accuracy": 0.5, "loss": 1.0, "avg": 1.0}}, "metrics"),
        ({"metrics": {"loss": 1.0, "steps": 1.0, "macs": 1.0, "seconds": 1.0, "free": 1.0}}, "metrics"),
        ({"spec": {"keep": {}, "blocks": None}}, "spec"),
        ({"assignment": assignment_sum(replace(ASSIGNMENT, evaluates=False))}, "assignment"),
    ],
)
def test_each_lie_has_its_code(changes: dict[str, Any], code: str) -> None:
    result = files_of(changes)
    assert isinstance(result, ClientFailure) and (result.stage, result.code) == ("validate", code)


def test_tensors_are_not_read_into_a_model() -> None:
    result = files_of({}, encode({"w": torch.zeros(2)}))
    assert isinstance(result, ClientFailure) and result.code == "names"
    result = files_of({}, encode({"w": torch.zeros(10**5)}))
    assert isinstance(result, ClientFailure) and result.code == "file", "more bytes than an empty answer has"


SAID = [
    ClientScore("S", "weak", 0.5, 1.0),
    ClientScore("L", "strong", 0.9, 0.2),
    ClientScore("S", "weak", 0.7, 2.0),
    ClientScore("S", "old", 0.1, 4.0),
]


def test_figures_that_can_be_checked_by_hand() -> None:
    found = metrics_of(SAID)
    assert found["on_clients/mean"] == pytest.approx(0.55) and found["on_clients/loss"] == pytest.approx(1.8)
    assert found["on_clients/worst"] == 0.1 and found["on_clients/clients"] == 4
    # 0.1, 0.5, 0.7, 0.9: the tenth lies at place 0.3 of 0..3, between the first two
    assert found["on_clients/p10"] == pytest.approx(0.1 + 0.3 * 0.4)
    # deviations -.45, -.05, .15, .35: squares .2025 + .0025 + .0225 + .1225 = .35, over 3
    assert found["on_clients/spread"] == pytest.approx((0.35 / 3) ** 0.5)
    assert found["on_clients/mean/level/L"] == 0.9 and found["on_clients/spread/level/L"] == 0
    assert found["on_clients/mean/level/S"] == pytest.approx(1.3 / 3) and found["on_clients/clients/level/S"] == 3
    assert found["on_clients/mean/tier/weak"] == pytest.approx(0.6) and found["on_clients/worst/tier/old"] == 0.1
    assert found["on_clients/spread/tier/weak"] == pytest.approx(statistics.stdev([0.5, 0.7]))
    assert metrics_of(SAID[::-1]) == found, "in whatever order they are heard"
    assert metrics_of([]) == {}


class Tiny:
    """Two rounds of the tiny job with clients that evaluate, in a store."""

    def __init__(self, job: Any) -> None:
        partition, held = hold_out(job.partition, 0.3, job.seed, job.site.data)
        self.job, self.site = job, replace(job.site, partition=partition, held=held)
        job_backend = job.make_backend()
        job_backend._site = self.site
        self.backend = job_backend

    def federate(self, store: Store, should_stop: Callable[[], bool] = lambda: False, **options: Any) -> bytes:
        settings = RoundsConfig(stop=2, commit_every=1, **options)
        run = Run(self.job.algorithm, self.site, settings, evaluation=EvaluateConfig(on="clients"))
        ledger = Ledger(store, rules=replace(self.site.rules, algorithm=self.job.algorithm))
        state = rounds.federate(run, self.job.initial(), self.backend, ledger, Memory(), should_stop=should_stop)
        return encode(state.params)


@pytest.mark.long
@pytest.mark.parametrize("keep_updates", [False, True])
def test_a_run_killed_at_any_write_has_the_same_figures(
    job: Any, killed_at_writes: Any, timeless: Any, keep_updates: bool
) -> None:
    tiny = Tiny(job)
    whole = killed_at_writes(lambda store: tiny.federate(store, keep_updates=keep_updates), 3)
    rows = timeless(whole)
    assert all("on_clients/mean" in metrics and metrics["on_clients/asked"] == 6 for _, metrics, _ in rows)
    assert not [key for key in whole.files if "evaluation/" in key], "a commit deletes orders and answers"


@pytest.mark.parametrize("kind", [FedPer, Ditto])
def test_client_with_own_parameters_evaluates_its_own_model(kind: Any) -> None:
    algorithm = kind(training=TRAINING)
    site = site_of(algorithm)
    run = Run(algorithm, site, RoundsConfig(), evaluation=EvaluateConfig(on="clients"))
    before = start_of(algorithm, site)
    assignment = algorithm.plan(before, context_of(site, 0, SEED)).assignments[0]
    result = execute(algorithm, assignment, site)
    assert isinstance(result, ClientUpdate)
    client, states = assignment.client, {assignment.client: result.state}
    plan = plan_evaluation(run, before, 0, 0.0, own=lambda client: states.get(client, {}))
    for each in plan.assignments:
        changed = {name for name, tensor in each.payload.items() if not tensor.equal(before.params[name])}
        expected = set() if each.client != client else set(before.params if kind is Ditto else result.state)
        assert changed == expected
