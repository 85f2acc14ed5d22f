"""How orders that are lent get their keys, and their way to the store."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.core.types import WorkOrder
from fl_engine.exchange.assigning import of_the_run, uploads
from fl_engine.exchange.assignment import Assignment
from fl_engine.exchange.letters import Leased, lease_key
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import KeyOf
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Verb


def key_under(key: KeyOf, site: str, loan: str) -> KeyOf:
    """The keys that sign answers under a loan. `key`: the clients'; `site`: see `Letter.site`."""
    return lambda order: lease_key(key(order), site, loan)


def reachable(
    told: Assignment,
    mailbox: Mailbox,
    orders: Sequence[WorkOrder],
    names: Mapping[int, Sequence[str]],
    loan: str,
    options: AgentsConfig,
    verb: Verb | None,
) -> Assignment:
    """What is told, with the way to the store. `names`: by client, the keys of its order in the store; `verb`: how
    devices upload, None where they have the store itself."""
    store = mailbox.store
    if verb is None or not isinstance(store, S3Store):
        return told.model_copy(update={"store": store.uri()})
    seconds = math.ceil(options.deadline_s + options.lease_s)
    ordered = [name for order in orders for name in names[order.client]]
    keys = dict.fromkeys([*ordered, *of_the_run(mailbox, told.code)])
    reads = {key: store.presign(key, seconds, options.endpoint) for key in keys}
    writes = uploads(mailbox, orders, verb, seconds, options, Leased(store, loan).key)
    return told.model_copy(update={"reads": reads, "writes": writes})
