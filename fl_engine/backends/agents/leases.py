"""When the lease of an order ends without an answer."""

from __future__ import annotations

from typing import NamedTuple

from fl_engine.backends.agents.keeper import Keeper
from fl_engine.backends.agents.open_round import OpenRound
from fl_engine.backends.agents.post import Agent, Held, Post
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.core.errors import printable

STARTS = 2
"""How often a device's process may begin the same order: one that is killed again and again for its memory would begin
it until the deadline."""


class Ended(NamedTuple):
    why: str
    failed: bool
    """The order has failed; else the device was just taken away."""
    untaken: bool = False
    """The device was silent, or beat, and did not take the order."""


def why_ended(
    agent: Agent, held: Held, r: OpenRound, options: AgentsConfig, post: Post, keeper: Keeper
) -> Ended | None:
    """Why the device's lease is over; None: it runs. Measured up to when the device's beat was last asked for: whoever
    waits for outcomes may have been at something else since."""
    if agent.revoked:
        return Ended(f"{agent.name} was revoked", False)
    if agent.beat is not None and agent.beat.loan == held.loan and agent.beat.state == "failed":
        return Ended(f"{agent.name} could not carry out the order: {printable(agent.beat.said)}", True)
    if agent.is_gone and held.taken:
        post.hear(agent)  # it may be back
        if agent.is_gone:
            return Ended(f"{agent.name} was ended", _too_often(agent, held, r, keeper))
    lost = keeper.lost(agent.name, max(agent.heard, held.since))
    if lost is not None:
        if not held.taken:
            post.hear(agent)  # it may have begun, and been killed before anybody looked
        agent.away = True
        failed = held.taken and (lost.counts or _too_often(agent, held, r, keeper))
        if failed and held.alone:
            r.killed.update(held.clients)
        return Ended(f"{agent.name} is lost: {lost.reason}", failed)
    if len(held.boots) > STARTS:
        return Ended(f"{agent.name} has begun {len(held.boots)} times: something kills it", True)
    if agent.looked - held.since > options.deadline_s:
        return Ended(f"{agent.name} has not answered after {options.deadline_s} s", held.taken, untaken=not held.taken)
    silent = agent.looked - held.heard
    if silent > (options.lease_s if held.taken else max(options.lease_s, agent.looks_s)):
        agent.away = True
        return Ended(f"{agent.name} is silent for {silent:.0f} s", held.taken, untaken=not held.taken)
    return None


def _too_often(agent: Agent, held: Held, r: OpenRound, keeper: Keeper) -> bool:
    """Counts that the device was taken away with its orders, and whether one of them may be why."""
    r.gone.update((agent.name, client) for client in held.clients)
    return max(r.gone[agent.name, client] for client in held.clients) > keeper.drains
