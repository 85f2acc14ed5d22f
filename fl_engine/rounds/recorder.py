"""Stores the results of a round, computes the round's metrics, and creates a record for each client."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median_low
from typing import Any

from fl_engine.aggregation.spool import IN_MEMORY_BYTES, Spool
from fl_engine.core.errors import Named
from fl_engine.core.slicing import index_of
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, Params, Pool, RoundPlan, Stage, changed
from fl_engine.exchange import coding
from fl_engine.rounds import timing
from fl_engine.rounds.chain import update_sum
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import Times
from fl_engine.storage.store import tensor_bytes

log = logging.getLogger("flexfleet")

EXAMPLES = 3
"""Maximum number of failures per round whose details are stored."""


class RoundResults:
    """Results of a round. A spool stores the weights of updates, so memory does not grow with the number of updates.
    Results are iterated in client order, because floating-point sums depend on the order."""

    def __init__(self, held_bytes: int = IN_MEMORY_BYTES) -> None:
        self._spool = Spool(held_bytes)
        self._heads: dict[int, ClientResult] = {}
        """Map each client to its result without tensors."""
        self._entries: dict[int, tuple[int, int | None]] = {}
        """Map each client to the spool entries for its weights and its state."""
        self.sizes: dict[int, tuple[int, int]] = {}
        """Map each client to a tuple (bytes of the encoded weights, bytes of the decoded weights)."""
        self.sums: dict[int, str] = {}
        """Map each client to the SHA-256 of its decoded update and its state."""
        self.times: dict[int, Times] = {}
        """Map each client to the times of its update, even if the update is rejected."""
        self.scores: Mapping[int, float] = {}
        """Map each client to the score of its update, if the aggregation drops updates (`rules.DropsUpdates`)."""
        self.limited: dict[int, int] = {}
        """Map each client whose sample count was reduced by `limit` to the count that the client reported."""

    def add(self, result: ClientResult, size: int | None = None) -> None:
        """Add a result. If `result` no longer contains the encoded weights, `size` is their size in bytes."""
        client = result.client
        if isinstance(result, ClientUpdate):
            self.sums[client] = update_sum(result)
            self.sizes[client] = tensor_bytes(result.travels) if size is None else size, tensor_bytes(result.payload)
            state = self._spool.put(result.state) if result.state else None
            self._entries[client] = self._spool.put(result.payload), state
            result = changed(result, payload={}, state={}, encoded=None)
        self._heads[client] = result

    def refuse(self, failures: Mapping[int, ClientFailure]) -> None:
        """Replace the results of the clients in `failures` with the failures."""
        self._heads |= failures

    def limit(self, bound: float | None) -> None:
        """Reduce each update's sample count to at most `bound` times the lower median count. None means no limit."""
        updates = {client: head for client, head in self._heads.items() if isinstance(head, ClientUpdate)}
        if bound is None or not updates:
            return
        most = int(bound * median_low(update.num_examples for update in updates.values()))
        self.limited = {client: u.num_examples for client, u in updates.items() if u.num_examples > most}
        self._heads |= {client: changed(updates[client], num_examples=most) for client in self.limited}

    def heads(self) -> Iterator[ClientResult]:
        """Yield the results without tensors."""
        for client in sorted(self._heads):
            head = self._heads[client]
            if isinstance(head, ClientFailure) and client in self.times:
                head = changed(head, elapsed=self.times[client].total)
            yield head

    def states(self) -> Iterator[tuple[int, Params]]:
        """Yield a tuple (client, state to store) for each merged update that contains a state."""
        for head in self.heads():
            if isinstance(head, ClientUpdate) and (entry := self._entries[head.client][1]) is not None:
                yield head.client, self._spool.get(entry)

    def __iter__(self) -> Iterator[ClientResult]:
        for head in self.heads():
            if isinstance(head, ClientUpdate):
                metrics = Named(head.metrics, "is not a metric of this client's update")
                yield changed(head, payload=self._spool.get(self._entries[head.client][0]), metrics=metrics)
            else:
                yield head


def record_round(
    run: Run,
    plan: RoundPlan,
    results: RoundResults,
    begin: float = 0.0,
    sent_bytes: Mapping[int, tuple[int, int]] | None = None,
    bytes_down: int | None = None,
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compute a round's metrics, and a record for each selected client, in client order.

    The metric `bytes_down` counts the encoded weights and the tensors in `memory` that were sent to all selected
    clients. `bytes_up` counts the encoded tensors and the states in the merged updates.

    On the simulated clock, a round ends when the slowest merged update arrives. If updates are missing, the round ends
    at the deadline. An unreadable result counts as missing. A round without merged updates ends when all results have
    arrived and all dropped-out clients are offline. A round without assignments ends when a client comes online.

    Args:
        begin: Start of the round on the simulated clock.
        sent_bytes: Map each client to a tuple (bytes sent, bytes of the sent weights before encoding). Required if the
            assignments no longer contain the weights.
        bytes_down: Bytes sent in this round; None if this number is the sum of `sent_bytes`.
    """
    lines, updates, failures = [], list[ClientUpdate](), list[ClientFailure]()
    pruned, described = 0, set[str]()
    for head in results.heads():
        assignment = plan.assignment_of[head.client]
        if isinstance(head, ClientUpdate):
            updates.append(head)
            pruned += head.level != index_of(run.site.pool, run.site.layout, assignment.spec)
        else:
            failures.append(head)
            log.warning("round %d: client %d failed (%s): %s", head.round + 1, head.client, head.stage, head.reason)
        line = _line(run.site.pool, assignment.level, head, results.times.get(head.client))
        if isinstance(head, ClientFailure) and head.details is not None and line["failure"] not in described:
            if len(described) < EXAMPLES:
                line["details"] = asdict(head.details)
            described.add(line["failure"])
        if head.client in results.scores:
            line["score"] = results.scores[head.client]
        if head.client in results.limited:
            line |= {"examples": results.limited[head.client], "counted": line["examples"]}
        if isinstance(head, ClientUpdate):  # a resumed round does not read rejected updates again
            line["sha256"] = results.sums[head.client]
        lines.append(line)
    if sent_bytes is None:
        sent_bytes = {o.client: (coding.bytes_sent(o), tensor_bytes(o.payload)) for o in plan.assignments}
    down, model_down = (sum(sent_bytes[o.client][i] for o in plan.assignments) for i in (0, 1))
    up, model_up = (sum(results.sizes[update.client][i] for update in updates) for i in (0, 1))
    bytes_down = down if bytes_down is None else bytes_down
    bytes_up = up + coding.bytes_of(run.client_state) * len(updates)
    metrics = {
        "bytes_down": float(bytes_down),
        "bytes_up": float(bytes_up),
        "bits_down": 8.0 * bytes_down,
        "bits_up": 8.0 * bytes_up,
        "waste": 1 - model_up / model_down if model_down else 0.0,
        "clients_trained": float(len(updates)),
        "clients_pruned": float(pruned),
        "clients_failed": float(len(failures)),
    }
    if (model_down, model_up) != (bytes_down, bytes_up):
        metrics |= {"model_bytes_down": float(model_down), "model_bytes_up": float(model_up)}
    metrics |= _reasons(failures)
    if (seconds := _simulated(run, plan, results, updates, failures, begin)) is not None:
        metrics["seconds_simulated"] = seconds
    if results.limited:
        metrics["clients_limited"] = float(len(results.limited))
    if updates:
        samples = sum(update.num_examples for update in updates)
        metrics["seconds_encode_clients"] = math.fsum(u.metrics.get("seconds_encode", 0.0) for u in updates)
        metrics["train_loss"] = sum(u.metrics["loss"] * u.num_examples for u in updates) / samples
    times = dict(sorted(results.times.items()))
    if run.site.fleet[0].watts is not None:  # then all devices have watts
        powers = [(run.site.fleet[client].watts, took) for client, took in times.items()]
        metrics["joules"] = math.fsum(w[0] * took.compute + w[1] * took.communication for w, took in powers if w)
    merged = [times[update.client] for update in updates if update.client in times]
    numerics = run.site.numerics
    alone = numerics.strategy != "batched" or numerics.lanes == 1
    metrics |= timing.of_clients(list(times.values()), merged, alone)
    return metrics, lines


def _line(pool: Pool, level: int, head: ClientResult, took: Times | None) -> dict[str, Any]:
    sent = pool[level].name
    line: dict[str, Any] = {"client": head.client, "sent": sent}
    if isinstance(head, ClientUpdate):
        line["trained"] = sent if head.level is None else pool[head.level].name
        line |= {"examples": head.num_examples, **head.metrics}
    else:
        line |= {"failure": f"{head.stage}: {head.reason}", "code": head.code or head.stage}
    if took is not None:
        line["seconds_simulated"] = took.total
        line |= {"seconds_compute": took.compute, "seconds_communication": took.communication}
    return line


def _simulated(
    run: Run,
    plan: RoundPlan,
    results: RoundResults,
    updates: Sequence[ClientUpdate],
    failures: Sequence[ClientFailure],
    begin: float,
) -> float | None:
    """Return the duration of the round in simulated seconds; None if no client has a time."""
    deadline_s, times = run.options.deadline_s, results.times
    in_time = [o for o in plan.assignments if o.client in times and times[o.client].total <= (deadline_s or math.inf)]
    if deadline_s is not None and len(updates) < plan.enough and len(in_time) < len(plan.assignments):
        return deadline_s
    if updates:
        return max(update.elapsed for update in updates)
    ends = [took.total for took in times.values()]
    if run.trace is not None:  # Wait until dropped-out clients go offline, or until a client comes online.
        left = [run.trace.leaves(failure.client, begin) for failure in failures if failure.stage == "drop"]
        left = left if plan.assignments else [run.trace.arrives(begin)]
        ends.append(max((end - begin for end in left if end < math.inf), default=0.0))
    return max(ends, default=None)


STAGES: dict[Stage, str] = {
    "drop": "clients_dropped",
    "straggle": "clients_late",
    "prune": "clients_without_memory",
    "train": "clients_not_trained",
    "pod": "clients_lost",
}


def _reasons(failures: list[ClientFailure]) -> dict[str, float]:
    stages = Counter(failure.stage for failure in failures if failure.code is None)
    codes = Counter(failure.code for failure in failures if failure.code is not None)
    found = {f"rejected/{code}": float(count) for code, count in sorted(codes.items())}
    found |= {name: float(stages[stage]) for stage, name in STAGES.items() if stages[stage]}
    if stages["quorum"]:
        found["carried_forward"] = 1.0
    return found
