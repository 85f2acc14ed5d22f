"""Helpers for test suites: run rounds with or without a ledger, check client selection, check search spaces."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any, get_args

import torch
from hypothesis import strategies as st
from pydantic import TypeAdapter

from fl_engine.backends import InProcess
from fl_engine.core import seeds
from fl_engine.core.clients import client_metrics
from fl_engine.core.contracts import Algorithm, Backend, MeasuresClients, ModelFamily, Searched, Selector
from fl_engine.core.errors import ClientError
from fl_engine.core.slicing import take
from fl_engine.core.state import pack
from fl_engine.core.types import (
    FULL,
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Device,
    Params,
    Pool,
    RoundContext,
    RoundPlan,
    Stage,
    SubmodelSpec,
    TaskContext,
)
from fl_engine.exchange.client import Site, execute
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.selection.capacity import dispatched, holds
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import Store, encode
from fl_engine.testing.tiny import SEED, Memory, context_of, network_of, start_of, tiny_pool, update_of, with_level
from fl_engine.training.evaluation import evaluate_pool

LARGEST_R = 200.0
"""Upper limit of random free memory, in % of the full model. No device of the fleet has more memory."""


class Recording(InProcess):
    """Backend that records every assignment and every result."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.seen: list[tuple[Assignment, ClientResult]] = []

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        for result in super().run(algorithm, plan):
            self.seen.append((plan.assignment_of[result.client], result))
            yield result


def federated(
    run: Run, store: Store, backend: Backend | None = None, keep_rounds: float = 0, **more: Any
) -> tuple[Any, list[Row]]:
    """Start or resume a run with a ledger in `store`. Return the final state and the rows of all rounds. Without a
    `backend`, clients run in this process. `more` contains further arguments for `loop.federate`."""
    rules = replace(run.site.rules, algorithm=run.algorithm)
    ledger = Ledger(store, run.options.keep_every, rules, keep_rounds=keep_rounds)
    start, backend = start_of(run.algorithm, run.site), backend or InProcess(run.site)
    return loop.federate(run, start, backend, ledger, Memory(), **more), list(ledger.checkpoints.rows())


def copied(params: Params) -> Params:
    return {name: t.clone() for name, t in params.items()}


def snapshot(state: Any) -> bytes:
    """Serialise the tensors and all other values of a state to bytes."""
    tensors, rest = pack(state)
    return encode(tensors) + json.dumps(rest, sort_keys=True).encode()


def task_context(site: Site, client: int, observed: float) -> TaskContext:
    return TaskContext(site.family.layout(), site.pool, site.fleet[client], observed)


def task_or_none(algorithm: Algorithm, assignment: Any, context: TaskContext) -> Any:
    try:
        return algorithm.task(assignment, context)
    except ClientError:
        return None


def results_of(
    algorithm: Algorithm, site: Site, state: Any, round: int, data: st.DataObject, noise: bool = True
) -> tuple[RoundPlan, list[Any]]:
    """Plan a round and create its updates. Each client has random free memory, which determines the sub-model."""
    plan = algorithm.plan(state, context_of(site, round, SEED))
    layout = site.family.layout()
    generator = torch.Generator().manual_seed(round)
    updates = []
    for assignment in plan.assignments:
        observed = data.draw(st.floats(0, LARGEST_R), label="free")
        task = task_or_none(algorithm, assignment, task_context(site, assignment.client, observed))
        spec: SubmodelSpec = assignment.spec if task is None else task.spec
        payload = copied(take(assignment.payload, layout, spec, have=assignment.spec))
        if noise:
            payload = {n: t + torch.randn(t.shape, generator=generator, dtype=t.dtype) for n, t in payload.items()}
        update = update_of(assignment, spec, payload, data.draw(st.integers(1, 1000), label="examples"))
        metrics = {m.name: data.draw(st.floats(m.low, m.high), label=m.name) for m in client_metrics(algorithm)}
        updates.append(with_level(replace(update, metrics={**update.metrics, **metrics}), site))
    return plan, updates


def played(algorithm: Algorithm, site: Site, state: Any, rounds: int) -> tuple[Any, list[ClientResult]]:
    """Run `rounds` rounds. Return the final state and the results of all rounds."""
    seen: list[ClientResult] = []
    for round in range(rounds):
        plan = replace(algorithm.plan(state, context_of(site, round, SEED)), noise_seed=bytes(32))
        found = [
            execute(algorithm, assignment, site) for assignment in sorted(plan.assignments, key=lambda o: o.client)
        ]
        results = [with_level(o, site) if isinstance(o, ClientUpdate) else o for o in found]
        state = algorithm.merge(state, plan, results, ServerSite(site))
        seen += results
    return state, seen


def train_loss(site: Site, found: Params) -> float:
    """Return the mean loss of the reported pool members on all training data. `found` is the result of `published`."""
    train = torch.arange(len(site.data.train_y))
    scores = evaluate_pool(site.family, found, site.pool, site.data.part(train, train))
    return fmean(score.loss for score in scores.values())


def check_search(algorithm: Algorithm, family: ModelFamily) -> None:
    """Check that the search range of each searched parameter contains the configured value, or the start value if the
    configured value is None. The first trial of a study uses these values."""
    if not isinstance(algorithm, Searched):
        return
    values = TypeAdapter[Any](type(algorithm)).dump_python(algorithm, mode="json")
    for path, interval in algorithm.search_space(tiny_pool(algorithm, network_of(algorithm, family))).items():
        value: Any = values
        for part in path.split("."):
            entries = dict(enumerate(value)) if isinstance(value, list) else value or {}
            value = entries.get(int(part) if isinstance(value, list) else part)
        start = interval.start if value is None else value
        low, high = interval.low, interval.high
        if low is None or high is None:
            inside = start in interval.choices
        else:
            inside = start is not None and low <= start <= high
        assert inside, f"{path} must be in the search range {interval}, got {value}: {algorithm}"


ROUNDS = 500
CAPACITIES = [35.0, 60.0, 110.0] * 8
"""Capacities of 24 devices, in % of the full model."""
SILENT = range(6)
"""Clients that never respond, two for each capacity."""
PER_ROUND = 6


def check_silent(selector: Selector, pool: Pool) -> None:
    """Check that clients that never respond are not selected more often than other clients with the same capacity. The
    tolerance is three standard deviations under uniform selection. The smallest model fits into every device.
    Responding clients train the largest model that fits into the device and is not larger than the received model."""
    least = 100 * pool[dispatched(pool)[0]].share + 0.1
    fleet = tuple(Device(client, f"{most:g}", max(most, least), 8.0) for client, most in enumerate(CAPACITIES))
    tables, selected, stages = selector.init(fleet, pool), Counter[int](), get_args(Stage)
    metrics = {"loss": 1.0, "steps": 1.0}
    if isinstance(selector, MeasuresClients):
        metrics |= {metric.name: min(max(1.0, metric.low), metric.high) for metric in selector.client_metrics()}
    known = (10,) * len(fleet)
    for round in range(ROUNDS):
        context = RoundContext(round, 0, fleet, fleet, pool, samples=known, draws=known)
        for client, level in selector.pick(tables, context, PER_ROUND, seeds.rng(0, "silent", round)):
            assignment = Assignment(round, client, FULL, {}, 0, level)
            result: ClientResult = ClientFailure(round, client, stages[round % len(stages)], "never responds")
            if client not in SILENT:
                fits = [i for i in range(level + 1) if holds(fleet[client], pool[i].share)]
                result = ClientUpdate(round, client, FULL, {}, 10, metrics, level=max(fits, default=0))
            selected[client] += 1
            tables = selector.learn(tables, assignment, result, float(client not in SILENT))
    for most in {device.most for device in fleet}:
        alike = [device.client for device in fleet if device.most == most]
        silent = [selected[client] for client in alike if client in SILENT]
        honest = fmean(selected[client] for client in alike if client not in SILENT)
        slack = 3 * math.sqrt(honest / len(silent))
        assert fmean(silent) <= honest + slack, f"capacity {most:g} %: silent {silent} times, others {honest:g} times"
