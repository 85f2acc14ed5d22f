"""The Jobs of pods that stay, as they stand in the cluster: found, made, told and deleted.

A Job's Secret holds an invitation for each of its pods, which go back to it whenever they start again. Nothing else is
remembered: a coordinator that starts finds the Jobs by their labels, and in their Secrets the keys.
"""

from __future__ import annotations

import base64
import binascii
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Member
from fl_engine.backends.kubernetes import jobs, status, waiting
from fl_engine.backends.kubernetes.cluster import Resource
from fl_engine.backends.kubernetes.ground import DATA_FOLDER, RENEW_S, Ground
from fl_engine.backends.kubernetes.jobs import Group
from fl_engine.backends.kubernetes.waiting import Live, Loss
from fl_engine.core.errors import ConfigError
from fl_engine.exchange.letters import Invitation

log = logging.getLogger("flexfleet")


@dataclass
class Standing:
    """A Job that is there."""

    job: Resource
    live: Live
    names: list[str]
    """Of its pods' devices, by index."""
    told: float
    """When its Secret was written."""
    losses: dict[int, Loss] = field(default_factory=dict)
    """By index of a pod that cannot come any more."""
    runs: dict[str, float] = field(default_factory=dict)
    """By uid of a pod that runs: since when."""
    hung: set[int] = field(default_factory=set)
    """Indices of pods that run, and say nothing any more."""
    failed: dict[int, set[str]] = field(default_factory=dict)
    """By index, the uids of its pods that have failed, and were not taken away."""

    @property
    def name(self) -> str:
        return self.live.name

    @property
    def worn(self) -> bool:
        """Some of its pods never come back, whatever room there is."""
        over = {i for i, state in self.live.states.items() if state.phase == "Succeeded"}
        return bool(over or self.hung or any(i not in self.live.since or loss.node for i, loss in self.losses.items()))

    def hear(self, silent: Mapping[str, bool], now: float, lease_s: float, first_s: float) -> None:
        """Finds the pods that hang: a process that starts again is silent as well, but not for so long. `first_s`: how
        long one may run before it says its first word."""
        running = {i: state.uid for i, state in self.live.states.items() if state.started and not state.over}
        self.runs = {uid: self.runs.get(uid, now) for uid in running.values()}
        most = {name: max(2 * lease_s, 0 if spoke else first_s) for name, spoke in silent.items()}
        self.hung = {i for i, uid in running.items() if now - self.runs[uid] > most.get(self.names[i], math.inf)}


class StandingJobs:
    """Of one run. `post`: the letters of this run alone, with a roster that remembers nothing."""

    def __init__(self, ground: Ground, post: Post) -> None:
        self._ground, self._cluster, self._post = ground, ground.cluster, post
        self.labels = {jobs.RUN: ground.run, jobs.LIFETIME: "run"}
        self.by_place: dict[str, Standing] = {}
        self._attempt = 0

    def find(self, now: float, most: Callable[[str], int]) -> None:
        """The Jobs that an earlier coordinator has left. Those that were made with other settings are deleted, those of
        more pods than a place may have now (`most`), and those of rounds, as this run had them with lifetime=round."""
        settings = jobs.settings_sum(self._ground.template, self._ground.options)
        for job in self._cluster.select("jobs", {jobs.RUN: self._ground.run}):
            meta, name = job["metadata"], job["metadata"]["name"]
            self._attempt = max(self._attempt, jobs.attempt_of(job) + 1)
            if meta.get("deletionTimestamp"):
                continue
            stays = meta["labels"].get(jobs.LIFETIME) == "run" and meta["annotations"].get(jobs.SETTINGS) == settings
            members = self._members(name) if stays and status.ended(job) is None else []
            place = meta["annotations"].get(jobs.PLACE, "")
            fits = len(members) == len(jobs.pods_of(job)) <= most(place)
            if not fits or place in self.by_place:
                self._cluster.delete("jobs", name)
                continue
            log.info("the pods of the Job %s are there already", name)
            self._enter(place, job, members, now - RENEW_S)
        if self.by_place:
            events = self._ground.refusals()
            for one in self.by_place.values():
                waiting.forget_refusals(one.live, events)

    def _members(self, name: str) -> list[Member]:
        """The devices of a Job that is there, as its Secret has them; empty: it has none, or not all."""
        data = (self._cluster.get("secrets", name) or {}).get("data", {})
        found = []
        try:
            for index in range(len(data) - 1):  # one is common to all
                told = Invitation.of(base64.b64decode(data[str(index)]), name)
                found.append(Member(name=told.name, tier=told.tier, key=told.key, before=told.key))
        except (ConfigError, KeyError, binascii.Error):
            return []
        return found

    def _enter(self, place: str, job: Resource, members: Sequence[Member], told: float) -> Standing:
        for member in members:
            self._post.roster.put(member)
        live = waiting.live(job, time.monotonic(), math.inf)
        live.clients = {index: index for index in range(len(members))}
        self.by_place[place] = Standing(job, live, [member.name for member in members], told)
        return self.by_place[place]

    def make(self, place: str, group: Group) -> None:
        """Makes the Job of a place, with as many pods as the group has."""
        o = self._ground.options
        owner = self._ground.owner()
        body = jobs.job(self._ground.template, o, self._ground.run, None, group, self._attempt, owner, DATA_FOLDER)
        self._attempt += 1
        name = body["metadata"]["name"]
        job = self._ground.create_job(body, self.labels)
        members = [Member.new(f"{name}-{index}", place) for index in range(len(group.pods))]
        self._tell(self._enter(place, job, members, 0.0), time.monotonic())

    def renew(self, now: float) -> None:
        """Writes Secrets whose URLs are old anew, for pods that start again."""
        for one in self.by_place.values():
            if now - one.told > RENEW_S:
                self._cluster.delete("secrets", one.name)
                self._tell(one, now)

    def _tell(self, one: Standing, now: float) -> None:
        """Writes a Job's Secret."""
        invitations = [self._post.invitation(self._post.roster.member(name), plain=True) for name in one.names]
        self._cluster.create("secrets", jobs.secret(one.job, [told.model_dump_json() for told in invitations], "{}"))
        one.told = now

    def drop(self, place: str, why: str) -> None:
        one = self.by_place.pop(place)
        log.info("the pods of the Job %s end: %s", one.name, why)
        self._cluster.delete("jobs", one.name)
        for name in one.names:
            self._post.roster.revoke(name)
