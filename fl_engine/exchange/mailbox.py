"""What travels in a round: orders to clients, their answers, and the set of answers with which the round was closed.

    rounds/00012/plan.json              which clients were asked for which sub-model
    rounds/00012/orders/3.json          what client 3 is asked, for clients in other processes; tensors beside it
    rounds/00012/updates/3.safetensors  what client 3 brought, then its manifest, last
    rounds/00012/updates/3.json
    rounds/00012/closed.json            the accepted set, frozen before the merge
    rounds/00012/evaluation/...         plan, orders and answers of the round's evaluation at the clients

All of it is deleted when the round is committed (`storage.checkpoints`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from fl_engine.codecs import codecs_of, sections_of
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, ModelError
from fl_engine.core.fields import Index
from fl_engine.core.types import ClientFailure, Code, Header, Outcome, Params, RoundPlan, Stage, SubmodelSpec, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.acceptance import Moved
from fl_engine.exchange.updates import (
    KeyOf,
    Manifest,
    Rejected,
    Rules,
    manifest_bytes,
    manifest_of,
    packed,
    payload_bytes,
    said_of,
    signed,
    update_of,
)
from fl_engine.fleet.uniformity import Times
from fl_engine.storage import sums
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.pieces import laid_out
from fl_engine.storage.records import WAY_OUT, Record, parsed, round_folder
from fl_engine.storage.store import Store, canonical, decode, sha256, tensor_bytes

log = logging.getLogger("flexfleet")

T = TypeVar("T")


class Refusal(Record):
    """Why there is no update, or why it is not merged: see `ClientFailure`."""

    stage: Stage
    reason: str
    code: Code | None = None

    def failure(self, round: int, client: int) -> ClientFailure:
        return ClientFailure(round, client, self.stage, self.reason, self.code)


class Closed(Record):
    round: int
    accepted: dict[int, str]
    """By client, a checksum of its answer as it was read: an answer that is replaced later does not count. (A client
    whose pod was started again gives the same answer, with other seconds.)"""
    refused: dict[int, Refusal] = Field(default={})
    """Clients that failed, and those whose updates are not merged, though nothing is wrong with the files."""
    metrics: dict[int, dict[str, float]] = Field(default={})
    """The metrics of each update, as they were read: those of a later answer do not count."""
    moved: dict[int, Moved] = Field(default={})
    """How far each update moved, refused ones included, where this was measured."""
    times: dict[int, Times] = Field(default={})
    """What the orders of the refused updates took: the updates themselves are not read again."""
    checksum: str = ""
    """A checksum of all other fields."""

    def sealed(self) -> Closed:
        unsaid = {name for name in ("metrics", "moved", "times") if not getattr(self, name)}  # older records have none
        said = canonical(self.model_dump(exclude={"checksum", *unsaid}))
        return self.model_copy(update={"checksum": sha256(said)})


TensorFile = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.safetensors$")]


class Order(Record):
    """A `WorkOrder`. `payload` and `memory` name the files beside it with the tensors; None: there are none. `codecs`
    are there where some tensors are coded, written as in a configuration; `header` is there where the payload is coded:
    types and shapes of the decoded tensors."""

    round: int
    client: int
    spec: dict[str, Any]
    seed: int
    level: int
    hints: dict[str, Any]
    payload: TensorFile | None
    memory: TensorFile | None
    codecs: dict[str, dict[str, Any]] | None = None
    header: dict[str, tuple[str, tuple[Index, ...]]] | None = None
    evaluates: bool = False
    most: Index | None = None
    """Bytes of the larger of the two files: no client reads more of one."""


class Mailbox:
    """`rules` say what an update may be, and `key` gives the key with which a client signs its manifest; None: not
    checked, not signed (clients in this process). The coordinator signs with `own`. `lengths`: by store key, the only
    length in bytes at which the store accepts it (see `urls.Upload`). `expected`: by client, the sum of the order that
    is read (`Assignment.orders`); None: the store is trusted."""

    def __init__(
        self,
        store: Store,
        rules: Rules | None = None,
        key: KeyOf | None = None,
        own: KeyOf | None = None,
        lengths: Mapping[str, int] = MappingProxyType({}),
        expected: Mapping[int, str] | None = None,
    ) -> None:
        self.store = store
        self.rules = rules
        self.key = key
        self.own = own
        self.lengths = dict(lengths)
        self._expected = expected
        self.order_sums: dict[int, str] = {}
        """By client, the sum of the order that was written last."""
        self._seen: dict[tuple[int, int], tuple[str, dict[str, float] | None]] = {}
        """By round and client: what `Closed` keeps of an answer; the metrics are None for a failure."""
        self._failed: dict[tuple[int, int], ClientFailure] = {}
        """By round and client: the answer, where it is a failure."""

    def open_round(self, plan: RoundPlan) -> None:
        orders = [
            {"client": o.client, "level": o.level, "spec": o.spec.to_json(), "seed": o.seed, "hints": dict(o.hints)}
            for o in plan.orders
        ]
        self.store.put(f"{_folder(plan)}plan.json", canonical({"round": plan.round, "orders": orders}))

    def put_orders(self, plan: RoundPlan) -> dict[int, list[str]]:
        """Writes the orders for clients in other processes; gives the keys of each client's order. Tensors that several
        clients are sent are written once."""
        keys: dict[int, list[str]] = {}
        files: dict[tuple[int, ...], tuple[str, int]] = {}
        """By the tensors in it: a file's name and bytes."""
        folder = f"{_folder(plan)}orders/"

        def same(tensors: Params) -> tuple[int, ...]:
            return tuple(id(tensor) for tensor in tensors.values())

        def put_tensors(tensors: Params) -> None:
            value = laid_out(tensors)
            name = f"{sha256(value)}.safetensors"
            files[same(tensors)] = name, len(value)
            self.store.put(folder + name, value)

        def put_order(o: WorkOrder) -> None:
            payload, memory = (files[same(t)] if t else (None, 0) for t in (o.travels, o.memory))
            order = Order(
                round=o.round,
                client=o.client,
                spec=o.spec.to_json(),
                seed=o.seed,
                level=o.level,
                hints=dict(o.hints),
                payload=payload[0],
                memory=memory[0],
                codecs=None if o.codecs is None else sections_of(o.codecs),
                header=None if o.encoded is None else _told(coding.header_of(o.payload)),
                evaluates=o.evaluates,
                most=max(payload[1], memory[1]),
            )
            unsaid = {"codecs", "header"} if o.codecs is None else set()
            unsaid |= set() if o.evaluates else {"evaluates"}
            value = order.model_dump_json(exclude=unsaid).encode()
            self.store.put(f"{folder}{o.client}.json", value)
            self.order_sums[o.client] = sums.sum_of(value)
            names = (f"{o.client}.json", order.payload, order.memory)
            keys[o.client] = [folder + name for name in names if name is not None]

        distinct = {same(t): t for o in plan.orders for t in (o.travels, o.memory) if t}.values()
        self._all(put_tensors, distinct, max(map(tensor_bytes, distinct), default=0))
        self._all(put_order, plan.orders)
        return {order.client: keys[order.client] for order in plan.orders}

    def _all(self, work: Callable[[T], object], items: Iterable[T], size: int = 0) -> None:
        for _ in overlapped(self.store, size, work, items):
            pass

    def ordered(self, round: int, evaluates: bool = False) -> int:
        """How many orders were written."""
        return sum(key.endswith(".json") for key in self.store.list(f"{round_folder(round, evaluates)}orders/"))

    def orders(self, round: int, clients: Iterable[int], evaluates: bool = False) -> dict[int, WorkOrder]:
        """By client. What several of them are sent is read once, and they share its tensors. Raises IntegrityError
        where an order, or what it sends, is missing, damaged or not `expected`."""
        folder = f"{round_folder(round, evaluates)}orders/"

        def read(client: int) -> Order:
            name = f"{folder}{client}.json"
            if self._expected is None:
                value = self.store.get(name)
            else:
                value = sums.read(self.store, name, self._expected.get(client))
            order = parsed(Order, value, self.store.uri(name))
            if (order.round, order.client, order.evaluates) != (round, client, evaluates):
                raise IntegrityError(f"{self.store.uri(name)} is of round {order.round}, client {order.client}")
            return order

        def tensors(file: str, most: int | None) -> Params:
            value = self.store.get(folder + file, most)
            if file != f"{sha256(value)}.safetensors":
                raise IntegrityError(f"{self.store.uri(folder + file)} is damaged: its name is not its sha256")
            return decode(value, self.store.uri(folder + file))

        found = list(overlapped(self.store, 0, read, clients))
        files = {file: o.most for o in found for file in (o.payload, o.memory) if file is not None}
        known = {file: tensors(file, most) for file, most in files.items()}
        return {o.client: self._work(o, known, self.store.uri(f"{folder}{o.client}.json")) for o in found}

    @staticmethod
    def _work(order: Order, known: Mapping[str, Params], name: str) -> WorkOrder:
        """`known`: by file, the tensors."""
        try:
            spec = SubmodelSpec.from_json(order.spec)
        except ModelError as error:
            raise IntegrityError(f"{name} is no order: {error}") from error
        found = WorkOrder(
            round=order.round,
            client=order.client,
            spec=spec,
            payload={} if order.payload is None else known[order.payload],
            seed=order.seed,
            level=order.level,
            hints=order.hints,
            memory={} if order.memory is None else known[order.memory],
            evaluates=order.evaluates,
        )
        if order.codecs is None:
            return found
        try:
            codecs = codecs_of(order.codecs)
            if codecs.down is None:
                return replace(found, codecs=codecs)
            payload = coding.decoded(codecs.down, found.payload, _header(order.header or {}))
            return replace(found, payload=payload, codecs=codecs)
        except (ConfigError, IntegrityError) as error:
            raise IntegrityError(f"{name} is no order: {error}") from error

    def outcome_keys(self, round: int, client: int, evaluates: bool = False) -> list[str]:
        """The keys that a client writes."""
        return [f"{round_folder(round, evaluates)}updates/{client}.{kind}" for kind in ("safetensors", "json")]

    def put_outcome(self, plan: RoundPlan, outcome: Outcome, spoil: Callable[[bytes], bytes] | None = None) -> None:
        """Writes the payload first and the manifest last. `spoil` damages the payload's file on the way."""
        base, order = f"{_folder(plan)}updates/{outcome.client}", plan.order_of[outcome.client]
        manifest, value = packed(outcome, order, self.lengths.get(f"{base}.safetensors"))
        if value is not None:
            self.store.put(f"{base}.safetensors", value if spoil is None else spoil(bytes(value)))
        key = self.own or self.key
        manifest = signed(manifest, None if key is None else key(order))
        text = manifest.model_dump_json().encode()
        length = self.lengths.get(f"{base}.json", 0)
        if length > (most := manifest_bytes(order)):
            raise ClientError(f"a manifest of {length} bytes is asked for, of this order none is longer than {most}")
        self.store.put(f"{base}.json", text.ljust(length))
        self._seen[plan.round, outcome.client] = said_of(manifest), _metrics(manifest)
        self._remember(plan, outcome)

    def answered(self, round: int, evaluates: bool = False) -> set[int]:
        """Clients that have left a manifest, good or bad."""
        folder = f"{round_folder(round, evaluates)}updates/"
        found = re.compile(f"{re.escape(folder)}(0|[1-9][0-9]*)\\.json")
        return {int(match[1]) for match in map(found.fullmatch, self.store.list(folder)) if match}

    def finished(self, plan: RoundPlan) -> Iterator[Outcome]:
        """The good outcomes in the store. The other clients of this plan have to be asked (again), and their files are
        deleted: clients with other keys, or none, may have written them."""
        for client in sorted(self.answered(plan.round, plan.evaluates) & {o.client for o in plan.orders}):
            try:
                outcome = self._read(plan, client)
            except (Rejected, IntegrityError) as error:
                log.warning("round %d, client %d: %s; asking again", plan.round + 1, client, error)
                self.store.delete(*reversed(self.outcome_keys(plan.round, client, plan.evaluates)))
            else:
                yield outcome

    def receive(self, plan: RoundPlan, client: int) -> Outcome:
        """A client's answer; one that fails validation is a failure at the stage `validate`."""
        try:
            return self._read(plan, client)
        except Rejected as error:
            return ClientFailure(plan.round, client, "validate", str(error), error.code)

    def received(self, plan: RoundPlan, clients: Sequence[int]) -> Iterator[Outcome]:
        """As `receive`, in the clients' order, with requests that overlap."""
        return overlapped(self.store, self.held_by(plan, clients), lambda client: self.receive(plan, client), clients)

    def held_by(self, plan: RoundPlan, clients: Iterable[int]) -> int:
        """The bytes that reading the largest answer of these clients takes: its file, and what becomes of that."""
        state = {} if self.rules is None else self.rules.client_state
        orders = {id(order.payload): order for order in (plan.order_of[client] for client in clients)}.values()
        sizes = (max(payload_bytes(o, state), 0 if o.evaluates else tensor_bytes(o.payload)) for o in orders)
        return 2 * max(sizes, default=0)

    def outcome(self, plan: RoundPlan, client: int, closed: Closed | None = None) -> Outcome:
        """The stored outcome; with `closed`, the one that the round was closed with. Raises IntegrityError where it is
        missing or damaged."""
        try:
            return self._read(plan, client, closed)
        except (Rejected, IntegrityError) as error:
            name = self.store.uri(f"{_folder(plan)}updates/{client}.safetensors")
            raise IntegrityError(f"{name}: the update of client {client} is not whole ({error}). {WAY_OUT}") from error

    def _read(self, plan: RoundPlan, client: int, closed: Closed | None = None) -> Outcome:
        """If this client's files cannot be read and the coordinator's own can, the client is the cause: it may have
        given them away, encrypted them with a key of its own, or made the server's answer unreadable."""
        try:
            return self._read_files(plan, client, closed)
        except EnvironmentFailure:
            if self.key is None:
                raise
            self._see_own(plan)
        try:
            return self._read_files(plan, client, closed)
        except EnvironmentFailure as error:
            self._see_own(plan)
            raise Rejected("unreadable", f"{error} (the coordinator's own files can be read)") from error

    def _see_own(self, plan: RoundPlan) -> None:
        """Raises EnvironmentFailure where the store does not answer at all."""
        with suppress(IntegrityError):  # missing or damaged: the store answers
            self.store.get(f"{_folder(plan)}plan.json")

    def _read_files(self, plan: RoundPlan, client: int, closed: Closed | None) -> Outcome:
        order, base = plan.order_of[client], f"{_folder(plan)}updates/{client}"
        client_key, own_key = (None if key is None else key(order) for key in (self.key, self.own))
        said = None if closed is None else closed.accepted[client]
        manifest = manifest_of(lambda limit: self.store.get(f"{base}.json", limit), order, client_key, own_key, said)
        self._seen[plan.round, client] = said_of(manifest), _metrics(manifest)
        if closed is not None and client in closed.metrics:
            manifest = manifest.model_copy(update={"metrics": closed.metrics[client]})
        found = update_of(manifest, lambda limit: self.store.get(f"{base}.safetensors", limit), order, self.rules)
        self._remember(plan, found)
        return found

    def _remember(self, plan: RoundPlan, outcome: Outcome) -> None:
        self._failed.pop((plan.round, outcome.client), None)
        if isinstance(outcome, ClientFailure):
            self._failed[plan.round, outcome.client] = outcome

    def accepted(self, plan: RoundPlan, client: int, closed: Closed) -> Outcome:
        """The outcome that the round was closed with. If clients hold keys and one has replaced or damaged its own
        answer since, a failure; without keys this machine's file is damaged: raises IntegrityError."""
        if client in closed.refused:
            return closed.refused[client].failure(plan.round, client)
        try:
            return self.outcome(plan, client, closed)
        except IntegrityError:
            if self.key is None:
                raise
            return ClientFailure(plan.round, client, "validate", "order: replaced after the round was closed", "order")

    def close(
        self,
        plan: RoundPlan,
        clients: Sequence[int],
        refused: Mapping[int, ClientFailure] = MappingProxyType({}),
        moved: Mapping[int, Moved] = MappingProxyType({}),
        times: Mapping[int, Times] = MappingProxyType({}),
    ) -> Closed:
        """Stores the set that the merge uses, as it was read or written here: the outcomes of `clients`, some of them
        refused. `times`: what the refused ones took.

        Failures are stored whole: a client that was called off may still write over its own, while it ends."""
        known = {client: self._failed.get((plan.round, client)) for client in clients}
        failed = {client: failure for client, failure in known.items() if failure is not None}
        why = {
            client: Refusal(stage=failure.stage, reason=failure.reason, code=failure.code)
            for client, failure in sorted((failed | dict(refused)).items())
        }
        seen = {client: self._seen[plan.round, client] for client in sorted(clients)}
        self._seen.clear()
        self._failed.clear()
        closed = Closed(
            round=plan.round,
            accepted={client: said for client, (said, _) in seen.items()},
            refused=why,
            metrics={client: metrics for client, (_, metrics) in seen.items() if metrics is not None},
            moved=dict(sorted(moved.items())),
            times=dict(sorted(times.items())),
        ).sealed()
        self.store.put(f"{round_folder(plan.round)}closed.json", closed.model_dump_json().encode())
        return closed

    def closed(self, plan: RoundPlan) -> Closed | None:
        """The record of the closed round; None: the round is open."""
        key = f"{round_folder(plan.round)}closed.json"
        if key not in self.store.list(key):
            return None
        try:
            found = parsed(Closed, self.store.get(key), self.store.uri(key))
            if found != found.sealed():
                raise IntegrityError(f"{self.store.uri(key)} is damaged: its checksum is another")
            named = found.refused.keys() | found.metrics.keys() | found.moved.keys() | found.times.keys()
            others = (named - found.accepted.keys()) | (found.times.keys() - found.refused.keys())
            if found.round != plan.round or others or found.accepted.keys() != plan.order_of.keys():
                raise IntegrityError(f"{self.store.uri(key)} is of another round, or of other clients")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        return found


def _folder(plan: RoundPlan) -> str:
    return round_folder(plan.round, plan.evaluates)


def _told(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in header.items()}


def _header(told: Mapping[str, tuple[str, tuple[int, ...]]]) -> Header:
    found: Header = {}
    for name, (said, shape) in told.items():
        dtype = getattr(torch, said, None)
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError(f"{name} is of the type {said!r}, which torch does not have")
        found[name] = dtype, tuple(shape)
    return found


def _metrics(manifest: Manifest) -> dict[str, float] | None:
    return None if manifest.spec is None else dict(manifest.metrics)
