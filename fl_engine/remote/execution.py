"""How a worker executes orders: reads them, trains, and writes the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fl_engine.core.contracts import Algorithm
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, accept_all, train
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.store import tensor_bytes


def carry_out(
    algorithm: Algorithm,
    site: Site,
    mailbox: Mailbox,
    round: int,
    clients: Sequence[int],
    device: str,
    evaluates: bool = False,
) -> None:
    """Reads these clients' orders from the mailbox, trains them (side by side where possible), and writes their
    outcomes. `evaluates`: the orders are those of the round's evaluation."""
    orders = mailbox.orders(round, clients, evaluates)
    groups, failures = accept_all(algorithm, orders.values(), site)
    outcomes = chain(failures, (one for group in groups for one in train(group, site, device)))

    def put(outcome: Outcome) -> None:
        mailbox.put_outcome(RoundPlan(round, (orders[outcome.client],), evaluates=evaluates), outcome)

    state = coding.bytes_of(replace(site.rules, algorithm=algorithm).client_state)
    largest = max((tensor_bytes(order.payload) for order in orders.values()), default=0)
    # Each upload in flight holds an outcome and its encoded copy.
    for _ in overlapped(mailbox.store, 2 * (largest + state), put, outcomes):
        pass
