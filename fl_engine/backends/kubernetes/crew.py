"""Pods that stay for the run: one Indexed Job per device tier, each pod a device that takes orders (`agents.backend`).

Simulated clients share pods: each holds up to `clients_per_pod` orders at once, and there are as many pods as the
round's orders need so, divided over the tiers by their clients, or `parallelism` if that is less; an order that finds
no free pod of its tier waits for one. With placement=device each client has a Job of its own, bound to its node, from
the first round that asks for it. A tier's Job is made anew where it has ended, where none of its pods can come any
more, and between rounds where it lacks some for good. It is deleted where its pods have nothing to do and another tier
finds no room for its own; the next order of the tier brings it back.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fl_engine.backends.agents.keeper import Lost
from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Member
from fl_engine.backends.kubernetes import jobs, status, waiting
from fl_engine.backends.kubernetes.cluster import Resource
from fl_engine.backends.kubernetes.ground import Ground
from fl_engine.backends.kubernetes.jobs import Group
from fl_engine.backends.kubernetes.settings import NodePool
from fl_engine.backends.kubernetes.standing import Standing, StandingJobs
from fl_engine.backends.kubernetes.waiting import Loss
from fl_engine.core.errors import Stopped
from fl_engine.core.types import Device, RoundPlan
from fl_engine.exchange.letters import Beat

log = logging.getLogger("flexfleet")

MOST_PODS = 200
"""Of a Job, or fewer where a Secret does not hold so many invitations: with temporary credentials URLs are long."""
MOST_ORDERS = 100
"""That a pod holds at once: a letter holds no more."""
YIELD_S = 10.0
"""Seconds between two Jobs that give way: the pods of the first have to end."""
EVENTS_EVERY_S, SAY_EVERY_S = 2.0, 30.0


@dataclass
class Seen:
    """What a round has seen of a place."""

    ended: int = 0
    """Its Jobs that came to nothing."""
    vain: bool = False
    """Its last Job came to nothing without a pod that hung, and it has no new one yet."""
    why: str = ""
    """Why the last of them did, or why a pod of its last ended."""
    taken: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By index, the pods that were taken away."""
    fell: set[int] = field(default_factory=set)
    """Indices whose pod has ended by itself, or was taken away too often: that others start and end in its stead, again
    and again, is no sign that orders will be taken."""


class Crew:
    """A `Keeper`. `post`: the letters of this run alone, with a roster that remembers nothing."""

    strangers, spares = False, True
    drains = waiting.LOST_NODES

    def __init__(self, ground: Ground, fleet: Sequence[Device], post: Post) -> None:
        self._ground, self._fleet, self._post = ground, fleet, post
        self._options, self._cluster = ground.options, ground.cluster
        self._jobs, self._found = StandingJobs(ground, post), False
        """`_found`: whether those that an earlier coordinator has left have been looked for."""
        self.lacks: Callable[[], int] = lambda: 1
        """How many more answers the present round's quorum takes: whoever asked for the round says it."""
        self._yielded: set[str] = set()
        """Places that have given way: their pods come when there are orders for them."""
        self._seen = defaultdict[str, Seen](Seen)
        """By place."""
        self._round = self._left = self._wanted = 0
        self._looked = self._heard = self._gave = self._said = -math.inf
        self.moved = -math.inf
        o = ground.options
        self.room = 1 if o.placement == "device" else min(o.clients_per_pod, MOST_ORDERS)

    # ------------------------------------------------------------------------------------------- as a Keeper
    def place(self, client: int) -> str:
        if self._options.placement == "device":
            return self._options.hostname.format(client=client)
        return self._fleet[client].tier

    def device(self, client: int) -> str:
        return self._options.pools.get(self._fleet[client].tier, NodePool()).torch_device

    def begin(self, plan: RoundPlan) -> None:
        self._round, self._looked, self._seen = plan.round, -math.inf, defaultdict(Seen)
        self._groups = {group.host or group.tier: group for group in self._groups_of(plan)}
        self._left, self._wanted = len(plan.orders), len(plan.orders) + plan.adopted

    def keep(self, asked: Mapping[str, int], unheld: Mapping[str, int], silent: Mapping[str, bool]) -> bool:
        """Asks the cluster every `poll_s`. Raises Stopped where the pods of a place that has orders end, or do not
        start, `attempts` times; where the quorum may do without its clients, it makes no others in this round. Where
        they did not start, it makes none as long as the orders of other places may do for the quorum."""
        now = time.monotonic()
        if now - self._looked < self._options.poll_s:
            return False
        begins, self._looked = math.isinf(self._looked), now
        before, self._left = self._left, sum(asked.values())
        if self._left < before:  # where a round's pod would have ended and made room
            self.moved = now
        changed = self._look(now, asked, silent)
        if begins:
            for place, one in list(self._standing.items()):
                group = self._groups.get(place)
                if group is not None and (one.worn or len(one.names) < len(group.pods)):
                    self._jobs.drop(
                        place, "some of its pods do not come back" if one.worn else "the round has more orders"
                    )
        may_come = sum(asked.get(place, 0) for place in self._standing)
        for place, group in self._groups.items():
            seen = self._seen[place]
            if seen.ended >= self._options.attempts or (seen.vain and may_come >= self.lacks()):
                continue
            if place not in self._standing and (asked.get(place) or place not in self._yielded):
                self._jobs.make(place, group)
                self._yielded.discard(place)
                seen.vain = False
                changed = True
        changed = self._give_way(asked, unheld, now) or changed
        self._jobs.renew(now)
        self._say(unheld, now)
        return changed

    def gave_up(self, place: str) -> bool:
        seen = self._seen[place]
        if place in self._standing or not seen.ended:
            return False
        return seen.ended >= self._options.attempts or (seen.vain and self.lacks() <= 0)

    def lost(self, name: str, heard: float) -> Lost | None:
        if heard > self._looked:
            return None
        for one in self._standing.values():
            if name in one.names:
                index = one.names.index(name)
                loss, state = one.losses.get(index), one.live.states.get(index)
                if loss is not None:
                    return Lost(loss.reason, not loss.node)
                if one.live.suspended:
                    return Lost(f"{one.live.tier}: {waiting.SUSPENDED}", False)
                if state is not None and state.phase == "Failed":
                    return Lost(f"{one.live.tier}: {state.reason or 'the pod failed'}", not state.disrupted)
        return None

    def why(self, place: str) -> str:
        there = [one.live for here, one in self._standing.items() if here == place]
        counts = waiting.reasons(there).get(there[0].tier) if there else None
        return waiting.told(counts) if counts else self._seen[place].why

    def advice(self, names: Sequence[str], places: Sequence[str]) -> str:
        said = "".join(f"{place}: {why}. " for place in places if (why := self.why(place)))
        return f"{said}{self.looking}; mend the cause"

    @property
    def looking(self) -> str:
        kubectl, of = f"kubectl -n {self._options.namespace}", f"-l {jobs.RUN}={self._ground.run}"
        return f"To look at the pods: {kubectl} describe jobs,pods {of}, and {kubectl} logs --prefix {of}"

    # ------------------------------------------------------------------------------------------- Jobs
    @property
    def _standing(self) -> dict[str, Standing]:
        return self._jobs.by_place

    def _groups_of(self, plan: RoundPlan) -> list[Group]:
        """The Jobs that this round wants to be there, each with as many pods as it should have."""
        if self._options.placement == "device":
            return jobs.groups(plan.orders, self._fleet, self._options.model_copy(update={"clients_per_pod": 1}))
        most = math.ceil(len(plan.orders) / self._options.clients_per_pod)
        shares = self._shares(min(most, self._options.parallelism or most))
        return [Group(tier, ((),) * min(share, self._most), 0) for tier, share in shares.items()]

    def _shares(self, pods: int) -> dict[str, int]:
        """So many pods, divided over the tiers."""
        tiers = Counter(device.tier for device in self._fleet)
        return dict(zip(tiers, jobs.shares(list(tiers.values()), pods), strict=True))

    @cached_property
    def _most(self) -> int:
        """Pods of a Job, with the longest name that one can have."""
        told = self._post.invitation(Member.new("x" * 63, max((d.tier for d in self._fleet), key=len)), plain=True)
        return max(1, min(MOST_PODS, jobs.SECRET_BYTES // len(told.model_dump_json().encode())))

    def _look(self, now: float, asked: Mapping[str, int], silent: Mapping[str, bool]) -> bool:
        """Whether other Jobs are there than before."""
        if not self._found:
            self._found = True
            cap = {} if self._options.parallelism is None else self._shares(self._options.parallelism)
            self._jobs.find(now, lambda place: cap.get(place, MOST_PODS))
            return True
        there = {job["metadata"]["name"]: job for job in self._cluster.select("jobs", self._jobs.labels)}
        pods = self._cluster.select("pods", self._jobs.labels)
        for place, one in self._standing.items():
            self._see(self._seen[place], one, waiting.hear(one.live, there.get(one.name), pods, now), now)
        if now - self._heard > EVENTS_EVERY_S and any(one.live.lacks_pods() for one in self._standing.values()):
            self._heard = now
            events = self._ground.refusals()
            for one in self._standing.values():
                waiting.hear_refusals(one.live, events)
        changed = False
        for place, one in list(self._standing.items()):
            changed = self._ends(place, one, there.get(one.name), now, asked, silent) or changed
        return changed

    def _see(self, seen: Seen, one: Standing, moved: set[int], now: float) -> None:
        """What became of the place's pods. `moved`: indices of those that have started or ended."""
        if moved - seen.fell:
            self.moved = now
        for index, state in one.live.states.items():
            if state.disrupted:
                seen.taken[index].add(state.uid)
            if state.over and state.reason:  # the next one may run, and end like it
                seen.why = state.reason
            if (state.over and not state.disrupted) or len(seen.taken[index]) > self.drains:
                seen.fell.add(index)
            if state.phase == "Failed" and not state.disrupted:
                one.failed.setdefault(index, set()).add(state.uid)

    def _ends(
        self,
        place: str,
        one: Standing,
        job: Resource | None,
        now: float,
        asked: Mapping[str, int],
        silent: Mapping[str, bool],
    ) -> bool:
        """Whether the place's Job was ended, as none of its pods can come any more. `job`: as it is, None where it is
        gone."""
        seen = self._seen[place]
        one.losses = waiting.lost(one.live, job, now, self.moved, self._options.pending_s)
        one.losses = self._never_there(place, one) | one.losses
        known = one.hung
        one.hear(silent, now, self._options.lease_s, self._options.pending_s)
        one.hung -= {i for i in one.hung - known if not silent[one.names[i]] and self._speaks(one.names[i])}
        if len(one.losses.keys() | one.hung) < len(one.names):
            return False
        reasons = {loss.reason for loss in one.losses.values()} | ({"its pods hang"} if one.hung else set())
        why = "; ".join(sorted(reasons)[:3])
        seen.why = why.removeprefix(f"{one.live.tier}: ")
        if job is None:
            self._ground.forget_owner()
        # Pods that waited in vain for a coordinator, and those that somebody has deleted, say nothing of the next.
        failed = job is not None and status.ended(job) != "Complete"
        if failed and (one.hung or not all(loss.node for loss in one.losses.values())):
            seen.ended += 1
            seen.vain = seen.vain or not one.hung
        if asked.get(place) and seen.ended >= self._options.attempts:
            if not self._others_answer(asked):
                if one.hung:
                    self._jobs.drop(place, why)  # others stay, to be looked at
                raise Stopped(
                    f"round {self._round + 1}: no pod takes orders: {why}. What arrived is kept. "
                    f"{self.looking}; mend the cause, then resume with --resume"
                )
            log.warning("round %d: no pod of %s takes orders: %s", self._round + 1, place, why)
        self._jobs.drop(place, why)
        return True

    def _never_there(self, place: str, one: Standing) -> dict[int, Loss]:
        """By index, the pods that fail at their start: `attempts` have failed, and none has said a word."""
        found = {}
        for index, pods in list(one.failed.items()):
            if len(pods) < self._options.attempts:
                continue
            if self._beat(one.names[index]) is None:
                found[index] = Loss(f"{one.live.tier}: {one.live.reason(index) or self._seen[place].why}", False)
            else:  # what it fails of is told by its orders: its beat is not read at every look
                del one.failed[index]
        return found

    def _beat(self, name: str) -> Beat | None:
        return self._post.beat(self._post.roster.member(name))

    def _speaks(self, name: str) -> bool:
        """Whether a device that was not heard of yet, or had ended, is there: nobody looks often for those."""
        beat = self._beat(name)
        return beat is not None and beat.state != "gone"

    def _others_answer(self, asked: Mapping[str, int]) -> bool:
        """Whether answers of other places, which are there or may come, may do for the quorum."""
        come = any(n and self._seen[place].ended < self._options.attempts for place, n in asked.items())
        return self._options.quorum < 1 and (come or sum(asked.values()) < self._wanted)

    def _give_way(self, asked: Mapping[str, int], unheld: Mapping[str, int], now: float) -> bool:
        """Ends the pods of a place that has no orders, where those of another one wait for room and none has any. A pod
        that is bound to its node would make room for nobody."""
        if self._options.placement == "device":
            return False
        idle = [place for place in self._standing if not asked.get(place)]
        queues = [
            place
            for place, one in self._standing.items()
            if unheld.get(place) and len(one.live.since) == len(one.names)
            and any(map(one.live.queues, one.live.since))
        ]  # fmt: skip
        if not idle or not queues or now - self._gave < YIELD_S:
            return False
        place = max(idle, key=lambda place: len(self._standing[place].names))
        self._jobs.drop(place, f"they have no orders, and those of {queues[0]} wait for room")
        self._yielded.add(place)
        self._gave = now
        return True

    # ------------------------------------------------------------------------------------------- what is said
    def _say(self, unheld: Mapping[str, int], now: float) -> None:
        """Logs what the pods that have orders wait for."""
        if now - self._said < SAY_EVERY_S or not any(unheld.values()):
            return
        self._said = now
        for place, one in self._standing.items():
            counts = waiting.reasons([one.live])[one.live.tier]
            if unheld.get(place) and counts:
                log.info("round %d: the pods of %s: %s", self._round + 1, place, waiting.told(counts))
