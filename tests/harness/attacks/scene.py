"""One round of a small run in which a client may send anything: its order, its honest answer, and what the coordinator
makes of another answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fl_engine.algorithms import FlexFL
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, Params, RoundPlan, WorkOrder
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import Manifest, key_of, signed
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds.ledger import Closed, RoundMailbox
from fl_engine.storage.store import MemoryStore, Store, encode, sha256
from fl_engine.testing.tiny import SEED, TRAINING, context_of, start_of, tiny_site

SECRET = b"a run's own, which no client has"
CLIENTS = key_of(SECRET)
LEASE = "ab" * 8
ALGORITHM = FlexFL(training=TRAINING)


@dataclass(frozen=True)
class Scene:
    site: Site
    plan: RoundPlan
    order: WorkOrder
    """The liar's order."""
    honest: ClientUpdate
    """The liar's honest answer."""

    @staticmethod
    def open(round: int = 0) -> Scene:
        """A scene with a network that keeps running statistics, which clients send too."""
        site = tiny_site(ALGORITHM, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
        plan = ALGORITHM.plan(start_of(ALGORITHM, site), context_of(site, round, SEED))
        order = plan.orders[0]
        honest = execute(ALGORITHM, order, site)
        assert isinstance(honest, ClientUpdate), honest
        return Scene(site, plan, order, honest)

    @property
    def client(self) -> int:
        return self.order.client

    @property
    def base(self) -> str:
        return f"rounds/{self.plan.round:05d}/leases/{LEASE}/{self.client}"

    def ledger(self, store: Store) -> Mailbox:
        return Mailbox(store, rules=replace(self.site.rules, algorithm=ALGORITHM), key=CLIENTS, lease=LEASE)

    # --------------------------------------------------------------------------------------------- lies
    def tensors(self, change: Callable[[Params], Params]) -> bytes:
        return encode(change({name: t.clone() for name, t in self.honest.payload.items()}))

    def files(self, payload: bytes | None = None) -> dict[str, bytes]:
        """Return the files of the honest result, or of a result with another payload, signed by the client."""
        store = MemoryStore()
        self.ledger(store).put_outcome(self.plan, self.honest)
        manifest = Manifest.model_validate_json(store.files[f"{self.base}.json"])
        value = store.files[f"{self.base}.safetensors"] if payload is None else payload
        manifest = manifest.model_copy(update={"sha256": sha256(value), "signature": None})
        text = signed(manifest, CLIENTS(self.order)).model_dump_json().encode()
        return {f"{self.base}.safetensors": value, f"{self.base}.json": text}

    # ---------------------------------------------------------------------------------- what becomes of them
    def taken(self, files: Mapping[str, bytes]) -> str | None:
        """What the coordinator accepts of these files; None if the answer counts as this client's failure, and the
        client is asked again on resume."""
        store = MemoryStore()
        store.files |= files
        found = self.ledger(store).receive(self.plan, self.client)
        if not isinstance(found, ClientFailure):
            return "taken as an update"
        if found.stage != "validate":
            return f"taken as what the coordinator says at the stage {found.stage}"
        adopted = [o for o in self.ledger(store).finished(self.plan) if isinstance(o, ClientUpdate)]
        return "refused when it came, and adopted on resume" if adopted else None

    def round(self, store: Store) -> RoundMailbox:
        """The round's results, which the coordinator writes."""
        return RoundMailbox(store, rules=replace(self.site.rules, algorithm=ALGORITHM), key=CLIENTS)

    def closed(self, store: Store) -> Closed:
        """Closes the round with the results that the workers have sent."""
        there = {o.client: o for o in self.ledger(store).finished(self.plan)}
        for order in self.plan.orders:
            lost = ClientFailure(self.plan.round, order.client, "pod", "did not answer")
            self.round(store).put_outcome(self.plan, there.get(order.client, lost))
        box = self.round(store)
        assert len(list(box.finished(self.plan))) == len(self.plan.orders)
        return box.close(self.plan, sorted(self.plan.order_of))

    def merged(self, store: Store, closed: Closed) -> Outcome:
        """What the merge gets from the liar."""
        return self.round(store).accepted(self.plan, self.client, closed)
