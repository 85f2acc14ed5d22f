"""Sends a round's assignments, receives and checks the results, and rejects updates that must not be merged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from fl_engine.aggregation.rules import DropsUpdates
from fl_engine.core.contracts import Backend, Watcher
from fl_engine.core.errors import ON_REQUEST, Stopped
from fl_engine.core.slicing import index_of
from fl_engine.core.system import give_back
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, RoundPlan, changed
from fl_engine.rounds import acceptance, fault_injection
from fl_engine.rounds.acceptance import Moved, MovementHistory
from fl_engine.rounds.ledger import RoundMailbox
from fl_engine.rounds.recorder import RoundResults
from fl_engine.rounds.run import Run
from fl_engine.rounds.timing import Times
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import TensorFiles

log = logging.getLogger("flexfleet")

BESIDE_A_STORE = 2**20
"""Maximum size, in bytes, of the updates in memory if a store also contains the updates. The limit is low, because runs
with a store usually have many updates."""

OnResult = Callable[[int, int, int], None]
"""Function that receives the round (from 0), the number of results so far, and the number of clients."""


@dataclass(frozen=True)
class Collected:
    results: RoundResults
    history: MovementHistory
    """Movements (`acceptance`) of all updates up to and including this round."""
    waited: float
    """Seconds spent waiting for the backend."""
    decoded: float = 0.0
    """Seconds that the server spent decoding updates."""


@dataclass(frozen=True)
class Clients:
    """The backend, the stores for results and client states, and the functions that observe the results."""

    backend: Backend
    mailbox: RoundMailbox | None
    """Stores each result on arrival; None if results exist only in this process."""
    should_stop: Callable[[], bool] = lambda: False
    states: TensorFiles | None = None
    """Stores client states; None if clients have no state."""
    pending: TensorFiles | None = None
    """Stores pending updates; None if rounds are synchronous."""
    watcher: Watcher | None = None
    """Observer that receives each update on arrival."""
    on_result: OnResult = lambda round, results, clients: None


def collect(run: Run, plan: RoundPlan, history: MovementHistory, clients: Clients, begin: float = 0.0) -> Collected:
    """Send all assignments in the plan, wait for results, and reject updates that must not be merged. Each update is
    decoded and checked once. `begin` is the start of the round on the simulated clock. Raises Stopped after the current
    result if `should_stop` returns true."""
    payloads = {id(assignment.payload): assignment.payload for assignment in plan.assignments}
    model = max(map(tensor_bytes, payloads.values()), default=0)
    give_back(model)  # Release the memory of the previous round.
    mailbox = clients.mailbox
    results = RoundResults() if mailbox is None else RoundResults(BESIDE_A_STORE)
    decoded, arrived, moved = 0.0, 0, dict[int, Moved]()
    options = run.options
    rule = getattr(run.algorithm, "aggregation", None)
    dropping = rule if isinstance(rule, DropsUpdates) else None
    merges_all = options.bound is options.deadline_s is None and options.over_provision == 1 and options.quorum == 0
    merges_all = merges_all and dropping is None
    size = acceptance.NOTHING
    if plan.assignments and history.count < acceptance.FIRST_ONES:
        size = acceptance.size_sent(plan)

    def add(result: ClientResult) -> ClientResult:
        nonlocal decoded
        decoded += result.seconds_decode if isinstance(result, ClientUpdate) else 0.0
        result = _checked(run, plan, result, results.times, begin)
        results.add(result)
        return result

    if mailbox is not None:
        mailbox.open_round(plan)
        if (closed := mailbox.closed(plan)) is not None:
            results.times, results.scores = dict(closed.times), closed.scores
            for client in sorted(closed.accepted):
                add(mailbox.accepted(plan, client, closed))
            return Collected(results, acceptance.remember(history, closed.moved, size), 0.0, decoded)

    clients.on_result(plan.round, arrived, len(plan.assignments))

    def receive(result: ClientResult) -> None:
        nonlocal arrived
        arrived += 1
        clients.on_result(plan.round, arrived, len(plan.assignments))
        result = add(result)
        if isinstance(result, ClientUpdate):
            assignment = plan.assignment_of[result.client]
            if not merges_all:
                moved[result.client] = acceptance.measure_movement(result, assignment, run.site.layout)
            if clients.watcher is not None:
                clients.watcher.update(assignment, result)

    rest = plan if mailbox is None else use_stored(plan, mailbox, receive)
    waited = run_clients(run, plan, rest, clients, receive)
    seconds = {client: times.total for client, times in results.times.items()}

    def drop(clients: Collection[int]) -> dict[int, str]:
        if dropping is None or not clients:
            return {}
        received = (each for each in results if isinstance(each, ClientUpdate) and each.client in clients)
        updates = ((plan.assignment_of[update.client], update) for update in received)
        results.scores = dropping.scores(updates, run.site.layout, run.server, run.algorithm)
        lowest = dropping.lowest(results.scores)
        needed = f"{type(dropping).__name__} requires a score of at least {lowest:.3g}"
        return {client: f"{needed}, got {score:.3g}" for client, score in results.scores.items() if not score >= lowest}

    refused = acceptance.find_refused(plan, moved, seconds, options, history, size, drop)
    if mailbox is not None:
        late = {client: results.times[client] for client in refused}
        mailbox.close(plan, refused, moved=moved, times=late, scores=results.scores)
    results.refuse(refused)
    give_back(model)
    return Collected(results, acceptance.remember(history, moved, size), waited, decoded)


def run_clients(
    run: Run, plan: RoundPlan, rest: RoundPlan, clients: Clients, receive: Callable[[ClientResult], None]
) -> float:
    """Send the assignments of `rest`, which is a subset of the plan, and pass each result to `receive`. Return the
    seconds spent waiting for results. Raises Stopped after the current result if `should_stop` returns true."""
    faults = {a.client: fault for a in plan.assignments if (fault := run.fault(a)) is not None}
    results, waited = fault_injection.run_with_faults(faults, run.algorithm, rest, clients.backend), 0.0
    try:
        while True:
            since = time.monotonic()
            result = next(results, None)
            waited += time.monotonic() - since
            if result is None:
                return waited
            receive(result)
            if clients.mailbox is not None and (isinstance(result, ClientFailure) or not clients.backend.durable):
                clients.mailbox.put_result(plan, result)
            del result  # Free memory before the next result arrives.
            if clients.should_stop():
                raise Stopped(ON_REQUEST)
    finally:
        results.close()  # Without close(), an exception's traceback would keep requests open.


def use_stored(plan: RoundPlan, mailbox: RoundMailbox, receive: Callable[[ClientResult], None]) -> RoundPlan:
    """Pass the stored results of an earlier coordinator to `receive`. Return a plan for the remaining clients."""
    done, updates = set[int](), 0
    for result in mailbox.finished(plan):
        receive(result)
        done.add(result.client)
        updates += isinstance(result, ClientUpdate)
    if done:
        log.info("round %d: %d of %d results are already stored", plan.round + 1, len(done), len(plan.assignments))
    return replace(plan, assignments=tuple(o for o in plan.assignments if o.client not in done), adopted=updates)


def _checked(run: Run, plan: RoundPlan, result: ClientResult, times: dict[int, Times], begin: float) -> ClientResult:
    """Inject the client's fault into the result. Set the level and the elapsed time of an update, and record the times
    in `times`. If the client goes offline on the simulated clock before it finishes, return a failure (dropout)."""
    assignment = plan.assignment_of[result.client]
    result = run.inject_fault(result, assignment)
    if isinstance(result, ClientFailure):
        return result
    took = run.times(result, assignment, begin)
    if took is None:
        return ClientFailure(result.round, result.client, "drop", "the client went offline too early (fleet.trace)")
    level = index_of(run.site.pool, run.site.layout, result.spec)
    times[result.client] = took
    return changed(result, level=level, elapsed=took.total)
