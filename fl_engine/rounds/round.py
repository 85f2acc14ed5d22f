"""One round: plan -> encode -> collect -> merge -> evaluate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import fmean
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.core.clients import travelling
from fl_engine.core.errors import IntegrityError
from fl_engine.core.system import at_work
from fl_engine.core.types import Header, Params, RoundContext, RoundPlan
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import Rejected
from fl_engine.exchange.updates import check_state
from fl_engine.rounds import at_clients, buffer
from fl_engine.rounds.acceptance import History
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.checks import check_finite, check_merged, check_planned
from fl_engine.rounds.collect import Clients, collect
from fl_engine.rounds.pending import Flight
from fl_engine.rounds.phases import Stopwatch
from fl_engine.rounds.recorder import recorded
from fl_engine.rounds.run import Run
from fl_engine.selection.capacity import eligible, level_of
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import ClientStates
from fl_engine.training.evaluation import Score, average, by_owner, evaluate_pool, published


@dataclass(frozen=True)
class Progress:
    """What one round passes to the next."""

    state: Any
    """The algorithm's."""
    history: History = field(default_factory=History)
    """How far the updates of earlier rounds moved."""
    clock: float = 0.0
    """Seconds that all rounds together took on the simulated clock."""
    states: Mapping[int, str] = field(default_factory=dict)
    """By client, the file of what it keeps (`storage.tensor_files`)."""
    flying: tuple[Flight, ...] = ()
    """Pending updates of asynchronous rounds."""


def play(run: Run, before: Progress, round: int, clients: Clients) -> tuple[Progress, Row]:
    """Return the progress after the round, and its metrics.

    Raises:
        Stopped: Somebody asked the run to stop.
        ConfigError: Asynchronous rounds do not support the plan.
        ModelError: `plan` or `merge` returned something invalid (`rounds.checks`).
    """
    watch = Stopwatch()
    started = watch.began
    # Pending clients are at work, so the round does not wait for others to come online.
    begin = before.clock if before.flying else run.begins(round, before.clock)
    context = run.context(round, begin, {flight.order.client for flight in before.flying})
    plan = asked(run, before, context, clients, watch)
    buffer.check_plan(run, before.state, plan, before.flying)
    collected = collect(run, plan, before.history, clients, begin)
    due = None
    if clients.flights is not None:
        due = buffer.due(run, before.state, plan, collected.answers, before.flying, begin, clients.flights)
    answers = collected.answers if due is None else due.answers
    answers.limit(run.terms.samples_bound)
    state = run.algorithm.merge(before.state, plan if due is None else due.plan, answers, run.server)
    check_merged(run.algorithm, before.state, state)
    check_finite(run.algorithm, before.state, state, round)
    states = taken_in(before.states, answers, clients.states)
    record = recorded(run, plan, answers, begin) if due is None else buffer.recorded(run, plan, due, begin)
    metrics = record.metrics
    if run.trace is not None:
        metrics["clients_online"] = float(len(context.available))
        metrics["simulated_wait"] = begin - before.clock
        metrics["seconds_simulated"] += metrics["simulated_wait"]
    spent = privacy.epsilon(run.algorithm, run.site.fleet, run.site.pool, round + 1)
    if spent is not None:
        metrics["epsilon"] = spent
    watch.ends("merge")
    clock = before.clock + metrics.get("seconds_simulated", 0.0)
    if (round + 1) % run.terms.evaluate_every == 0 or run.terms.over(round + 1, clock):
        with at_work(tensor_bytes(published(state))):
            metrics |= _scores(run, state)
        if run.evaluation is not None:
            metrics |= at_clients.evaluated(run, state, round, clock, clients)
        watch.ends("evaluate")
    watch.seconds["merge"] -= collected.waited
    metrics |= {"seconds_encode": 0.0, "seconds_train": collected.waited, "seconds_decode": collected.decoded}
    metrics |= {f"seconds_{phase}": seconds for phase, seconds in watch.seconds.items()}
    metrics["seconds_round"] = watch.began - started
    row = Row(round=round, metrics=metrics, clients=record.clients)
    return Progress(state, collected.history, clock, states, () if due is None else due.flying), row


def asked(run: Run, before: Progress, context: RoundContext, clients: Clients, watch: Stopwatch) -> RoundPlan:
    """Return the assignments as they are sent. Raises ModelError for an invalid plan."""
    plan = run.algorithm.plan(before.state, context)
    check_planned(run.algorithm, plan, len(run.site.fleet), len(run.site.pool))
    watch.ends("plan")
    plan = coding.sent(plan, run.site.pool, run.codecs, run.site.seed)
    watch.ends("encode" if any(order.encoded is not None for order in plan.orders) else "plan")
    plan = replace(plan, noise_seed=privacy.noise_seed(run.noise_key, context.round))
    plan = handed_out(run, plan, before.states, clients.states)
    watch.ends("plan")
    return plan


def _scores(run: Run, state: Any) -> dict[str, float]:
    scores = evaluate_pool(run.site.family, published(state), run.site.pool, run.site.data, run.devices)
    found = {"avg": average(scores), "full": scores[run.site.pool[-1].name].value}
    for name, score in scores.items():
        metrics = by_owner(score, run.site.partition.server_classes).metrics
        found |= {f"{metric}/{name}": value for metric, value in metrics.items()}
        found[f"loss/{name}"] = score.loss
    if not all(map(isfinite, found.values())):  # such values are left out of every file
        found["diverged"] = 1.0
    return found | _of_devices(run, scores)


def _of_devices(run: Run, scores: Mapping[str, Score]) -> dict[str, float]:
    """`accuracy_devices`, by the deciding metric's name: the mean over the devices that may train of the score of the
    sub-model that each uses (`capacity.level_of`; FedX, section IV-D). Empty if fewer than two levels are scored, or if
    a level that devices use is not reported."""
    pool = run.site.pool
    own = [level_of(device, pool) for device in eligible(run.algorithm, run.site.fleet, pool)]
    if len(scores) < 2 or any(pool[level].name not in scores for level in own):
        return {}
    return {f"{run.site.data.task.metric.name}_devices": fmean(scores[pool[level].name].value for level in own)}


log = logging.getLogger("flexfleet")


def handed_out(run: Run, plan: RoundPlan, files: Mapping[int, str], states: ClientStates | None) -> RoundPlan:
    """Return the plan with each client's state in its assignment. A client whose file is missing or damaged starts
    without a state."""
    if states is None:
        return plan
    orders = []
    for order in plan.orders:
        state: Params = {}
        if order.client in files:
            state = _read(states, files[order.client], run.client_state, plan.round, order.client)
        orders.append(replace(order, memory={**order.memory, **travelling(state)}))
    return replace(plan, orders=tuple(orders))


def _read(states: ClientStates, file: str, expected: Header, round: int, client: int) -> Params:
    try:
        state = states.get(file)
        check_state(state, expected)
    except (IntegrityError, Rejected) as error:
        said = "its state is lost, it starts without one"
        log.warning("round %d, client %d: %s: %s (states/%s)", round + 1, client, said, error, file)
        return {}
    return state


def taken_in(files: Mapping[int, str], answers: Answers, states: ClientStates | None) -> Mapping[int, str]:
    """Map each client to the file of its state after the round."""
    if states is None:
        return files
    return {**files, **{client: states.put(state, files.get(client)) for client, state in answers.states()}}
