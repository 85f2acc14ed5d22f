"""What a client can do to its own files if the server allows it. The engine has to see to it that no run stops, and
that no time is lost. Each attack is tried on every server that supports it."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

from fl_engine.algorithms import FlexFL
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, ClientUpdate, RoundPlan
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import key_of
from fl_engine.models.chains import SmallCNN
from fl_engine.rounds.ledger import Closed, RoundMailbox
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import Store
from fl_engine.testing.tiny import TRAINING, first_plan, tiny_site
from tests.harness.attacks.servers import BUCKET, World
from tests.harness.attacks.table import Attack
from tests.harness.attacks.urls import EVERYBODY, KEY

CLIENTS = key_of(b"a run's own, which no client has")
LEASE = "ab" * 8
ALGORITHM = FlexFL(training=TRAINING)
PATIENCE_S = 1.0
"""Seconds of waiting that one client's bad file may cost."""
Hide = Callable[[World, str, bytes], None]
"""Stores a value under a key of the bucket so that the coordinator cannot read it, or reads a false description."""


@dataclass(frozen=True)
class Scene:
    """One round of a small run in which a client may send anything."""

    site: Site
    plan: RoundPlan
    assignment: Assignment
    """The liar's order."""
    honest: ClientUpdate
    """The liar's honest answer."""

    @staticmethod
    @cache
    def open() -> Scene:
        """A scene with a network that keeps running statistics, which clients send too."""
        site = tiny_site(ALGORITHM, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
        plan = first_plan(ALGORITHM, site)
        assignment = plan.assignments[0]
        honest = execute(ALGORITHM, assignment, site)
        assert isinstance(honest, ClientUpdate), honest
        return Scene(site, plan, assignment, honest)

    @property
    def client(self) -> int:
        return self.assignment.client

    @property
    def base(self) -> str:
        return f"rounds/{self.plan.round:05d}/leases/{LEASE}/{self.client}"

    def ledger(self, store: Store) -> Mailbox:
        return Mailbox(store, rules=replace(self.site.rules, algorithm=ALGORITHM), key=CLIENTS, lease=LEASE)

    def round(self, store: Store) -> RoundMailbox:
        """The round's results, which the coordinator writes."""
        return RoundMailbox(store, rules=replace(self.site.rules, algorithm=ALGORITHM), key=CLIENTS)

    def closed(self, store: Store) -> Closed:
        """Closes the round with the results that the workers have sent."""
        there = {o.client: o for o in self.ledger(store).finished(self.plan)}
        for assignment in self.plan.assignments:
            lost = ClientFailure(self.plan.round, assignment.client, "pod", "did not answer")
            self.round(store).put_result(self.plan, there.get(assignment.client, lost))
        box = self.round(store)
        assert len(list(box.finished(self.plan))) == len(self.plan.assignments)
        return box.close(self.plan)

    def merged(self, store: Store, closed: Closed) -> ClientResult:
        """What the merge gets from the liar."""
        return self.round(store).accepted(self.plan, self.client, closed)


def by_acl(world: World, key: str, value: bytes) -> None:
    """The ACL does not let its owner read it."""
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value, GrantReadACP=EVERYBODY)


def by_key(world: World, key: str, value: bytes) -> None:
    """Encrypted with a key of its own."""
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value, SSECustomerAlgorithm="AES256", SSECustomerKey=KEY)


def by_class(world: World, key: str, value: bytes) -> None:
    """In an archive, from which it has to be restored before it can be read."""
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value, StorageClass="GLACIER")


def by_checksum(world: World, key: str, value: bytes) -> None:
    """With a wrong checksum."""
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value, Metadata={"sha256": "0" * 64})


def by_size(world: World, key: str, value: bytes) -> None:
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value + b" " * 2**20)


def by_encoding(world: World, key: str, value: bytes) -> None:
    """With a header that says that it is compressed."""
    world.s3.put_object(Bucket=BUCKET, Key=key, Body=value, ContentEncoding="gzip")


def hidden(hide: Hide, world: World, late: bool = False, kind: str = "safetensors") -> str | None:
    """One of two clients hides a file; `late`: after the round was closed."""
    s = Scene.open()
    other = execute(ALGORITHM, s.plan.assignments[1], s.site)
    assert isinstance(other, ClientUpdate)
    s = replace(s, plan=replace(s.plan, assignments=s.plan.assignments[:2]))
    prefix = f"unreadable/{uuid.uuid4().hex}/"
    store = S3Store(f"s3://{BUCKET}/{prefix}")
    s.ledger(store).open_round(s.plan)
    for result in (s.honest, other):
        s.ledger(store).put_result(s.plan, result)
    key = f"{s.base}.{kind}"
    if late:
        closed = s.closed(store)
    hide(world, prefix + key, store.get(key))
    try:
        with waiting() as slept:
            if late:
                found = s.merged(store, closed)
                others = s.round(store).accepted(s.plan, other.client, closed)
            else:
                found = s.ledger(store).receive(s.plan, s.client)
                others = s.ledger(store).receive(s.plan, other.client)
            adopted = {o.client for o in (s.round if late else s.ledger)(store).finished(s.plan)}
    except FlexfleetError as error:
        return f"stops the run, also after --resume: {type(error).__name__}: {str(error)[:160]}"
    if isinstance(others, ClientFailure) or other.client not in adopted:
        return f"an honest client fails with it: {others}"
    if sum(slept) > PATIENCE_S:
        return f"costs {sum(slept):.1f} s of waiting"
    if isinstance(found, ClientFailure):
        return None if found.stage == "validate" else f"counts as {found.stage}"
    return None if _same(found, s) else "another update than the honest one was taken"


def _same(found: Any, s: Scene) -> bool:
    """Whether the accepted update is the honest one: then the file was not really hidden."""
    return all(bool((found.payload[n] == t).all()) for n, t in s.honest.payload.items())


def a_store_that_fails_for_all(world: World) -> str | None:
    """A store that fails for all must not count as a client's failure: attackers could make others fail that way."""
    s = Scene.open()
    store: Store = S3Store(f"s3://{BUCKET}-of-nobody/x")
    try:
        found = s.ledger(store).receive(s.plan, s.client)
    except EnvironmentFailure:
        return None
    return f"counts as a client's: {found}"


def an_open_server(world: World) -> str | None:
    """A server that checks no signatures may be used only if the user explicitly allows it."""
    if world.kind != "moto":
        return None
    with mock.patch.dict(os.environ):
        os.environ.pop(probe.UNCHECKED, None)
        try:
            verb = probe.upload_verb(world.store)
        except EnvironmentFailure:
            return None
    return f"a run would hand out leave to {verb} on a server that verifies nothing"


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Yields the seconds of each sleep between tries, without sleeping."""
    slept: list[float] = []
    with mock.patch.object(time, "sleep", slept.append):
        yield slept


def _attack(name: str, tries: str, run: Callable[..., str | None], *given: Any, **more: Any) -> Attack:
    return Attack(name, tries, "engine", partial(run, *given, **more))


HIDES = {"by an ACL": by_acl, "by a key": by_key, "by a storage class": by_class}
LIES = {"by a checksum": by_checksum, "by its size": by_size, "by its encoding": by_encoding}
SERVERS = {"by a key": "radosgw", "by an ACL": "radosgw", "by a storage class": "moto"}
"""The only server that supports a way of hiding."""


def attacks(kind: str) -> tuple[Attack, ...]:
    """The attacks that this server supports."""
    ways = {name: hide for name, hide in (HIDES | LIES).items() if SERVERS.get(name, kind) == kind}
    found = [
        _attack(f"{what} hidden {name}{', late' * late}", "to stop the run for good", hidden, hide, late=late, kind=end)
        for name, hide in ways.items()
        for what, end in (("update", "safetensors"), ("manifest", "json"))
        for late in (False, True)
    ]
    found.append(_attack("a store that fails for all", "to have others counted as failed", a_store_that_fails_for_all))
    if kind == "moto":
        found.append(_attack("a server that verifies nothing", "to be let in by a bad server", an_open_server))
    return tuple(found)
