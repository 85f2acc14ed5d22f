"""What a device gets with the orders that it is lent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.core.types import WorkOrder
from fl_engine.exchange.assignment import Assignment, site_files
from fl_engine.exchange.code import signature, store_key
from fl_engine.exchange.letters import Leased, lease_key
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import KeyOf, manifest_bytes, payload_bytes
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.urls import Verb
from fl_engine.training.memory import Peaks


def key_under(key: KeyOf, site: str, loan: str) -> KeyOf:
    """The keys that sign answers under a loan. `key`: the clients'; `site`: see `Letter.site`."""
    return lambda order: lease_key(key(order), site, loan)


def assignment(
    mailbox: Mailbox,
    orders: Sequence[WorkOrder],
    names: Mapping[int, Sequence[str]],
    loan: str,
    key: KeyOf,
    options: AgentsConfig,
    code: str | None,
    verb: Verb | None,
    device: str = "cpu",
    memory: Peaks | None = None,
    failures: int = 0,
    site_sums: Mapping[str, str] = MappingProxyType({}),
) -> Assignment:
    """Of one or several orders of a round. `names`: by client, the keys of its order in the store; `key`: what signs
    their answers; `code`: the sha256 of the run's own; `verb`: how devices upload, None where they have the store
    itself; `device`: the torch device that trains; `memory`: what training each level takes, for observe=cgroup;
    `failures`: how many pods were killed that held one of them; `site_sums`: see `Assignment.site`."""
    store, first = mailbox.store, orders[0]
    told = Assignment(
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
    if verb is None or not isinstance(store, S3Store):
        return told.model_copy(update={"store": store.uri()})
    own_data = mailbox.rules is not None and mailbox.rules.most is not None
    seconds = math.ceil(options.deadline_s + options.lease_s)
    ordered = [name for order in orders for name in names[order.client]]
    reads = [
        *ordered,
        *(f"site/{name}" for name in site_files(own_data)),
        *(() if code is None else (store_key(code),)),
    ]
    kept = {} if mailbox.rules is None else mailbox.rules.client_state
    own, writes = Leased(store, loan), {}
    for order in orders:
        lengths = payload_bytes(order, kept), manifest_bytes(order)
        names_of = mailbox.outcome_keys(order.round, order.client, order.evaluates)
        for name, most in zip(names_of, lengths, strict=True):
            writes[name] = store.upload(own.key(name), most, seconds, verb, options.endpoint)
    urls = {name: store.presign(name, seconds, options.endpoint) for name in dict.fromkeys(reads)}
    return told.model_copy(update={"reads": urls, "writes": writes})
