"""Runs one round: plan -> encode -> collect -> merge -> evaluate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import isfinite
from statistics import fmean
from typing import Any

import torch

from fl_engine.aggregation import privacy
from fl_engine.core.clients import with_prefix
from fl_engine.core.errors import IntegrityError
from fl_engine.core.system import at_work
from fl_engine.core.types import Params, RoundContext, RoundPlan
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import Rejected
from fl_engine.exchange.updates import check_state
from fl_engine.rounds import at_clients, buffer, chain, poisoning
from fl_engine.rounds.acceptance import MovementHistory
from fl_engine.rounds.buffer import PendingUpdate
from fl_engine.rounds.checks import check_finite, check_merged, check_planned
from fl_engine.rounds.collect import Clients, collect
from fl_engine.rounds.options import SCORE
from fl_engine.rounds.recorder import record_round
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import Stopwatch
from fl_engine.selection.capacity import eligible, level_of
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import TensorFiles
from fl_engine.training.evaluation import Score, average, by_owner, evaluate_pool, published

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Progress:
    """The run's progress after a round, which is the input of the next round."""

    state: Any
    """State of the algorithm."""
    history: MovementHistory = field(default_factory=MovementHistory)
    """Movements (`acceptance`) of updates in earlier rounds."""
    clock: float = 0.0
    """Total simulated seconds of all rounds."""
    states: Mapping[int, str] = field(default_factory=dict)
    """Map each client to the name of the file that stores the client's state."""
    pending: tuple[PendingUpdate, ...] = ()
    """Pending updates of asynchronous rounds."""


def run_round(run: Run, before: Progress, round: int, clients: Clients) -> tuple[Progress, Row]:
    """Run one round. Return the run's progress after the round, and a row with the round's metrics.

    Raises:
        Stopped: `should_stop` returned true.
        ConfigError: The plan cannot be executed in asynchronous rounds.
        ModelError: `plan` or `merge` returned an invalid value.
    """
    watch = Stopwatch()
    started = watch.began
    plan, context = plan_round(run, before, round, clients, watch)
    begin = context.clock
    buffer.check_plan(run, before.state, plan, before.pending)
    collected = collect(run, plan, before.history, clients, begin)
    due = None
    if clients.pending is not None:
        due = buffer.collect_due(run, before.state, plan, collected.results, before.pending, begin, clients.pending)
    results = collected.results if due is None else due.results
    results.limit(run.options.samples_bound)
    state = run.algorithm.merge(before.state, plan if due is None else due.plan, results, run.server)
    check_merged(run.algorithm, before.state, state)
    check_finite(run.algorithm, before.state, state, round)
    states = before.states
    if clients.states is not None:
        files = {c: clients.states.put(kept, states.get(c)) for c, kept in results.states()}
        states = {**states, **files}
    if due is None:
        metrics, lines = record_round(run, plan, results, begin)
    else:
        metrics, lines = buffer.record_round(run, plan, due, begin)
    if run.trace is not None:
        metrics["clients_online"] = float(len(context.available))
        metrics["simulated_wait"] = begin - before.clock
        metrics["seconds_simulated"] += metrics["simulated_wait"]
    spent = privacy.epsilon(run.algorithm, run.site.fleet, run.site.pool, round + 1)
    if spent is not None:
        metrics["epsilon"] = spent
    watch.ends("merge")
    clock = before.clock + metrics.get("seconds_simulated", 0.0)
    evaluations: list[dict[str, Any]] = []
    if (round + 1) % run.options.evaluate_every == 0 or run.options.over(round + 1, clock):
        with at_work(tensor_bytes(published(state))):
            metrics |= _scores(run, state)
            if run.options.until is not None:
                metrics |= _validation(run, state, run.options.until.metric)
        if run.evaluation is not None:
            own = partial(_stored_state, run, round, files=states, states=clients.states)
            found, evaluations = at_clients.evaluate_at_clients(run, state, round, clock, clients, own)
            metrics |= found
        watch.ends("evaluate")
    watch.seconds["merge"] -= collected.waited
    metrics |= {"seconds_encode": 0.0, "seconds_train": collected.waited, "seconds_decode": collected.decoded}
    metrics |= {f"seconds_{phase}": seconds for phase, seconds in watch.seconds.items()}
    metrics["seconds_round"] = watch.began - started
    row = Row(
        round=round,
        metrics=metrics,
        clients=tuple(lines),
        evaluations=tuple(evaluations),
        plan=chain.plan_sum(plan),
        model=chain.state_sum(state),
    )
    return Progress(state, collected.history, clock, states, () if due is None else due.pending), row


def plan_round(
    run: Run, before: Progress, round: int, clients: Clients, watch: Stopwatch
) -> tuple[RoundPlan, RoundContext]:
    """Plan a round. Return the plan with encoded weights, and the context that the algorithm received. Raises
    ModelError if the plan is invalid."""
    # If updates are pending, some clients are training, so do not wait until a client comes online.
    begin = before.clock if before.pending else run.begins(round, before.clock)
    context = run.context(round, begin, {update.client for update in before.pending})
    plan = run.algorithm.plan(before.state, context)
    if context.without:
        allowed = tuple(each for each in plan.assignments if each.client not in context.without)
        plan = replace(plan, assignments=allowed)
    check_planned(run.algorithm, plan, len(run.site.fleet), len(run.site.pool))
    watch.ends("plan")
    plan = coding.encode_plan(plan, run.site.pool, run.codecs, run.site.seed)
    watch.ends("encode" if any(assignment.encoded is not None for assignment in plan.assignments) else "plan")
    plan = replace(plan, noise_seed=privacy.noise_seed(run.noise_key, round))
    if clients.states is not None:
        own = partial(_stored_state, run, round, files=before.states, states=clients.states)
        kept = (replace(each, memory={**each.memory, **with_prefix(own(each.client))}) for each in plan.assignments)
        plan = replace(plan, assignments=tuple(kept))
    watch.ends("plan")
    return plan, context


def _scores(run: Run, state: Any) -> dict[str, float]:
    scores = evaluate_pool(run.site.family, published(state), run.site.pool, run.site.data, run.devices)
    found = {"avg": average(scores), "full": scores[run.site.pool[-1].name].value}
    for name, score in scores.items():
        metrics = by_owner(score, run.site.partition.server_classes).metrics
        found |= {f"{metric}/{name}": value for metric, value in metrics.items()}
        found[f"loss/{name}"] = score.loss
    if not all(map(isfinite, found.values())):  # Files omit infinite and NaN values, so add a marker.
        found["diverged"] = 1.0
    if "backdoor" in run.faults.kinds:
        found["backdoor_success"] = poisoning.backdoor_success(run.site, state, run.devices)
    return found | _of_devices(run, scores)


def _validation(run: Run, state: Any, metric: str) -> dict[str, float]:
    """Return the scores on the proxy's validation samples, on which nothing trains."""
    site, pool = run.site, run.site.pool
    chosen = torch.from_numpy(site.partition.proxy_test)
    scores = evaluate_pool(site.family, published(state), pool, site.data.tested_on(chosen), run.devices)
    found = {"avg": average(scores), "full": scores[pool[-1].name].value}
    sign = 1 if site.data.task.metric.higher_is_better else -1
    return {f"validation/{name}": value for name, value in found.items()} | {SCORE: sign * found[metric]}


def _of_devices(run: Run, scores: Mapping[str, Score]) -> dict[str, float]:
    """Return the mean score over the devices. A device has the score of its level's sub-model (FedX, Section IV-D). The
    result's name contains the task's metric, for example `accuracy_devices`. Return an empty dict if fewer than two
    levels are evaluated, or if the level of a device is not evaluated."""
    pool = run.site.pool
    own = [level_of(device, pool) for device in eligible(run.algorithm, run.site.fleet, pool)]
    if len(scores) < 2 or any(pool[level].name not in scores for level in own):
        return {}
    return {f"{run.site.data.task.metric.name}_devices": fmean(scores[pool[level].name].value for level in own)}


def _stored_state(run: Run, round: int, client: int, files: Mapping[int, str], states: TensorFiles | None) -> Params:
    """Return the client's state; an empty state if the file is missing or invalid."""
    if states is None or client not in files:
        return {}
    try:
        stored = states.get(files[client])
        check_state(stored, run.client_state)
    except (IntegrityError, Rejected) as error:
        warning = "client %d starts without its state, because its file is missing or invalid: %s (states/%s)"
        log.warning(f"round %d: {warning}", round + 1, client, error, files[client])
        return {}
    return stored
