"""Evaluates models at the clients and computes metrics from the results.

Each selected client evaluates a model on the samples that it holds out from training, or on its own test samples if the
data set has them (`Data.natural_test_client`). The model is the sub-model of the global model for the device's level
(`capacity.level_of`). If each client has personal parameters (FedPer, FedBN) or a personal model (Ditto), the client
evaluates its personal model. The metrics weight all clients equally, regardless of their numbers of samples. The local
accuracy (`training.local_accuracy`) is a different metric, which the server computes on its own test samples.

The metrics are computed for all clients, for the clients of each level, and for the clients of each tier:

    `on_clients/mean`, `on_clients/mean/level/M1`, `on_clients/mean/tier/weak`: The mean of the main metric.
    `on_clients/p10`: The 10th percentile of the main metric over the clients (linear interpolation).
    `on_clients/worst`: The lowest value of the main metric.
    `on_clients/spread`: The sample standard deviation of the main metric (n - 1); 0 for one client.
    `on_clients/loss`: The mean of the clients' mean losses.
    `on_clients/clients`: The number of clients with a result.

The other metrics are the number of selected clients (`on_clients/asked`), the number of failed clients
(`on_clients/failed`) and the number of sent bytes (`bytes_evaluation`). Evaluations take no simulated time.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.clients import personal_weights
from fl_engine.core.types import Assignment, ClientResult, ClientUpdate, Params, RoundPlan
from fl_engine.rounds.collect import Clients, run_clients, use_stored
from fl_engine.rounds.run import Run
from fl_engine.selection.capacity import eligible, level_of
from fl_engine.storage.store import tensor_bytes
from fl_engine.training.evaluation import published, weights_of

log = logging.getLogger("flexfleet")

PREFIX = "on_clients/"
FIGURES = ("mean", "p10", "worst", "spread", "loss", "clients")
"""Names of the metrics for each group of clients."""


class ClientScore(NamedTuple):
    level: str
    tier: str
    value: float
    loss: float


def plan_evaluation(
    run: Run, state: Any, round: int, clock: float, own: Callable[[int], Params] = lambda client: {}
) -> RoundPlan:
    """Return the plan for the evaluation after `round`, which ended at `clock` on the simulated clock. Only clients
    that may train, are online and have held-out samples are selected. The function `own` returns a client's state,
    which contains personal parameters (`core.clients.personal_weights`)."""
    share = 1.0 if run.evaluation is None else run.evaluation.share
    devices = [
        device
        for device in eligible(run.algorithm, run.available(clock), run.site.pool)
        if run.site.most is not None or len(run.site.held_by(device.client))
    ]
    count = max(1, int(share * len(run.site.fleet) + 1e-9))
    if count < len(devices):
        drawn = seeds.rng(run.site.seed, "evaluate on clients", round).permutation(len(devices))[:count]
        devices = [devices[i] for i in sorted(drawn)]
    devices = [device for device in devices if device.client not in run.options.without]  # after the draw
    weights = published(state)
    sent: dict[int, Params] = {}
    assignments = []
    for device in devices:
        level = level_of(device, run.site.pool)
        model = run.site.pool[level]
        if level not in sent:
            sent[level] = weights_of(weights, run.site.layout, model)
        seed = seeds.derive(run.site.seed, "evaluate", round, device.client)
        weights_of_client = personal_weights(run.algorithm, own(device.client), sent[level])
        assignments.append(Assignment(round, device.client, model.spec, weights_of_client, seed, level, evaluates=True))
    return RoundPlan(round, tuple(assignments), evaluates=True)


def evaluate_at_clients(
    run: Run, state: Any, round: int, clock: float, clients: Clients, own: Callable[[int], Params]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Evaluate at the clients. Return the metrics, and a line for each client that has a result. Reuse the results that
    an earlier coordinator stored. `own` is passed to `plan_evaluation`. Raises Stopped after the current result if
    `should_stop` returns true."""
    plan, mailbox = plan_evaluation(run, state, round, clock, own), clients.mailbox
    found: dict[int, ClientScore] = {}

    def receive(result: ClientResult) -> None:
        client, level = result.client, plan.assignment_of[result.client].level
        if isinstance(result, ClientUpdate):
            value, loss = result.metrics[run.site.data.task.metric.name], result.metrics["loss"]
            found[client] = ClientScore(run.site.pool[level].name, run.site.fleet[client].tier, value, loss)
        else:
            message = "round %d: the evaluation at client %d failed (%s): %s"
            log.warning(message, round + 1, client, result.stage, result.reason)

    if mailbox is not None:
        mailbox.open_round(plan)
    rest = plan if mailbox is None else use_stored(plan, mailbox, receive)
    run_clients(run, plan, rest, clients, receive)
    metric = run.site.data.task.metric.name
    lines = [
        {"client": client, "level": each.level, "tier": each.tier, metric: each.value, "loss": each.loss}
        for client, each in sorted(found.items())
    ]
    metrics = metrics_of([found[client] for client in sorted(found)]) | {
        f"{PREFIX}asked": float(len(plan.assignments)),
        f"{PREFIX}failed": float(len(plan.assignments) - len(found)),
        "bytes_evaluation": float(sum(tensor_bytes(assignment.payload) for assignment in plan.assignments)),
    }
    return metrics, lines


def metrics_of(scores: Sequence[ClientScore]) -> dict[str, float]:
    """Return the metrics for all clients, for each level and for each tier. Return {} if `scores` is empty."""
    groups: dict[str, list[ClientScore]] = {"": list(scores)} if scores else {}
    for each in scores:
        groups.setdefault(f"/level/{each.level}", []).append(each)
        groups.setdefault(f"/tier/{each.tier}", []).append(each)
    found: dict[str, float] = {}
    for group, own in groups.items():
        values = [each.value for each in own]
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        loss = statistics.fmean(each.loss for each in own)
        figures = (statistics.fmean(values), float(np.quantile(values, 0.1)), min(values), spread, loss, len(values))
        found |= {f"{PREFIX}{name}{group}": float(value) for name, value in zip(FIGURES, figures, strict=True)}
    return found


def gathered(metrics: Mapping[str, float], levels: Sequence[str], tiers: Sequence[str]) -> dict[str, Any] | None:
    """Return a round's metrics as nested dicts for JSON files: {asked, failed, all: {mean, ...}, levels: {name: {...}},
    tiers}. Return None if the round has no evaluation at the clients, or if all clients failed."""
    if f"{PREFIX}mean" not in metrics:
        return None

    def figures(group: str) -> dict[str, float | int]:
        own = {name: metrics[f"{PREFIX}{name}{group}"] for name in FIGURES}
        return {**own, "clients": int(own["clients"])}

    def groups(kind: str, names: Sequence[str]) -> dict[str, dict[str, float | int]]:
        return {name: figures(f"/{kind}/{name}") for name in names if f"{PREFIX}mean/{kind}/{name}" in metrics}

    counts = {name: int(metrics[f"{PREFIX}{name}"]) for name in ("asked", "failed")}
    return {**counts, "all": figures(""), "levels": groups("level", levels), "tiers": groups("tier", tiers)}
