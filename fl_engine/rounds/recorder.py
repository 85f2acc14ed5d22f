"""The metrics of a round, and a line for each client."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_engine.core.slicing import index_of
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, Pool, RoundPlan, Stage
from fl_engine.exchange import coding
from fl_engine.fleet import uniformity
from fl_engine.rounds import phases
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.run import Run
from fl_engine.storage.store import tensor_bytes

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Record:
    metrics: dict[str, float]
    clients: tuple[dict[str, Any], ...]
    """A line for each selected client, in client order."""
    models: tuple[int, int]
    """Bytes of the sent and of the returned weights in a model."""


def recorded(
    run: Run,
    plan: RoundPlan,
    answers: Answers,
    begin: float = 0.0,
    sent_bytes: Mapping[int, tuple[int, int]] | None = None,
) -> Record:
    """Return the metrics of a round, with a line for each selected client.

    Bytes are those of the tensors that travel, to all selected clients and back from those whose updates are merged: 4
    for each parameter, or what a codec makes of them, and 4 for each number of an assignment's memory and of a client's
    state. An update that arrives and is not merged (too late, one too many, refused) is not counted.

    On the simulated clock a round ends with the slowest client whose update it merges. If it merges fewer updates than
    it wants, and a result has not arrived by the deadline, it ends with the deadline; an unreadable result counts as
    not arrived. A round that merges no update ends with the last result, or later if `Run.without_updates` says so.

    Args:
        run: What is the same in every round.
        plan: The assignments.
        answers: The results.
        begin: When the round began on the simulated clock.
        sent_bytes: For each client, the bytes that it was sent, and the bytes of these weights in a model, if the
            assignments no longer hold them.
    """
    lines, updates, failures = [], list[ClientUpdate](), list[ClientFailure]()
    pruned = 0
    for head in answers.heads():
        order = plan.order_of[head.client]
        if isinstance(head, ClientUpdate):
            updates.append(head)
            pruned += head.level != index_of(run.site.pool, run.site.layout, order.spec)
        else:
            failures.append(head)
            log.warning("round %d: client %d failed (%s): %s", head.round + 1, head.client, head.stage, head.reason)
        line = _line(run.site.pool, order.level, head, answers.times.get(head.client))
        if head.client in answers.said:
            line |= {"examples": answers.said[head.client], "counted": line["examples"]}
        lines.append(line)
    if sent_bytes is None:
        sent_bytes = {o.client: (coding.bytes_sent(o), tensor_bytes(o.payload)) for o in plan.orders}
    down, model_down = (sum(sent_bytes[o.client][i] for o in plan.orders) for i in (0, 1))
    up = sum(answers.size(update.client) for update in updates)
    model_up = sum(answers.model_size(update.client) for update in updates)
    kept = coding.bytes_of(run.client_state)
    metrics = {
        "bytes_down": float(down),
        "bytes_up": float(up + kept * len(updates)),
        "waste": 1 - model_up / model_down if model_down else 0.0,
        "clients_trained": float(len(updates)),
        "clients_pruned": float(pruned),
        "clients_failed": float(len(failures)),
    }
    metrics |= phases.bits(metrics) | phases.models(metrics, model_down, model_up) | _reasons(failures)
    if (lasted := _simulated(run, plan, answers, updates, failures, begin)) is not None:
        metrics["seconds_simulated"] = lasted
    if answers.said:
        metrics["clients_limited"] = float(len(answers.said))
    if updates:
        examples = sum(update.num_examples for update in updates)
        metrics["seconds_encode_clients"] = math.fsum(u.metrics.get("seconds_encode", 0.0) for u in updates)
        metrics["train_loss"] = sum(u.metrics["loss"] * u.num_examples for u in updates) / examples
    in_order = [(client, answers.times[client]) for client in sorted(answers.times)]
    merged = {update.client for update in updates}
    answered = [times for client, times in in_order if client in merged]
    metrics |= phases.of_the_last(answered)
    metrics |= uniformity.measured([times for _, times in in_order], answered, run.alone)
    return Record(metrics, tuple(lines), (model_down, model_up))


def _line(pool: Pool, level: int, head: Outcome, took: uniformity.Times | None) -> dict[str, Any]:
    """Return the line of a client that was sent this level."""
    sent = pool[level].name
    line: dict[str, Any] = {"client": head.client, "sent": sent}
    if isinstance(head, ClientUpdate):
        line["trained"] = sent if head.level is None else pool[head.level].name
        line |= {"examples": head.num_examples, **head.metrics}
    else:
        line["failure"] = f"{head.stage}: {head.reason}"
    if took is not None:
        line |= {
            "seconds_simulated": took.total,
            "seconds_compute": took.compute,
            "seconds_communication": took.communication,
        }
    return line


def _simulated(
    run: Run,
    plan: RoundPlan,
    answers: Answers,
    updates: Sequence[ClientUpdate],
    failures: Sequence[ClientFailure],
    begin: float,
) -> float | None:
    """Return the seconds of the round on the simulated clock, or None if it has no times."""
    deadline_s = run.terms.deadline_s
    if deadline_s is not None and len(updates) < plan.enough and not _all_came(plan, answers, deadline_s):
        return deadline_s
    if updates:
        return max(update.elapsed for update in updates)
    dropped = [failure.client for failure in failures if failure.stage == "drop"]
    lasted = run.without_updates(plan, dropped, begin)
    ends = [took.total for took in answers.times.values()] + ([] if lasted is None else [lasted])
    return max(ends, default=None)


def _all_came(plan: RoundPlan, answers: Answers, deadline_s: float) -> bool:
    times = answers.times
    return all(order.client in times and times[order.client].total <= deadline_s for order in plan.orders)


def _reasons(failures: list[ClientFailure]) -> dict[str, float]:
    """Count the failures by code (`updates`), and those without a code by stage."""
    stages = Counter(failure.stage for failure in failures if failure.code is None)
    codes = Counter(failure.code for failure in failures if failure.code is not None)
    found = {f"rejected/{code}": float(count) for code, count in sorted(codes.items())}
    names: dict[Stage, str] = {
        "drop": "clients_dropped",
        "straggle": "clients_late",
        "prune": "clients_without_memory",
        "train": "clients_not_trained",
        "pod": "clients_lost",
    }
    found |= {name: float(stages[stage]) for stage, name in names.items() if stages[stage]}
    if stages["quorum"]:
        found["carried_forward"] = 1.0
    return found
