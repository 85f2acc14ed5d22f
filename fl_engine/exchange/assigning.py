"""How the coordinator writes assignments: what clients are told of a run and of their orders, what they may read, and
where they may write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from fl_engine.core.types import WorkOrder
from fl_engine.exchange.assignment import Assignment, site_files
from fl_engine.exchange.code import signature, store_key
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import KeyOf, manifest_bytes, payload_bytes
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Upload, Verb
from fl_engine.training.memory import Peaks


class Options(Protocol):
    """What assignments need of a backend's settings."""

    @property
    def observe(self) -> Literal["simulated", "cgroup"]: ...

    @property
    def require_numerics(self) -> bool: ...

    @property
    def endpoint(self) -> str | None:
        """What clients call the S3 server; None: as the coordinator does."""


def assignment(
    mailbox: Mailbox,
    orders: Sequence[WorkOrder],
    key: KeyOf,
    options: Options,
    site_sums: Mapping[str, str],
    code: str | None = None,
    memory: Peaks | None = None,
    device: str = "cpu",
    failures: int = 0,
) -> Assignment:
    """The assignment of these orders of a round, which the mailbox has just written; it lacks the way to the store.
    `key`: what signs their answers; `site_sums`: see `Assignment.site`; `code`: the sha256 of the wheel with the run's
    own code; `memory`: what training each level takes, for observe=cgroup; `device`: the torch device that trains;
    `failures`: how many pods were killed that held one of the orders."""
    first = orders[0]
    return Assignment(
        round=first.round,
        evaluates=first.evaluates,
        clients=tuple(order.client for order in orders),
        keys={order.client: key(order).hex() for order in orders},
        site=dict(site_sums),
        orders={order.client: mailbox.order_sums[order.client] for order in orders},
        device=device,
        observe=options.observe,
        memory=memory,
        failures=failures,
        require_numerics=options.require_numerics,
        code=code,
        code_signature=code and signature(key(first), code, first.round),
    )


def of_the_run(mailbox: Mailbox, code: str | None) -> list[str]:
    """The store's keys that every client of the run reads."""
    own_data = mailbox.rules is not None and mailbox.rules.most is not None
    site = [f"site/{name}" for name in site_files(own_data)]
    return site if code is None else [*site, store_key(code)]


def uploads(
    mailbox: Mailbox,
    orders: Sequence[WorkOrder],
    verb: Verb,
    seconds: int,
    options: Options,
    under: Callable[[str], str] = lambda key: key,
) -> dict[str, Upload]:
    """By store key, the leave to write an answer's two files for so many seconds, and no more bytes than the order's
    answer can have. `under`: where the file of a key really lies."""
    store, kept = mailbox.store, {} if mailbox.rules is None else mailbox.rules.client_state
    assert isinstance(store, S3Store)
    found = {}
    for order in orders:
        names = mailbox.outcome_keys(order.round, order.client, order.evaluates)
        for name, most in zip(names, (payload_bytes(order, kept), manifest_bytes(order)), strict=True):
            found[name] = store.upload(under(name), most, seconds, verb, options.endpoint)
    return found
