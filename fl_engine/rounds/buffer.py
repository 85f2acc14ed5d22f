"""Asynchronous rounds: FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022).

K clients train at the same time, `training.fraction` of all. When B of them (`rounds.buffer`) have finished on the
simulated clock, the server merges their updates and selects as many new clients. A round is one merge (one server step,
Alg. 1), so the clock, commits and evaluation work as in synchronous rounds.

An update whose client was sent the weights of s merges ago is merged as its change added to the weights of now,

    w + (1 + s)^(-staleness) * (w_k - w^(t-s)),

element by element of its own sub-model, by the algorithm's own mean and the server's own step (s(tau) of Sec. 4). For
s = 0 that is w_k itself: with B = K, the run is the synchronous one, bit for bit. Batch norm's running statistics are
moved to w + (1 + s)^(-staleness) * (w_k - w): the change since an earlier round may be larger than a variance of now.

The clients of a round train in that round, all at once in every backend. An update that finishes later on the simulated
clock is pending until then. Departs from the paper: new clients are selected at a merge, not whenever one finishes, so
between two merges fewer than K train; and K counts selected clients, of which some may fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from fl_engine.aggregation.privacy import is_private
from fl_engine.core.contracts import Algorithm, KeepsClientState, RemembersChanges
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import ClientUpdate, ParamLayout, Params, RoundPlan, WorkOrder
from fl_engine.exchange import coding
from fl_engine.rounds import phases, recorder
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.pending import FOLDER, Flight
from fl_engine.rounds.recorder import Record
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import TensorFiles
from fl_engine.training.evaluation import published

AS_BROUGHT = "as brought/"
"""Prefix of the names of running statistics among the changes: they are stored as the client sent them."""


@dataclass(frozen=True)
class Due:
    """What a round merges, and what is still pending."""

    plan: RoundPlan
    """The assignments of the merged updates, and of clients that failed."""
    answers: Answers
    flying: tuple[Flight, ...]
    clock: float
    stale: Mapping[int, int]
    """Map each client to its staleness s: how many merges ago its weights were sent."""
    down: Mapping[int, tuple[int, int]]
    """Map each client to the bytes that it was sent, and the bytes of these weights in a model."""


def check(algorithm: Algorithm, terms: RoundsConfig) -> None:
    """Raise ConfigError if the options or the algorithm do not support asynchronous rounds."""
    if terms.mode == "synchronous":
        if terms.buffer is not None:
            raise ConfigError(
                f"rounds.buffer = {terms.buffer} requires rounds.mode=buffered: set that, or buffer to null"
            )
        return
    kept = {
        "over_provision=1": terms.over_provision == 1,
        "deadline_s=null": terms.deadline_s is None,
        "quorum=0": terms.quorum == 0,
    }
    if wrong := [f"rounds.{setting}" for setting, kept_to in kept.items() if not kept_to]:
        raise ConfigError(f"rounds.mode=buffered merges the first updates and has no deadlines: set {', '.join(wrong)}")
    for asked, what in (
        (is_private(algorithm), "a private aggregation counts on clients of one round"),
        (isinstance(algorithm, KeepsClientState), "its clients keep a state from round to round"),
        (
            isinstance(algorithm, RemembersChanges) and algorithm.remembers_changes,
            f"the server of {type(algorithm).__name__} remembers how far each client moved what it was sent",
        ),
    ):
        if asked:
            raise ConfigError(f"{what}, which rounds.mode=buffered does not go with: set rounds.mode=synchronous")


def check_plan(run: Run, state: Any, plan: RoundPlan, flying: Sequence[Flight]) -> None:
    """Raise ConfigError if rounds are asynchronous and levels have weights of their own, or if the plan has more
    clients than are free."""
    if run.terms.mode == "synchronous":
        return
    if published(state) is not state.params:
        raise ConfigError(
            f"levels of {type(run.algorithm).__name__} have weights of their own, which rounds.mode=buffered does not "
            "go with: set rounds.mode=synchronous"
        )
    most = run.at_once
    if run.terms.buffer is not None and run.terms.buffer > most:
        raise ConfigError(
            f"rounds.buffer = {run.terms.buffer}, but {most} clients are at work: set it to {most} at most, or raise "
            "training.fraction"
        )
    if len(plan.orders) + len(flying) > most:
        raise ConfigError(
            f"{type(run.algorithm).__name__} asked {len(plan.orders)} clients, {most - len(flying)} were free: "
            "rounds.mode=buffered is for algorithms that draw training.fraction of all clients; set "
            "rounds.mode=synchronous"
        )


def due(
    run: Run, state: Any, plan: RoundPlan, answers: Answers, flying: Sequence[Flight], clock: float, files: TensorFiles
) -> Due:
    """Return the updates that finish first, of the pending and the new ones. `plan`, `answers`: of the clients that
    were selected in this round, at `clock`."""
    new = [head for head in answers.heads() if isinstance(head, ClientUpdate)]
    finish = {flight.order.client: flight.finish for flight in flying}
    finish |= {head.client: clock + head.elapsed for head in new}
    first = sorted(finish, key=lambda client: (finish[client], client))[: run.terms.buffer or run.at_once]
    found, waiting, down = Answers(), list[Flight](), dict[int, tuple[int, int]]()
    for answer in answers:
        order = plan.order_of[answer.client]
        if not isinstance(answer, ClientUpdate) or answer.client in first:
            found.add(answer, answers.size(answer.client) if isinstance(answer, ClientUpdate) else None)
            down[order.client] = coding.bytes_sent(order), tensor_bytes(order.payload)
            if order.client in answers.times:
                found.times[order.client] = answers.times[order.client]
            continue
        file = files.put(changed(answer, order, run.site.layout))
        without = replace(answer, payload={}, encoded=None)
        bare = replace(order, payload={}, memory={}, encoded=None)
        sizes = coding.bytes_sent(order), answers.size(answer.client), tensor_bytes(order.payload)
        waiting.append(Flight(bare, without, answers.times[answer.client], finish[answer.client], *sizes, file))
    stale = dict.fromkeys((head.client for head in new if head.client in first), 0)
    orders = [order for order in plan.orders if order.client in down]
    for flight in flying:
        client = flight.order.client
        if client not in first:
            waiting.append(flight)
            continue
        stale[client], down[client] = plan.round - flight.order.round, (flight.down, flight.size)
        found.times[client] = flight.times
        weight = (1 + stale[client]) ** -run.terms.staleness
        payload = moved(state, flight, files.get(flight.file), weight, run.site.layout)
        found.add(replace(flight.update, round=plan.round, payload=payload), flight.up)
        orders.append(replace(flight.order, round=plan.round))  # of one round, as algorithms and selections expect
    merged = RoundPlan(plan.round, tuple(sorted(orders, key=lambda order: order.client)))
    waiting.sort(key=lambda flight: flight.order.client)
    until = max((finish[client] for client in first), default=clock)
    return Due(merged, found, tuple(waiting), until, stale, down)


def recorded(run: Run, plan: RoundPlan, due: Due, began: float) -> Record:
    """Return the metrics of clients whose updates are merged, or that failed; `bytes_down` counts what this round sent.
    `plan`: the assignments of this round. `began`: when it began on the simulated clock."""
    record = recorder.recorded(run, due.plan, due.answers, began, due.down)
    for line in record.clients:
        if line["client"] in due.stale:
            line["staleness"] = due.stale[line["client"]]
    metrics = record.metrics
    metrics["bytes_down"] = float(sum(map(coding.bytes_sent, plan.orders)))
    metrics |= phases.bits(metrics) | phases.models(metrics, *record.models)
    for name in phases.SIMULATED:  # their rounds overlap
        metrics.pop(name, None)
    metrics["clients_flying"] = float(len(due.flying))
    if due.stale:
        metrics["staleness"] = fmean(due.stale.values())
        metrics["seconds_simulated"] = due.clock - began
    return record


def changed(update: ClientUpdate, order: WorkOrder, layout: ParamLayout) -> Params:
    """Return how far each weight moved from what the client was sent; integers and statistics unchanged."""
    sent = take(order.payload, layout, update.spec, have=order.spec)
    found = {}
    for name, tensor in update.payload.items():
        if is_statistic(name):
            found[AS_BROUGHT + name] = tensor
        else:
            found[name] = tensor - sent[name] if tensor.is_floating_point() else tensor
    return found


def moved(state: Any, flight: Flight, change: Params, weight: float, layout: ParamLayout) -> Params:
    """Return the current weights of the update's sub-model, moved by `weight` times the change. Raises IntegrityError
    if the file does not hold this update's change."""
    now, found = take(state.params, layout, flight.update.spec), {}
    for key, tensor in change.items():
        name = key.removeprefix(AS_BROUGHT)
        if name not in now or now[name].shape != tensor.shape or (name != key) != is_statistic(name):
            raise IntegrityError(f"{FOLDER}{flight.file} is not the change of client {flight.order.client}: {key}")
        if name != key:
            found[name] = torch.lerp(now[name], tensor, weight)
        else:
            found[name] = now[name] + weight * tensor if tensor.is_floating_point() else tensor
    return found
