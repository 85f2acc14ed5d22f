"""How many answers end a round of pods, and what becomes of the clients that have given none."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from fl_engine.core.errors import Stopped
from fl_engine.core.types import ClientFailure, RoundPlan
from fl_engine.exchange.mailbox import Mailbox


class Quorum(NamedTuple):
    before: int
    """Answers from before a restart."""
    wanted: int
    """Updates with which the round is over."""
    enough: int
    """Answers without which it cannot end."""


def quorum_of(mailbox: Mailbox, plan: RoundPlan, share: float) -> Quorum:
    """Once the plan's orders are written. `share`: `kubernetes.quorum`."""
    before = max(mailbox.ordered(plan.round, plan.evaluates) - len(plan.orders), 0)
    wanted = before + len(plan.orders) if plan.wanted is None else plan.wanted
    return Quorum(before, wanted, math.ceil(wanted * share - 1e-9))


def too_few(plan: RoundPlan, answers: int, quorum: Quorum, lost: Mapping[int, ClientFailure]) -> Stopped:
    """`lost`: by client, why its pods did not answer."""
    why = "; ".join(sorted({failure.reason for failure in lost.values()})[:5])
    return Stopped(
        f"round {plan.round + 1}: {answers} of {quorum.wanted} clients have answered, {quorum.enough} are needed "
        f"(kubernetes.quorum): {why}. What arrived is kept: mend the cause, then resume with --resume"
    )


def unanswered(plan: RoundPlan, open_: Collection[int], lost: Mapping[int, ClientFailure]) -> Iterator[ClientFailure]:
    """The failures of the clients that have not answered when the round is over."""
    for client in sorted(open_):
        late = ClientFailure(plan.round, client, "straggle", "the round had enough updates before this one")
        yield lost.get(client, late)
