"""The files of a round: assignments to clients, and their results.

    rounds/00012/plan.json              which clients were asked for which sub-model
    rounds/00012/orders/3.json          the assignment of client 3, if it is in another process; tensors beside it
    rounds/00012/updates/3.safetensors  the update of client 3
    rounds/00012/updates/3.json         its manifest, written last
    rounds/00012/evaluation/...         plan, assignments and results of the round's evaluation at the clients

All files are deleted when the round is committed (`storage.checkpoints`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import torch
from pydantic import Field

from fl_engine.codecs import codecs_of, sections_of
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, ModelError
from fl_engine.core.fields import Index
from fl_engine.core.types import ClientFailure, Header, Outcome, Params, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import KeyOf, Manifest, Rejected, manifest_bytes, manifest_of, packed, said_of, signed
from fl_engine.exchange.updates import Rules, payload_bytes, update_of
from fl_engine.storage import run_files
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_files import WAY_OUT, Record, parsed, round_folder
from fl_engine.storage.serialization import laid_out
from fl_engine.storage.store import Store, canonical, decode, sha256, tensor_bytes

log = logging.getLogger("flexfleet")

T = TypeVar("T")

Known = tuple[str, dict[str, float] | None]
"""Identifies an outcome: `said_of` its manifest, and its metrics (None for a failure)."""
TensorFile = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.safetensors$")]


class Order(Record):
    """A stored `WorkOrder`."""

    round: int
    client: int
    spec: dict[str, Any]
    seed: int
    level: int
    hints: dict[str, Any]
    payload: TensorFile | None
    """Name of the file beside it with the weights."""
    memory: TensorFile | None
    """Name of the file with what the client has kept."""
    codecs: dict[str, dict[str, Any]] | None = None
    """As in a configuration; None: no tensors are encoded."""
    header: dict[str, tuple[str, tuple[Index, ...]]] | None = None
    """Types and shapes of the decoded weights, if they are encoded."""
    evaluates: bool = False
    most: Index | None = None
    """Bytes of the larger of the two files: clients read no more of either."""


@dataclass(eq=False)
class Mailbox:
    """Reads and writes the files of rounds."""

    store: Store
    """The run's store."""
    rules: Rules | None = None
    """What an update may be. None: updates are not checked (clients of this machine)."""
    key: KeyOf | None = None
    """The keys that sign results. None: results are not signed."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Map keys of the store to the only length in bytes that it accepts for them (`urls.Upload`)."""
    expected: Mapping[int, str] | None = None
    """Map each client to the sum of its assignment (`Assignment.orders`). None: the store is trusted."""
    lease: str = ""
    """The id of the lease whose results a worker writes. Empty: the round's results, which the coordinator writes."""
    order_sums: dict[int, str] = field(default_factory=dict)
    """Map each client to the sum of its assignment that was written last."""
    seen: dict[tuple[int, int], Known] = field(default_factory=dict)
    """Map round and client to the outcome that was read or written last."""
    failed: dict[tuple[int, int], ClientFailure] = field(default_factory=dict)
    """The failures among these."""

    @property
    def _results(self) -> str:
        return f"leases/{self.lease}" if self.lease else "updates"

    def open_round(self, plan: RoundPlan) -> None:
        orders = [
            {"client": o.client, "level": o.level, "spec": o.spec.to_json(), "seed": o.seed, "hints": dict(o.hints)}
            for o in plan.orders
        ]
        self.store.put(f"{_folder(plan)}plan.json", canonical({"round": plan.round, "orders": orders}))

    def put_orders(self, plan: RoundPlan) -> dict[int, list[str]]:
        """Write the assignments for clients in other processes, and return the keys of each client's files. Tensors
        that several clients share are written once."""
        keys: dict[int, list[str]] = {}
        files: dict[tuple[int, ...], tuple[str, int]] = {}
        """Map tensors to the name and bytes of their file."""
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
                header=None if o.encoded is None else _names(coding.header_of(o.payload)),
                evaluates=o.evaluates,
                most=max(payload[1], memory[1]),
            )
            value = order.model_dump_json().encode()
            self.store.put(f"{folder}{o.client}.json", value)
            self.order_sums[o.client] = run_files.sum_of(value)
            names = (f"{o.client}.json", order.payload, order.memory)
            keys[o.client] = [folder + name for name in names if name is not None]

        distinct = {same(t): t for o in plan.orders for t in (o.travels, o.memory) if t}.values()
        list(overlapped(self.store, max(map(tensor_bytes, distinct), default=0), put_tensors, distinct))
        list(overlapped(self.store, 0, put_order, plan.orders))
        return {order.client: keys[order.client] for order in plan.orders}

    def ordered(self, round: int, evaluates: bool = False) -> int:
        """Return the number of assignments that were written."""
        return sum(key.endswith(".json") for key in self.store.list(f"{round_folder(round, evaluates)}orders/"))

    def orders(self, round: int, clients: Iterable[int], evaluates: bool = False) -> dict[int, WorkOrder]:
        """Read assignments; clients share the tensors of a file. Raises IntegrityError if a file is missing, damaged or
        not `expected`."""
        folder = f"{round_folder(round, evaluates)}orders/"

        def read(client: int) -> Order:
            name = f"{folder}{client}.json"
            if self.expected is None:
                value = self.store.get(name)
            else:
                value = run_files.read_verified(self.store, name, self.expected.get(client))
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
        """`known`: the tensors of each file."""
        try:
            spec = SubmodelSpec.from_json(order.spec)
        except ModelError as error:
            raise IntegrityError(f"{name} is not an assignment: {error}") from error
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
            raise IntegrityError(f"{name} is not an assignment: {error}") from error

    def outcome_keys(self, round: int, client: int, evaluates: bool = False) -> list[str]:
        """The keys that a client writes."""
        base = f"{round_folder(round, evaluates)}{self._results}/{client}"
        return [f"{base}.safetensors", f"{base}.json"]

    def put_outcome(self, plan: RoundPlan, outcome: Outcome) -> None:
        """Write the payload first and the manifest last."""
        base, order = f"{_folder(plan)}{self._results}/{outcome.client}", plan.order_of[outcome.client]
        manifest, value = packed(outcome, order, self.lengths.get(f"{base}.safetensors"))
        if value is not None:
            self.store.put(f"{base}.safetensors", value)
        manifest = signed(manifest, None if self.key is None else self.key(order))
        text = manifest.model_dump_json().encode()
        length = self.lengths.get(f"{base}.json", 0)
        if length > (most := manifest_bytes(order)):
            raise ClientError(f"the upload of a manifest must have at most {most} bytes, got {length}")
        self.store.put(f"{base}.json", text.ljust(length))
        self.seen[plan.round, outcome.client] = said_of(manifest), _metrics(manifest)
        self._remember(plan, outcome)

    def answered(self, round: int, evaluates: bool = False) -> set[int]:
        """Return the clients with a manifest, good or bad."""
        folder = f"{round_folder(round, evaluates)}{self._results}/"
        found = re.compile(f"{re.escape(folder)}(0|[1-9][0-9]*)\\.json")
        return {int(match[1]) for match in map(found.fullmatch, self.store.list(folder)) if match}

    def finished(self, plan: RoundPlan) -> Iterator[Outcome]:
        """Yield the valid outcomes in the store. Delete the invalid ones, which clients with other keys may have
        written; these clients must be asked again."""
        for client in sorted(self.answered(plan.round, plan.evaluates) & {o.client for o in plan.orders}):
            try:
                outcome = self._read(plan, client)
            except (Rejected, IntegrityError) as error:
                log.warning("round %d, client %d: %s; asking again", plan.round + 1, client, error)
                self.store.delete(*reversed(self.outcome_keys(plan.round, client, plan.evaluates)))
            else:
                yield outcome

    def receive(self, plan: RoundPlan, client: int) -> Outcome:
        """Return a client's result. A result that fails validation is a failure at the stage `validate`."""
        try:
            return self._read(plan, client)
        except Rejected as error:
            return ClientFailure(plan.round, client, "validate", str(error), error.code)

    def held_by(self, plan: RoundPlan, clients: Iterable[int]) -> int:
        """Return the bytes that reading the largest of these results takes: its file and its tensors."""
        state = {} if self.rules is None else self.rules.client_state
        orders = {id(order.payload): order for order in (plan.order_of[client] for client in clients)}.values()
        sizes = (max(payload_bytes(o, state), 0 if o.evaluates else tensor_bytes(o.payload)) for o in orders)
        return 2 * max(sizes, default=0)

    def outcome(self, plan: RoundPlan, client: int, known: Known | None = None) -> Outcome:
        """Return the stored outcome. Raises IntegrityError if it is missing, damaged or not the `known` one."""
        try:
            return self._read(plan, client, known)
        except (Rejected, IntegrityError) as error:
            name = self.store.uri(f"{_folder(plan)}{self._results}/{client}.safetensors")
            raise IntegrityError(f"{name}: the update of client {client} is damaged ({error}). {WAY_OUT}") from error

    def _read(self, plan: RoundPlan, client: int, known: Known | None = None) -> Outcome:
        """Reject a worker's files if they cannot be read although the coordinator's own files can: the worker may have
        changed their owner, encrypted them with a key of its own, or made the server's response unreadable."""
        try:
            return self._read_files(plan, client, known)
        except EnvironmentFailure:
            if not self.lease:
                raise
            self._see_own(plan)
        try:
            return self._read_files(plan, client, known)
        except EnvironmentFailure as error:
            self._see_own(plan)
            raise Rejected("unreadable", f"{error} (the coordinator's own files can be read)") from error

    def _see_own(self, plan: RoundPlan) -> None:
        """Raise EnvironmentFailure if the store does not answer at all."""
        with suppress(IntegrityError):  # a missing or damaged file proves that the store answers
            self.store.get(f"{_folder(plan)}plan.json")

    def _read_files(self, plan: RoundPlan, client: int, known: Known | None) -> Outcome:
        order, base = plan.order_of[client], f"{_folder(plan)}{self._results}/{client}"
        key, said = None if self.key is None else self.key(order), None if known is None else known[0]
        manifest = manifest_of(lambda limit: self.store.get(f"{base}.json", limit), order, key, bool(self.lease), said)
        self.seen[plan.round, client] = said_of(manifest), _metrics(manifest)
        if known is not None and known[1] is not None:
            manifest = manifest.model_copy(update={"metrics": known[1]})
        found = update_of(manifest, lambda limit: self.store.get(f"{base}.safetensors", limit), order, self.rules)
        self._remember(plan, found)
        return found

    def _remember(self, plan: RoundPlan, outcome: Outcome) -> None:
        self.failed.pop((plan.round, outcome.client), None)
        if isinstance(outcome, ClientFailure):
            self.failed[plan.round, outcome.client] = outcome


def _folder(plan: RoundPlan) -> str:
    return round_folder(plan.round, plan.evaluates)


def _names(header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in header.items()}


def _header(names: Mapping[str, tuple[str, tuple[int, ...]]]) -> Header:
    found: Header = {}
    for name, (type_name, shape) in names.items():
        dtype = getattr(torch, type_name, None)
        if not isinstance(dtype, torch.dtype):
            raise IntegrityError(f"{name} has the type {type_name!r}, which torch does not have")
        found[name] = dtype, tuple(shape)
    return found


def _metrics(manifest: Manifest) -> dict[str, float] | None:
    return None if manifest.spec is None else dict(manifest.metrics)
