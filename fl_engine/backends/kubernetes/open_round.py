"""Where a round stands whose orders are in Jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_engine.backends.kubernetes.waiting import Live
from fl_engine.core.types import RoundPlan


@dataclass
class OpenRound:
    plan: RoundPlan
    names: Mapping[int, list[str]]
    """By client, the keys of its order in the store."""
    open_: set[int]
    """Clients that have not answered."""
    live: list[Live] = field(default_factory=list)
    attempt: int = 0
    """The attempt of the next Jobs: their names end with it."""
    told: dict[str, float] = field(default_factory=dict)
    """By Job: when its Secret was written, if this coordinator has."""
    moved: float = 0.0
    """When a pod last started or ended."""
    nodes: Counter[int] = field(default_factory=Counter)
    """By client: how many of its nodes were lost."""
    said: set[tuple[str, str]] = field(default_factory=set)
    """Tiers, and the kinds of reasons that were logged for them."""

    @property
    def awaited(self) -> set[int]:
        return {client for job in self.live for client in job.clients}

    def watch(self, job: Live) -> None:
        job.clients = {client: index for client, index in job.clients.items() if client in self.open_}
        for other in self.live:
            other.clients = {c: i for c, i in other.clients.items() if c not in job.clients}
        self.live.append(job)

    def heard_from(self, client: int) -> None:
        for job in self.live:
            job.clients.pop(client, None)
