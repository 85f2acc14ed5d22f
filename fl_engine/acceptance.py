"""Which of the updates that arrived a round takes.

Refused, in this order:

    validate  moved further than `norm_bound` times the median of the round
    straggle  later than `deadline_s` on the simulated clock
    straggle  later than as many others as `training.fraction` wants, where more were asked (`over_provision`)
    quorum    all, where fewer than `quorum` of those that were wanted are left: the model is carried forward unchanged

All of it follows from what the updates are, not from when this machine had them: the same in every backend. A cluster's
own deadline, quorum and first-come rule (`kubernetes`) come before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from fl_engine.types import ClientFailure


class Terms(Protocol):
    """The part of `rounds` in a configuration that this is about."""

    @property
    def norm_bound(self) -> float | None: ...
    @property
    def deadline_s(self) -> float | None: ...
    @property
    def over_provision(self) -> float: ...
    @property
    def quorum(self) -> float: ...


@dataclass(frozen=True)
class Arrival:
    """An update, as far as it matters here: how far its weights moved (root mean square), and its seconds on the
    simulated clock."""

    moved: float
    seconds: float


def unconditional(terms: Terms) -> bool:
    """Whether every update is taken, whatever the others are."""
    return terms.norm_bound is None and terms.deadline_s is None and terms.over_provision == 1 and terms.quorum == 0


def wanted(terms: Terms, asked: int) -> int:
    """How many updates a round is to have of which so many clients were asked."""
    return math.ceil(asked / terms.over_provision - 1e-9)


def refused(round: int, asked: int, arrived: Mapping[int, Arrival], terms: Terms) -> dict[int, ClientFailure]:
    """By client, why not."""
    found: dict[int, ClientFailure] = {}

    def refuse(client: int, stage: str, reason: str) -> None:
        found[client] = ClientFailure(round, client, stage, reason)

    if terms.norm_bound is not None and arrived:
        middle = statistics.median(arrival.moved for arrival in arrived.values())
        for client, arrival in arrived.items():
            if arrival.moved > terms.norm_bound * middle:
                limit = f"{terms.norm_bound:g} times the median is {terms.norm_bound * middle:.3g}"
                refuse(client, "validate", f"norm: moved {arrival.moved:.3g} a weight, {limit}")
    if terms.deadline_s is not None:
        for client, arrival in arrived.items():
            if client not in found and arrival.seconds > terms.deadline_s:
                said = f"took {arrival.seconds:.1f} s on the simulated clock, the deadline is {terms.deadline_s:g} s"
                refuse(client, "straggle", said)
    left = sorted((arrival.seconds, client) for client, arrival in arrived.items() if client not in found)
    enough = wanted(terms, asked)
    for _, client in left[enough:]:
        refuse(client, "straggle", "the round had enough updates before this one")
    count, least = min(len(left), enough), math.ceil(terms.quorum * enough - 1e-9)
    if count < least:
        for _, client in left[:enough]:
            refuse(client, "quorum", f"{count} of {enough} updates, {least} are needed: the model is carried forward")
    return found
