"""The round ledger: what makes a run resumable after a kill at any instant.

    rounds/00012/plan.json              which clients were asked for which sub-model
    rounds/00012/orders/3.json          what client 3 is asked, for clients in other processes; tensors beside it
    rounds/00012/updates/3.safetensors  what client 3 brought, then its manifest, last
    rounds/00012/updates/3.json
    rounds/00012/closed.json            the accepted set, frozen before the merge
    rounds/00012/state.safetensors      the algorithm's state after the round
    rounds/00012/state.json
    rounds/00012/metrics.json           what was measured since the commit before
    rounds/00012/COMMITTED              last, with the checksums of the three files above

A round is over when its COMMITTED exists; everything before that is done again, or adopted. Committing round r
deletes what rounds up to r left (plans, updates) and the states before the previous commit.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from fl_engine.errors import IntegrityError, brief
from fl_engine.store import Store, decode, encode, sha256
from fl_engine.types import ClientFailure, ClientUpdate, Outcome, Params, RoundPlan, SubmodelSpec, WorkOrder

log = logging.getLogger("flexfleet")

R = TypeVar("R", bound=BaseModel)

WAY_OUT = (
    "To go on from the last good commit, resume with --discard-damaged: the rounds after it are computed again"
)
STATE_FILES = ("state.safetensors", "state.json", "metrics.json")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1


class Row(_Record):
    """One round's measurements. `clients` has a line per order: client, sent, trained, loss, seconds, failure.

    A metric that is not finite (a model that diverged) is left out: JSON cannot say it, and nothing can draw it.
    """

    round: int
    metrics: dict[str, float]
    clients: tuple[dict[str, Any], ...]

    @field_validator("metrics")
    @classmethod
    def _finite(cls, metrics: dict[str, float]) -> dict[str, float]:
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            log.warning("%s: not finite, left out", ", ".join(odd))
        return {name: value for name, value in metrics.items() if name not in odd}


class Committed(_Record):
    round: int
    files: dict[str, str]
    """File name to sha256."""


class Closed(_Record):
    accepted: tuple[int, ...]
    """Clients, ascending."""


class Order(_Record):
    """A `WorkOrder`. `payload` and `memory` name the files beside it with the tensors; None: there are none."""

    round: int
    client: int
    spec: dict[str, Any]
    seed: int
    hints: dict[str, Any]
    payload: str | None
    memory: str | None


class Manifest(_Record):
    """One outcome. `sha256` and `spec` belong to an update, `stage` and `reason` to a failure."""

    round: int
    client: int
    order: str
    """sha256 of the order, so that an update is never adopted for another plan."""
    sha256: str | None = None
    spec: dict[str, Any] | None = None
    num_examples: int = 0
    metrics: dict[str, float] = {}
    stage: str | None = None
    reason: str | None = None


class Ledger:
    def __init__(self, store: Store, keep_every: int | None = None) -> None:
        self.store = store
        self.keep_every = keep_every

    # ------------------------------------------------------------------------------------------ commits
    def commits(self) -> list[int]:
        """Committed rounds, ascending."""
        return sorted(int(k.split("/")[1]) for k in self.store.list("rounds/") if k.endswith("/COMMITTED"))

    def commit(self, round: int, tensors: Params, rest: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Makes `round` the last finished one, then removes what is no longer needed."""
        files = {
            "state.safetensors": encode(tensors),
            "state.json": _json(rest),
            "metrics.json": _json([row.model_dump(mode="json") for row in rows]),
        }
        for name, value in files.items():
            self.store.put(f"{_folder(round)}{name}", value)
        sums = Committed(round=round, files={name: sha256(value) for name, value in files.items()})
        self.store.put(f"{_folder(round)}COMMITTED", sums.model_dump_json().encode())
        self._prune(round)

    def read(self, round: int) -> tuple[Params, dict[str, Any]]:
        """The state after a committed round. Raises IntegrityError naming the file that is not as committed."""
        tensors = self._committed(round, "state.safetensors")
        rest: dict[str, Any] = json.loads(self._committed(round, "state.json"))
        self._committed(round, "metrics.json")
        return decode(tensors, self.store.uri(f"{_folder(round)}state.safetensors")), rest

    def rows(self) -> list[Row]:
        """Every committed round's measurements, in round order. Raises IntegrityError naming a damaged file."""
        return [row for round in self.commits() for row in self._rows(round)]

    def last_good(self) -> int | None:
        """The newest committed round whose state is intact, and all measurements up to it; None: there is none."""
        good = None
        for round in self.commits():
            try:
                self._rows(round)
            except IntegrityError:
                return good
            try:
                self.read(round)
            except IntegrityError:
                continue  # damaged, or removed by retention
            good = round
        return good

    def _rows(self, round: int) -> list[Row]:
        name = self.store.uri(f"{_folder(round)}metrics.json")
        rows = json.loads(self._committed(round, "metrics.json"))
        return [_parse(Row, json.dumps(row).encode(), name) for row in rows]

    def _committed(self, round: int, name: str) -> bytes:
        """A file of a committed round, checked against the checksum that was committed with it."""
        mark = f"{_folder(round)}COMMITTED"
        try:
            expected = _parse(Committed, self.store.get(mark), self.store.uri(mark)).files.get(name)
            value = self.store.get(f"{_folder(round)}{name}")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if sha256(value) != expected:
            raise IntegrityError(
                f"{self.store.uri(_folder(round) + name)} is damaged: its sha256 is {sha256(value)[:16]}..., "
                f"{self.store.uri(mark)} says {str(expected)[:16]}... . {WAY_OUT}"
            )
        return value

    def discard_after(self, round: int | None) -> None:
        """Forgets every round after `round` (None: all)."""
        first = 0 if round is None else round + 1
        keys = [k for k in self.store.list("rounds/") if int(k.split("/")[1]) >= first]
        for key in sorted(keys, key=lambda k: not k.endswith("/COMMITTED")):
            self.store.delete(key)

    def tidy(self) -> None:
        """Removes what a kill left behind, a started round's updates excepted: they are adopted."""
        self.store.sweep("rounds/")
        commits = self.commits()
        if commits:
            self._prune(commits[-1])

    def _prune(self, round: int) -> None:
        commits = [r for r in self.commits() if r <= round]
        for key in self.store.list("rounds/"):
            folder, name = int(key.split("/")[1]), key.split("/", 2)[2]
            unfinished = folder <= round and (folder not in commits or name not in (*STATE_FILES, "COMMITTED"))
            kept = self.keep_every is not None and (folder + 1) % self.keep_every == 0
            old = folder < commits[-2:][0] and name in ("state.safetensors", "state.json") and not kept
            if unfinished or old:
                self.store.delete(key)

    # -------------------------------------------------------------------------------------- inside a round
    def open_round(self, plan: RoundPlan) -> None:
        orders = [
            {"client": o.client, "spec": o.spec.to_json(), "seed": o.seed, "hints": dict(o.hints)} for o in plan.orders
        ]
        self.store.put(f"{_folder(plan.round)}plan.json", _json({"round": plan.round, "orders": orders}))

    def put_orders(self, plan: RoundPlan) -> None:
        """What clients in other processes read. Tensors are written once, however many clients are sent the same."""
        written: dict[tuple[int, ...], str] = {}

        def put(tensors: Params) -> str | None:
            if not tensors:
                return None
            same = tuple(id(tensor) for tensor in tensors.values())
            if same not in written:
                value = encode(tensors)
                written[same] = f"{sha256(value)}.safetensors"
                self.store.put(f"{_folder(plan.round)}orders/{written[same]}", value)
            return written[same]

        for o in plan.orders:
            order = Order(
                round=o.round,
                client=o.client,
                spec=o.spec.to_json(),
                seed=o.seed,
                hints=dict(o.hints),
                payload=put(o.payload),
                memory=put(o.memory),
            )
            self.store.put(f"{_folder(plan.round)}orders/{o.client}.json", order.model_dump_json().encode())

    def order(self, round: int, client: int) -> WorkOrder:
        """Raises IntegrityError where the order, or what it sends, is missing or damaged."""
        folder = f"{_folder(round)}orders/"
        name = f"{folder}{client}.json"
        order = _parse(Order, self.store.get(name), self.store.uri(name))

        def get(file: str | None) -> Params:
            if file is None:
                return {}
            value = self.store.get(folder + file)
            if file != f"{sha256(value)}.safetensors":
                raise IntegrityError(f"{self.store.uri(folder + file)} is damaged: its name is not its sha256")
            return decode(value, self.store.uri(folder + file))

        return WorkOrder(
            round=order.round,
            client=order.client,
            spec=SubmodelSpec.from_json(order.spec),
            payload=get(order.payload),
            seed=order.seed,
            hints=order.hints,
            memory=get(order.memory),
        )

    def put_outcome(self, plan: RoundPlan, outcome: Outcome) -> None:
        """The payload first, the manifest last: a manifest vouches for its file."""
        base = f"{_folder(plan.round)}updates/{outcome.client}"
        manifest = Manifest(round=plan.round, client=outcome.client, order=_order_sum(plan, outcome.client))
        if isinstance(outcome, ClientFailure):
            manifest = manifest.model_copy(update={"stage": outcome.stage, "reason": outcome.reason})
        else:
            value = encode(outcome.payload)
            self.store.put(f"{base}.safetensors", value)
            manifest = manifest.model_copy(
                update={
                    "sha256": sha256(value),
                    "spec": outcome.spec.to_json(),
                    "num_examples": outcome.num_examples,
                    "metrics": dict(outcome.metrics),
                }
            )
        self.store.put(f"{base}.json", manifest.model_dump_json().encode())

    def finished(self, plan: RoundPlan) -> set[int]:
        """Clients of this plan whose outcome is there and whole; the others are to be asked (again)."""
        return {o.client for o in plan.orders if self._manifest(plan, o.client) is not None}

    def outcome(self, plan: RoundPlan, client: int) -> Outcome:
        """Raises IntegrityError where the stored outcome is missing or damaged."""
        manifest = self._manifest(plan, client)
        key = f"{_folder(plan.round)}updates/{client}.safetensors"
        if manifest is None:
            raise IntegrityError(f"{self.store.uri(key)}: the update of client {client} is not whole. {WAY_OUT}")
        if manifest.spec is None:
            return ClientFailure(plan.round, client, manifest.stage or "train", manifest.reason or "")
        payload = decode(self.store.get(key), self.store.uri(key))
        spec = SubmodelSpec.from_json(manifest.spec)
        return ClientUpdate(plan.round, client, spec, payload, manifest.num_examples, manifest.metrics)

    def close(self, plan: RoundPlan, accepted: Sequence[int]) -> None:
        """Freezes the set that the merge uses."""
        closed = Closed(accepted=tuple(sorted(accepted)))
        self.store.put(f"{_folder(plan.round)}closed.json", closed.model_dump_json().encode())

    def closed(self, round: int) -> list[int] | None:
        key = f"{_folder(round)}closed.json"
        if key not in self.store.list(key):
            return None
        try:
            return list(_parse(Closed, self.store.get(key), self.store.uri(key)).accepted)
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error

    def _manifest(self, plan: RoundPlan, client: int) -> Manifest | None:
        """None where the outcome is missing, not whole, or for another order: the client is asked (again)."""
        key = f"{_folder(plan.round)}updates/{client}.json"
        if key not in self.store.list(key):
            return None
        try:
            manifest = _parse(Manifest, self.store.get(key), self.store.uri(key))
            payload = key.replace(".json", ".safetensors")
            whole = manifest.sha256 is None or manifest.sha256 == sha256(self.store.get(payload))
        except IntegrityError as error:
            log.warning("%s: asking client %d again", error, client)
            return None
        return manifest if whole and manifest.order == _order_sum(plan, client) else None


def _folder(round: int) -> str:
    return f"rounds/{round:05d}/"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, allow_nan=False).encode()


def _order_sum(plan: RoundPlan, client: int) -> str:
    order = next(o for o in plan.orders if o.client == client)
    return sha256(_json([plan.round, client, order.seed, order.spec.to_json(), dict(order.hints)]))


def _parse(kind: type[R], value: bytes, name: str) -> R:
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a valid {kind.__name__} record: {brief(error)}") from error
