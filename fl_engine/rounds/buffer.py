"""Asynchronous rounds: FedBuff (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022).

K clients train at the same time; K is `training.fraction` times the number of clients. When B clients (`rounds.buffer`)
have finished on the simulated clock, the server merges their updates and selects B new clients. A round is one merge
(one server step, Alg. 1), so the clock, commits and evaluation work as in synchronous rounds.

The staleness s of an update is the number of merges since client k received the weights w^(t-s). The client returned
the weights w_k. For each element of the client's sub-model, the algorithm merges

    w + (1 + s)^(-staleness) * (w_k - w^(t-s)).

Here w are the current weights, and the factor is s(tau) in the paper (Section 4). For s = 0 the result is w_k, so a run
with B = K equals the synchronous run bit for bit. Running statistics are set to w + (1 + s)^(-staleness) * (w_k - w),
because their change since an earlier round may be larger than the current variance.

Every backend trains the clients in the round that selects them. An update that finishes in a later round on the
simulated clock is pending until that round. A commit stores the weight change of each pending update in a file under
`pending/`, and all other fields in the commit's JSON.

Departs from the paper: new clients are selected at a merge, not when a client finishes. Therefore fewer than K clients
train between two merges. A client that fails is also replaced only at the next merge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, Field, ValidationError

from fl_engine.aggregation.fltrust import FLTrust
from fl_engine.aggregation.privacy import is_private
from fl_engine.core.contracts import Algorithm, KeepsClientState, RemembersChanges
from fl_engine.core.errors import ConfigError, IntegrityError, brief
from fl_engine.core.fields import Index, NotNegative, adapter
from fl_engine.core.slicing import is_statistic, take
from fl_engine.core.types import Assignment, ClientUpdate, ParamLayout, Params, RoundPlan, changed
from fl_engine.exchange import coding
from fl_engine.rounds import recorder
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.recorder import RoundResults
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import SIMULATED, Times
from fl_engine.storage.run_files import WAY_OUT
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import FILE, TensorFiles
from fl_engine.training.evaluation import published

FOLDER = "pending/"
KEY = "rounds/pending"
"""Key of the pending updates in the JSON of a commit."""


@dataclass(frozen=True)
class PendingUpdate:
    """An update that finishes in a later round."""

    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    assignment: Assignment
    """The assignment without tensors. Its round is the round that selected the client."""
    update: ClientUpdate
    """The update without tensors."""
    times: Times
    finish: NotNegative
    """Time on the simulated clock at which the update finishes, in seconds."""
    down: Index
    """Bytes sent to the client: the encoded weights and the assignment's memory."""
    up: Index
    """Bytes of the encoded weights that the client returns."""
    size: Index
    """Bytes of the sent weights before encoding."""
    file: Annotated[str, Field(pattern=f"^{FILE.pattern}$")]
    """Name of the file that stores the change of the weights."""

    @property
    def client(self) -> int:
        return self.update.client


def pending_in(rest: Mapping[str, Any]) -> tuple[PendingUpdate, ...]:
    """Return the pending updates in a commit's JSON. Raises IntegrityError if an entry is not valid."""
    try:
        pending: tuple[PendingUpdate, ...] = adapter(tuple[PendingUpdate, ...]).validate_python(rest.get(KEY, ()))
        return pending
    except ValidationError as error:
        raise IntegrityError(f"stored state: {KEY!r} must be a list of pending updates: {brief(error)}") from error


def check_files(files: TensorFiles, rest: Mapping[str, Any]) -> None:
    """Read the files of all pending updates in a commit. Raises IntegrityError if a file is missing or damaged."""
    for update in pending_in(rest):
        try:
            files.get(update.file)
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error


def check(algorithm: Algorithm, options: RoundsConfig) -> None:
    """Raise ConfigError if asynchronous rounds do not support the options or the algorithm."""
    if options.mode == "synchronous":
        if options.buffer is not None:
            raise ConfigError("rounds.buffer must be null unless rounds.mode=buffered", path="rounds.buffer")
        return
    for name, wanted in {"over_provision": 1, "deadline_s": None, "quorum": 0}.items():
        if getattr(options, name) != wanted:
            value = "null" if wanted is None else wanted
            raise ConfigError.at(f"rounds.{name} must be {value} if rounds.mode=buffered", code="config.conflict")
    name = type(algorithm).__name__
    if is_private(algorithm):
        _refuse("a private aggregation requires updates from a single round")
    if isinstance(getattr(algorithm, "aggregation", None), FLTrust):
        _refuse("fltrust gives stale updates the same length as other updates")
    if isinstance(algorithm, KeepsClientState):
        _refuse(f"the clients of {name} store a state between rounds")
    if isinstance(algorithm, RemembersChanges) and algorithm.remembers_changes:
        _refuse(f"the server of {name} stores the change of each client")


def _refuse(why: str) -> None:
    message = f"rounds.mode=buffered cannot be used, because {why}. Set rounds.mode=synchronous"
    raise ConfigError(message, code="config.conflict", path="rounds.mode")


def check_plan(run: Run, state: Any, plan: RoundPlan, pending: Sequence[PendingUpdate]) -> None:
    """Check the plan of an asynchronous round. Raises ConfigError if a level has its own weights, or if the plan
    selects more clients than may train at the same time."""
    if run.options.mode == "synchronous":
        return
    name, most = type(run.algorithm).__name__, run.at_once
    if published(state) is not state.params:
        _refuse(f"each level of {name} has its own weights")
    if run.options.buffer is not None and run.options.buffer > most:
        message = f"rounds.buffer must be at most {most}, the number of training clients, got {run.options.buffer}"
        raise ConfigError(message, code="config.out_of_range", path="rounds.buffer")
    if len(plan.assignments) + len(pending) > most:
        _refuse(f"{name} selects more clients than training.fraction allows")


@dataclass(frozen=True)
class Due:
    """Updates that a round merges, and updates that remain pending."""

    plan: RoundPlan
    """Assignments of the merged updates, and failed assignments."""
    results: RoundResults
    pending: tuple[PendingUpdate, ...]
    clock: float
    stale: Mapping[int, int]
    """Map each client to its staleness, the number of merges since the server sent the weights."""
    down: Mapping[int, tuple[int, int]]
    """Map each client to a tuple (bytes sent, bytes of the sent weights before encoding)."""


def collect_due(
    run: Run,
    state: Any,
    plan: RoundPlan,
    results: RoundResults,
    pending: Sequence[PendingUpdate],
    clock: float,
    files: TensorFiles,
) -> Due:
    """Determine which of the new and pending updates this round merges. `plan` and `results` belong to the clients that
    this round selected at `clock` on the simulated clock."""
    new = [head for head in results.heads() if isinstance(head, ClientUpdate)]
    finish = {update.client: update.finish for update in pending}
    finish |= {head.client: clock + head.elapsed for head in new}
    first = sorted(finish, key=lambda client: (finish[client], client))[: run.options.buffer or run.at_once]
    found, waiting, down = RoundResults(), list[PendingUpdate](), dict[int, tuple[int, int]]()
    assignments = []
    for result in results:
        client, assignment = result.client, plan.assignment_of[result.client]
        up = results.sizes[client][0] if isinstance(result, ClientUpdate) else None
        if isinstance(result, ClientUpdate) and up is not None and client not in first:
            file = files.put(changes(result, assignment, run.site.layout))
            waiting.append(
                PendingUpdate(
                    replace(assignment, payload={}, memory={}, codecs=None, encoded=None),
                    changed(result, payload={}, encoded=None),
                    results.times[client],
                    finish[client],
                    coding.bytes_sent(assignment),
                    up,
                    tensor_bytes(assignment.payload),
                    file,
                )
            )
            continue
        found.add(result, up)
        assignments.append(assignment)
        down[client] = coding.bytes_sent(assignment), tensor_bytes(assignment.payload)
        if client in results.times:
            found.times[client] = results.times[client]
    stale = dict.fromkeys((head.client for head in new if head.client in first), 0)
    for late in pending:
        client = late.client
        if client not in first:
            waiting.append(late)
            continue
        stale[client], down[client] = plan.round - late.assignment.round, (late.down, late.size)
        found.times[client] = late.times
        weight = (1 + stale[client]) ** -run.options.staleness
        now = take(state.params, run.site.layout, late.update.spec)
        weights = moved(now, files.get(late.file), weight)
        found.add(changed(late.update, round=plan.round, payload=weights), late.up)
        # Algorithms and selectors expect the number of the current round.
        assignments.append(replace(late.assignment, round=plan.round))
    merged = RoundPlan(plan.round, tuple(sorted(assignments, key=lambda assignment: assignment.client)))
    waiting.sort(key=lambda update: update.client)
    until = max((finish[client] for client in first), default=clock)
    return Due(merged, found, tuple(waiting), until, stale, down)


def changes(update: ClientUpdate, assignment: Assignment, layout: ParamLayout) -> Params:
    """Return the trained weights minus the sent weights. Integers and running statistics are returned unchanged."""
    sent = take(assignment.payload, layout, update.spec, have=assignment.spec)
    return {
        name: tensor - sent[name] if tensor.is_floating_point() and not is_statistic(name) else tensor
        for name, tensor in update.payload.items()
    }


def moved(now: Params, change: Params, weight: float) -> Params:
    """Return the weights `now` plus `weight` times the change."""
    found = {}
    for name, tensor in change.items():
        if is_statistic(name):
            found[name] = torch.lerp(now[name], tensor, weight)
        else:
            found[name] = now[name] + weight * tensor if tensor.is_floating_point() else tensor
    return found


def record_round(run: Run, plan: RoundPlan, due: Due, began: float) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Compute a round's metrics, and a record for each merged update and each failed client.

    `plan` contains the assignments sent in this round, which the metric `bytes_down` counts. `began` is the start of
    the round on the simulated clock."""
    down = sum(map(coding.bytes_sent, plan.assignments))
    metrics, lines = recorder.record_round(run, due.plan, due.results, began, due.down, down)
    for line in lines:
        if line["client"] in due.stale:
            line["staleness"] = due.stale[line["client"]]
    for name in SIMULATED:  # Drop metrics that describe single rounds, because rounds overlap.
        metrics.pop(name, None)
    metrics["clients_pending"] = float(len(due.pending))
    if due.stale:
        metrics["staleness"] = fmean(due.stale.values())
        metrics["seconds_simulated"] = due.clock - began
    return metrics, lines
