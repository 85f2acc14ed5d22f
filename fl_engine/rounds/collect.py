"""The middle of a round: send assignments, receive and check results, and close the set that is merged."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fl_engine.core.contracts import Backend, Watcher
from fl_engine.core.errors import ON_REQUEST, Stopped
from fl_engine.core.slicing import index_of
from fl_engine.core.system import give_back
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, RoundPlan, changed
from fl_engine.fleet.uniformity import Times
from fl_engine.rounds import acceptance, faulty
from fl_engine.rounds.acceptance import Arrival, History, Moved
from fl_engine.rounds.answers import Answers
from fl_engine.rounds.ledger import RoundMailbox
from fl_engine.rounds.movement import Movements, size_sent
from fl_engine.rounds.run import Run
from fl_engine.storage.store import tensor_bytes
from fl_engine.storage.tensor_files import ClientStates, TensorFiles

log = logging.getLogger("flexfleet")

BESIDE_A_STORE = 2**20
"""Bytes of updates in memory if the store holds them too: rounds through a store are the large ones."""


Heard = Callable[[int, int, int], None]
"""Called as `heard(round, answered, asked)` when a round begins and for each result. Rounds count from 0."""


def nobody_listens(round: int, answered: int, asked: int) -> None:
    pass


@dataclass(frozen=True)
class Collected:
    answers: Answers
    history: History
    """How far updates moved, this round included."""
    waited: float
    """Seconds spent waiting for the backend."""
    decoded: float = 0.0
    """Seconds in which the server decoded updates."""


@dataclass(frozen=True)
class Clients:
    """How the server reaches the clients, where it stores their results, and who observes them."""

    backend: Backend
    mailbox: RoundMailbox | None
    """Stores results as they arrive; None: they stay in this process."""
    should_stop: Callable[[], bool] = lambda: False
    states: ClientStates | None = None
    """Stores the clients' states; None: clients keep no state."""
    flights: TensorFiles | None = None
    """Stores pending updates; None: rounds are synchronous."""
    watcher: Watcher | None = None
    """Gets each update that arrives."""
    heard: Heard = nobody_listens
    """Gets the number of clients that have answered."""


def collect(run: Run, plan: RoundPlan, history: History, clients: Clients, begin: float = 0.0) -> Collected:
    """Send all assignments of the plan, wait for results, and decide which updates are merged. Each update is decoded
    and checked once. `begin`: when the round began on the simulated clock. Raises Stopped after the current result if
    `should_stop` returns true."""
    model = max((tensor_bytes(order.payload) for order in {id(o.payload): o for o in plan.orders}.values()), default=0)
    give_back(model)  # memory of the previous round
    answers = Answers() if clients.mailbox is None else Answers(BESIDE_A_STORE)
    waited, decoded = 0.0, 0.0
    size = _size(plan, history)
    closed = None
    if clients.mailbox is not None:
        clients.mailbox.open_round(plan)
        closed = clients.mailbox.closed(plan)
    if closed is not None and clients.mailbox is not None:
        answers.times = dict(closed.times)
        for client in sorted(closed.accepted):
            known = clients.mailbox.accepted(plan, client, closed)
            decoded += _decoding(known)
            answers.add(_known(run, plan, known, answers.times, begin))
        return Collected(answers, acceptance.remembered(history, closed.moved, size), waited, decoded)

    movements = Movements(plan, run.site.layout)
    answered, asked = 0, len(plan.orders)
    clients.heard(plan.round, answered, asked)

    def receive(outcome: Outcome) -> None:
        nonlocal decoded, answered
        answered += 1
        clients.heard(plan.round, answered, asked)
        decoded += _decoding(outcome)
        outcome = _known(run, plan, outcome, answers.times, begin)
        if isinstance(outcome, ClientUpdate) and not acceptance.unconditional(run.terms):
            movements.add(outcome)
        if isinstance(outcome, ClientUpdate) and clients.watcher is not None:
            clients.watcher.update(plan.order_of[outcome.client], outcome)
        answers.add(outcome)

    rest = plan if clients.mailbox is None else adopted(plan, clients.mailbox, receive)
    waited += ask(run, plan, rest, clients, receive)
    moved = movements.all()
    arrivals = {client: Arrival(far, answers.times[client].total) for client, far in moved.items()}
    usual = acceptance.middle(history, moved.values(), size) if moved else None
    refused = acceptance.refused(plan, arrivals, run.terms, history, size, usual)
    if clients.mailbox is not None:
        late = {client: answers.times[client] for client in refused}
        clients.mailbox.close(plan, sorted(plan.order_of), refused, moved, late)
    answers.refuse(refused)
    give_back(model)
    return Collected(answers, acceptance.remembered(history, moved, size, usual), waited, decoded)


def ask(run: Run, plan: RoundPlan, rest: RoundPlan, clients: Clients, receive: Callable[[Outcome], None]) -> float:
    """Send the assignments of `rest`, a part of the plan, pass each result to `receive`, and return the seconds spent
    waiting. Raises Stopped after the current result if `should_stop` returns true."""
    outcomes, waited = faulty.outcomes(run, plan, rest, clients.backend), 0.0
    try:
        while True:
            since = time.monotonic()
            outcome = next(outcomes, None)
            waited += time.monotonic() - since
            if outcome is None:
                return waited
            receive(outcome)
            if clients.mailbox is not None and (isinstance(outcome, ClientFailure) or not clients.backend.durable):
                clients.mailbox.put_outcome(plan, outcome)
            del outcome  # so that memory does not hold it beside the next one
            if clients.should_stop():
                raise Stopped(ON_REQUEST)
    finally:
        outcomes.close()  # a traceback would keep the generator and its requests to the store alive


def adopted(plan: RoundPlan, mailbox: RoundMailbox, receive: Callable[[Outcome], None]) -> RoundPlan:
    """Receive the results that an earlier coordinator stored for this round; return the plan without them."""
    done, updates = set[int](), 0
    for outcome in mailbox.finished(plan):
        receive(outcome)
        done.add(outcome.client)
        updates += isinstance(outcome, ClientUpdate)
    if done:
        log.info("round %d: using %d stored results of %d", plan.round + 1, len(done), len(plan.orders))
    return replace(plan, orders=tuple(o for o in plan.orders if o.client not in done), adopted=updates)


def _known(run: Run, plan: RoundPlan, outcome: Outcome, times: dict[int, Times], begin: float) -> Outcome:
    """Return the result with its injected fault, if any, and with what the server itself knows of an update. Adds its
    times to `times`. A client that goes offline on the simulated clock before it is done counts as dropped out."""
    outcome = faulty.arrived(run, plan.order_of[outcome.client], outcome)
    if isinstance(outcome, ClientFailure):
        return outcome
    took = run.times(outcome, plan.order_of[outcome.client], begin)
    if took is None:
        return ClientFailure(outcome.round, outcome.client, "drop", "went offline before it was done (fleet.trace)")
    level = index_of(run.site.pool, run.site.layout, outcome.spec)
    times[outcome.client] = took
    return changed(outcome, level=level, elapsed=took.total)


def _decoding(outcome: Outcome) -> float:
    return outcome.seconds_decode if isinstance(outcome, ClientUpdate) else 0.0


def _size(plan: RoundPlan, history: History) -> Moved:
    """Return the size of the sent weights, as long as too few movements are remembered."""
    return size_sent(plan) if plan.orders and history.count < acceptance.FIRST_ONES else acceptance.NOTHING
