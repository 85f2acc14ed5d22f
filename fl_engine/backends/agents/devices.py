"""The devices that a coordinator knows: who is there, who is silent, and what each was told last."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from fl_engine.backends.agents.keeper import Keeper
from fl_engine.backends.agents.post import Agent, Post
from fl_engine.backends.agents.roster import Member
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.exchange.letters import Loan, pause
from fl_engine.storage.lease import BEAT_S

LOOK_S = 2.0
"""The most seconds between two looks for answers."""
AWAY_S = 60.0
"""The most seconds between two looks for a beat of a device that is away."""


class Devices:
    """`check` raises Replaced where another coordinator has the letters now."""

    def __init__(self, options: AgentsConfig, post: Post, keeper: Keeper, check: Callable[[], None]) -> None:
        self._options, self._post, self._keeper = options, post, keeper
        self._check, self._checked = check, -BEAT_S
        self.by_name: dict[str, Agent] = {}

    @property
    def there(self) -> list[Agent]:
        return [agent for agent in self.by_name.values() if not agent.away and not agent.revoked]

    def silent(self) -> dict[str, bool]:
        """See `Keeper.keep`."""
        return {a.name: a.beat is not None and not a.is_gone for a in self.by_name.values() if a.away}

    def say(self, agent: Agent, loan: Loan | None, **said: Any) -> None:
        self.still_mine()
        self._post.say(agent, loan, **said)

    def still_mine(self) -> None:
        """Raises Replaced where another coordinator has the letters. A lease that was there BEAT_S seconds ago is."""
        if time.monotonic() - self._checked >= BEAT_S:
            self._check()
            self._checked = time.monotonic()

    def meet(self) -> Collection[Member]:
        """Devices that were invited since; those that were revoked are told so, and forgotten. Gives all members."""
        self.still_mine()
        members = {member.name: member for member in self._post.roster.members()}
        for name in [name for name, agent in self.by_name.items() if name not in members and agent.held is None]:
            self.say(self.by_name[name], None, run="", site="", revoked=True)
            del self.by_name[name]
        for name, member in members.items():
            if name not in self.by_name:
                said = {"lease_s": self._options.lease_s, "revoked": False}
                self.by_name[name] = self._post.meet(member, **said)
        self._see_revoked()
        return members.values()

    def listen(self) -> None:
        """Reads beats: most often those of devices that hold an order, ever more rarely those of devices that stay
        away."""
        self.still_mine()
        now, every = time.monotonic(), self._options.lease_s / 12

        def interval(a: Agent) -> float:
            if a.held is not None:
                return every
            return pause(now - a.heard, max(AWAY_S, every), min(LOOK_S, every)) if a.away else every * 4

        due = [a for a in self.by_name.values() if now - a.looked >= interval(a)]
        for agent in due:
            self._post.hear(agent)
        if due:
            self._see_revoked()
        for agent in self.by_name.values():
            if agent.held is None and not agent.away:
                agent.away = self._keeper.lost(agent.name, agent.heard) is not None

    def _see_revoked(self) -> None:
        for name in self._post.roster.revoked() & self.by_name.keys():
            self.by_name[name].revoked = True

    def dismiss(self) -> None:
        """Tells all that the run is over."""
        revoked = self._post.roster.revoked()
        for agent in self.by_name.values():
            agent.held = None
            self.say(agent, None, run="", site="", revoked=agent.name in revoked)
