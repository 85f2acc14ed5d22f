"""How the coordinator writes assignments: what a worker reads, and where it may write."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fl_engine.core.types import WorkOrder
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import manifest_bytes
from fl_engine.exchange.updates import payload_bytes
from fl_engine.remote.leases import OpenRound
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import Assignment, Lease, site_files
from fl_engine.storage.code import store_key
from fl_engine.storage.s3 import S3Store
from fl_engine.training.memory import Peaks


class Options(Protocol):
    @property
    def deadline_s(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def endpoint(self) -> str | None:
        """Address of the S3 server as workers reach it; None: as the coordinator does."""

    @property
    def observe(self) -> Literal["simulated", "cgroup"]: ...


@dataclass(frozen=True)
class Assigner:
    """Of one run. `lease_s`: see `Message`. `site_sums`: see `Assignment.site`; `code`: the sha256 of the wheel with
    the run's own code; `memory`: what training each level takes, for observe=cgroup."""

    mailbox: Mailbox
    mailboxes: Mailboxes
    options: Options
    lease_s: float
    site_sums: Mapping[str, str]
    code: str | None
    memory: Peaks | None

    @property
    def own_data(self) -> bool:
        """Whether clients have data of their own."""
        return self.mailbox.rules is not None and self.mailbox.rules.most is not None

    def lease(self, r: OpenRound, clients: Sequence[int], id: str) -> Lease:
        """A lease of these clients' orders, which the mailbox has written."""
        given = Assignment(
            round=r.plan.round,
            evaluates=r.plan.evaluates,
            clients=tuple(clients),
            site=dict(self.site_sums),
            orders={client: self.mailbox.order_sums[client] for client in clients},
            device=r.provisioner.torch_device(clients[0]),
            observe=self.options.observe,
            memory=self.memory,
            failures=max(r.killed[client] for client in clients),
            code=self.code,
        )
        orders = [r.plan.order_of[client] for client in clients]
        given = given.model_copy(update=self._reach(r, orders, id))
        return Lease(id=id, seconds=self.options.deadline_s, assignment=given)

    def _reach(self, r: OpenRound, orders: Sequence[WorkOrder], id: str) -> dict[str, object]:
        """How the worker reads the orders and the site, and writes the results: URLs that are valid for the lease, or
        the store itself."""
        store, verb = self.mailbox.store, self.mailboxes.verb
        if verb is None or not isinstance(store, S3Store):
            return {"store": store.uri()}
        seconds, endpoint = math.ceil(self.options.deadline_s + self.lease_s), self.options.endpoint
        keys = [name for order in orders for name in r.names[order.client]]
        keys += [f"site/{name}" for name in site_files(self.own_data)]
        keys += [] if self.code is None else [store_key(self.code)]
        state = {} if self.mailbox.rules is None else self.mailbox.rules.client_state
        writes = {}
        for order in orders:
            sizes = payload_bytes(order, state), manifest_bytes(order)
            names = Mailbox(store, lease=id).outcome_keys(order.round, order.client, order.evaluates)
            for name, most in zip(names, sizes, strict=True):
                writes[name] = store.upload(name, most, seconds, verb, endpoint)
        return {"reads": {key: store.presign(key, seconds, endpoint) for key in dict.fromkeys(keys)}, "writes": writes}
