"""Clients that evaluate: what they hold out, what they are sent and may answer, and what the round makes of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome
from fl_engine.data.partition import LEAST_HELD_OUT, held_count, hold_out, split_held_out
from fl_engine.exchange.client import execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import Manifest, key_of, order_sum, signed
from fl_engine.exchange.updates import payload_bytes
from fl_engine.rounds import at_clients
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.at_clients import Said, figures, planned
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import EvaluateConfig, RoundsConfig
from fl_engine.storage.store import Store, encode, sha256
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import SEED, TRAINING, Memory, TinyNet, start_of, tiny_site
from fl_engine.training.evaluation import evaluate
from tests.conftest import MemoryStore

ALGORITHM = FlexFL(training=TRAINING)


def site_of(algorithm: Any = ALGORITHM, share: float = 0.5, **more: Any) -> Any:
    site = tiny_site(algorithm, **more)
    partition, held = hold_out(site.partition, share, SEED)
    return replace(site, partition=partition, held=held)


SITE = site_of()
RUN = Run(ALGORITHM, SITE, RoundsConfig(), evaluation=EvaluateConfig(on="clients"))
STATE = start_of(ALGORITHM, SITE)
PLAN = planned(RUN, STATE, 3, 0.0)
ORDER = PLAN.orders[0]


@given(st.integers(0, 60), st.floats(0.01, 0.99), st.integers(0, 5), st.integers(0, 5))
def test_held_out_samples_and_the_others_are_all_samples(n: int, share: float, seed: int, client: int) -> None:
    train, held = split_held_out(n, share, seed, client)
    assert sorted([*train, *held]) == list(range(n)) and list(train) == sorted(train) and list(held) == sorted(held)
    assert len(held) == held_count(n, share)
    if n < 2 * LEAST_HELD_OUT:
        assert not len(held)
    else:
        assert min(len(train), len(held)) >= LEAST_HELD_OUT and abs(len(held) - share * n) <= LEAST_HELD_OUT


def test_evaluating_clients_are_drawn_by_round_and_seed() -> None:
    run = replace(RUN, evaluation=EvaluateConfig(on="clients", share=0.3))
    drawn = [[order.client for order in planned(run, STATE, round, 0.0).orders] for round in range(4)]
    assert {len(clients) for clients in drawn} == {round(0.3 * len(SITE.fleet))}
    assert len({tuple(clients) for clients in drawn}) == 4 and all(clients == sorted(clients) for clients in drawn)
    assert drawn == [[order.client for order in planned(run, STATE, round, 0.0).orders] for round in range(4)]


def test_clients_that_hold_out_nothing_are_not_asked() -> None:
    few = replace(SITE, held=tuple(p[:0] if c % 2 else p for c, p in enumerate(SITE.held)))
    assert all(order.client % 2 == 0 for order in planned(replace(RUN, site=few), STATE, 0, 0.0).orders)


def test_client_scores_its_model_as_the_server_would() -> None:
    outcome = execute(ALGORITHM, ORDER, SITE)
    held = torch.from_numpy(SITE.held[ORDER.client])
    x, y = SITE.data.train_x[held], SITE.data.train_y[held]
    score = evaluate(SITE.family, ORDER.payload, ORDER.spec, SITE.data, x, y)
    assert isinstance(outcome, ClientUpdate) and outcome.payload == {} and outcome.num_examples == len(held)
    assert outcome.metrics == {"accuracy": score.value, "loss": score.loss}
    assert not set(SITE.held[ORDER.client]) & set(SITE.partition.clients[ORDER.client])


def test_a_model_that_diverged_is_a_failure_and_not_a_figure() -> None:
    poisoned = {name: t * float("nan") for name, t in ORDER.payload.items()}
    outcome = execute(ALGORITHM, replace(ORDER, payload=poisoned), SITE)
    assert isinstance(outcome, ClientFailure) and outcome.stage == "evaluate"


def files_of(changes: dict[str, Any], value: bytes | None = None) -> Outcome:
    store, key = MemoryStore(), key_of(b"secret")
    box = Mailbox(store, replace(SITE.rules, algorithm=ALGORITHM), key)
    honest = execute(ALGORITHM, ORDER, SITE)
    box.put_outcome(PLAN, honest)
    base = f"rounds/00003/evaluation/updates/{ORDER.client}"
    assert box.answered(3) == set() and box.answered(3, evaluates=True) == {ORDER.client}
    value = store.files[f"{base}.safetensors"] if value is None else value
    told = Manifest.model_validate_json(store.files[f"{base}.json"])
    told = told.model_copy(update={"signature": None, "sha256": sha256(value), **changes})
    store.put(f"{base}.json", signed(told, key(ORDER)).model_dump_json().encode())
    store.put(f"{base}.safetensors", value)
    return box.receive(PLAN, ORDER.client)


def test_an_honest_answer_is_taken_and_is_small() -> None:
    assert files_of({}) == execute(ALGORITHM, ORDER, SITE)
    assert payload_bytes(ORDER) < 2**11 < payload_bytes(replace(ORDER, evaluates=False))


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
        ({"order": order_sum(replace(ORDER, evaluates=False))}, "order"),
    ],
)
def test_each_lie_has_its_code(changes: dict[str, Any], code: str) -> None:
    outcome = files_of(changes)
    assert isinstance(outcome, ClientFailure) and (outcome.stage, outcome.code) == ("validate", code)


def test_tensors_are_not_read_into_a_model() -> None:
    outcome = files_of({}, encode({"w": torch.zeros(2)}))
    assert isinstance(outcome, ClientFailure) and outcome.code == "names"
    outcome = files_of({}, encode({"w": torch.zeros(10**5)}))
    assert isinstance(outcome, ClientFailure) and outcome.code == "file", "more bytes than an empty answer has"


SAID = [
    Said("S", "weak", 0.5, 1.0),
    Said("L", "strong", 0.9, 0.2),
    Said("S", "weak", 0.7, 2.0),
    Said("S", "old", 0.1, 4.0),
]


def test_figures_that_can_be_checked_by_hand() -> None:
    found = figures(SAID)
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
    assert figures(SAID[::-1]) == found, "in whatever order they are heard"
    assert figures([]) == {}


class Tiny:
    """Two rounds of the tiny job with clients that evaluate, in a store."""

    def __init__(self, job: Any) -> None:
        partition, held = hold_out(job.partition, 0.3, job.seed)
        self.job, self.site = job, replace(job.site, partition=partition, held=held)
        job_backend = job.make_backend()
        job_backend._site = self.site
        self.backend = job_backend

    def federate(self, store: Store, should_stop: Callable[[], bool] = lambda: False, **terms: Any) -> bytes:
        settings = RoundsConfig(stop=2, commit_every=1, **terms)
        run = Run(self.job.algorithm, self.site, settings, evaluation=EvaluateConfig(on="clients"))
        ledger = ledger_in(store, rules=replace(self.site.rules, algorithm=self.job.algorithm))
        state = rounds.federate(run, self.job.initial(), self.backend, ledger, Memory(), should_stop=should_stop)
        return encode(state.params)


@pytest.mark.long
@pytest.mark.parametrize("keep_updates", [False, True])
def test_a_run_killed_at_any_write_has_the_same_figures(
    job: Any, new_store: Any, dying: Any, killed: Any, timeless: Any, keep_updates: bool
) -> None:
    tiny, whole = Tiny(job), new_store()
    expected = tiny.federate(whole, keep_updates=keep_updates)
    rows = timeless(whole)
    assert all("on_clients/mean" in metrics and metrics["on_clients/asked"] == 6 for _, metrics, _ in rows)
    assert not [key for key in whole.files if "evaluation/" in key], "a commit deletes orders and answers"
    writes, alive = 0, False
    while not alive:
        store = new_store()
        try:
            tiny.federate(dying(store, writes), keep_updates=keep_updates)
            alive = True
        except killed:
            assert tiny.federate(store, keep_updates=keep_updates) == expected, f"killed at write {writes}"
            assert timeless(store) == rows, f"killed at write {writes}"
        writes += 3
    assert writes > 3 * (10 if keep_updates else 2)


def test_clients_that_keep_a_part_of_the_model_are_refused() -> None:
    algorithm = PersonalHeads(training=TRAINING)
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError, match=r"evaluate\.on=clients evaluates the global model.*PersonalHeads keep"):
        at_clients.check(algorithm, site.family, site.pool)
    at_clients.check(ALGORITHM, TinyNet(), SITE.pool)
