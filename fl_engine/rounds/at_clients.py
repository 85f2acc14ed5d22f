"""Evaluation at the clients: assignments that train nothing, and the metrics that follow from their results.

Each selected client scores the global model, cut to the level of its device (`capacity.level_of`), on the samples that
it holds out from training. Each client counts once, however many samples it holds. The local accuracy
(`training.local_accuracy`) is something else: the server computes it on its own test samples.

The metrics, over all clients, those of each level and those of each tier:

    on_clients/mean      on_clients/mean/level/M1      on_clients/mean/tier/weak
    on_clients/p10       the value below which a tenth of the clients lie (linear between two clients)
    on_clients/worst     the lowest
    on_clients/spread    standard deviation of a sample (n - 1); 0 of one client
    on_clients/loss      mean of the clients' mean losses
    on_clients/clients   how many answered

and `on_clients/asked`, `on_clients/failed`, and `bytes_evaluation`, the bytes that were sent. An evaluation takes no
time on the simulated clock.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.clients import kept_by_clients
from fl_engine.core.contracts import Algorithm, ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, Params, Pool, RoundPlan, WorkOrder
from fl_engine.rounds.collect import Clients, adopted, ask
from fl_engine.rounds.run import Run
from fl_engine.selection.capacity import eligible, level_of
from fl_engine.storage.store import tensor_bytes
from fl_engine.training.evaluation import published, weights_of

log = logging.getLogger("flexfleet")

PREFIX = "on_clients/"
FIGURES = ("mean", "p10", "worst", "spread", "loss", "clients")
"""The metrics of a group of clients."""


@dataclass(frozen=True)
class Said:
    """The result of one client."""

    level: str
    tier: str
    value: float
    loss: float


def check(algorithm: Algorithm, family: ModelFamily, pool: Pool) -> None:
    """Raise ConfigError if clients keep parameters of their own, so that their model is not the global one."""
    kept = sorted(kept_by_clients(algorithm, family, pool).keys() & family.layout().slots.keys())
    if kept:
        raise ConfigError(
            f"evaluate.on=clients evaluates the global model, and the clients of {type(algorithm).__name__} keep "
            f"{', '.join(kept[:4])} to themselves: leave it at server, or take another algorithm"
        )


def planned(run: Run, state: Any, round: int, clock: float) -> RoundPlan:
    """Return the evaluation after `round`, which has ended at `clock`: of each client that may train, unless it is
    offline or holds out no samples. Pure."""
    share = 1.0 if run.evaluation is None else run.evaluation.share
    asked = list(_able(run, clock))
    count = max(1, int(share * len(run.site.fleet) + 1e-9))
    if count < len(asked):
        drawn = seeds.rng(run.site.seed, "evaluate on clients", round).permutation(len(asked))[:count]
        asked = [asked[i] for i in sorted(drawn)]
    weights = published(state)
    sent: dict[int, Params] = {}
    orders = []
    for device, level in asked:
        model = run.site.pool[level]
        if level not in sent:
            sent[level] = weights_of(weights, run.site.layout, model)
        seed = seeds.derive(run.site.seed, "evaluate", round, device.client)
        orders.append(WorkOrder(round, device.client, model.spec, sent[level], seed, level, evaluates=True))
    return RoundPlan(round, tuple(orders), evaluates=True)


def _able(run: Run, clock: float) -> Iterator[tuple[Device, int]]:
    for device in eligible(run.algorithm, run.available(clock), run.site.pool):
        if run.site.most is not None or len(run.site.held_by(device.client)):
            yield device, level_of(device, run.site.pool)


def evaluated(run: Run, state: Any, round: int, clock: float, clients: Clients) -> dict[str, float]:
    """Evaluate at the clients and return the metrics. Results that an earlier coordinator stored are used. Raises
    Stopped after the current result if `should_stop` returns true."""
    plan, mailbox = planned(run, state, round, clock), clients.mailbox
    found: dict[int, Outcome] = {}

    def receive(outcome: Outcome) -> None:
        found[outcome.client] = outcome
        if isinstance(outcome, ClientFailure):
            log.warning(
                "round %d, client %d: no evaluation: %s: %s", round + 1, outcome.client, outcome.stage, outcome.reason
            )

    if mailbox is not None:
        mailbox.open_round(plan)
    rest = plan if mailbox is None else adopted(plan, mailbox, receive)
    ask(run, plan, rest, clients, receive)
    name, said = run.site.data.task.metric.name, []
    for client in sorted(found):
        outcome, order = found[client], plan.order_of[client]
        if isinstance(outcome, ClientUpdate):
            level, tier = run.site.pool[order.level].name, run.site.fleet[client].tier
            said.append(Said(level, tier, outcome.metrics[name], outcome.metrics["loss"]))
    counts = {f"{PREFIX}asked": float(len(plan.orders)), f"{PREFIX}failed": float(len(plan.orders) - len(said))}
    sent = {"bytes_evaluation": float(sum(tensor_bytes(order.payload) for order in plan.orders))}
    return figures(said) | counts | sent


def figures(said: Sequence[Said]) -> dict[str, float]:
    """Return the metrics of all clients, each level and each tier; empty without results."""
    if not said:
        return {}
    groups: dict[str, list[Said]] = {"": list(said)}
    for each in said:
        groups.setdefault(f"/level/{each.level}", []).append(each)
    for each in said:
        groups.setdefault(f"/tier/{each.tier}", []).append(each)
    return {f"{PREFIX}{name}{group}": value for group, own in groups.items() for name, value in _of(own).items()}


def _of(said: Sequence[Said]) -> dict[str, float]:
    values = [each.value for each in said]
    return {
        "mean": statistics.fmean(values),
        "p10": float(np.quantile(values, 0.1)),
        "worst": min(values),
        "spread": statistics.stdev(values) if len(values) > 1 else 0.0,
        "loss": statistics.fmean(each.loss for each in said),
        "clients": float(len(values)),
    }


def gathered(metrics: Mapping[str, float], levels: Sequence[str], tiers: Sequence[str]) -> dict[str, Any] | None:
    """Return the metrics of a round in the form of files: {asked, failed, all: {mean, ...}, levels: {name: {...}},
    tiers}, in the order of `levels` and `tiers`. None if the round had no such evaluation, or no results."""
    if f"{PREFIX}mean" not in metrics:
        return None

    def of(group: str) -> dict[str, float | int]:
        own = {name: metrics[f"{PREFIX}{name}{group}"] for name in FIGURES}
        return {**own, "clients": int(own["clients"])}

    def groups(kind: str, names: Sequence[str]) -> dict[str, dict[str, float | int]]:
        return {name: of(f"/{kind}/{name}") for name in names if f"{PREFIX}mean/{kind}/{name}" in metrics}

    counts = {name: int(metrics[f"{PREFIX}{name}"]) for name in ("asked", "failed")}
    return {**counts, "all": of(""), "levels": groups("level", levels), "tiers": groups("tier", tiers)}
