"""Read and write the files of a round, which contain assignments and results.

    `rounds/00012/plan.json`: The sub-model of each selected client.
    `rounds/00012/assignments/3.json`: The assignment for client 3 without tensors, if clients run in other processes.
    `rounds/00012/updates/3.safetensors`: The update from client 3.
    `rounds/00012/updates/3.json`: The manifest of the update, which is written last.
    `rounds/00012/evaluation/`: The plan, assignments and results of the round's evaluation at the clients.

The coordinator deletes all these files after the round is committed (`storage.checkpoints`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field

from fl_engine.codecs import codecs_of, sections_of
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure, IntegrityError, ModelError
from fl_engine.core.fields import Index
from fl_engine.core.records import Record, parsed
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, Params, RoundPlan, SubmodelSpec
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import (
    KeyOf,
    Rejected,
    ResultManifest,
    content_sum,
    manifest_bytes,
    pack_result,
    read_manifest,
    sign,
)
from fl_engine.exchange.updates import Rules, payload_bytes, read_update
from fl_engine.storage import run_files
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_files import WAY_OUT, round_folder
from fl_engine.storage.store import Store, canonical, laid_out, sha256, tensor_bytes

log = logging.getLogger("flexfleet")


class Known(NamedTuple):
    """Checksum and metrics of a result that was read or written."""

    content: str
    """Checksum of the manifest (`content_sum`)."""
    metrics: dict[str, float] | None
    """Metrics of an update; None for a failure."""
    failure: ClientFailure | None = None


SAME = ("round", "client", "seed", "level", "hints", "evaluates")
"""Fields of an assignment that are stored without conversion."""
TensorFile = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.safetensors$")]


class StoredAssignment(Record):
    round: int
    client: int
    spec: dict[str, Any]
    seed: int
    level: int
    hints: dict[str, Any]
    payload: TensorFile | None
    """Name of the weights file in the same folder."""
    memory: TensorFile | None
    """Name of the file with other tensors, for example the client's state."""
    codecs: dict[str, dict[str, Any]] | None = None
    """Codecs in the format of the configuration; None if no tensors are encoded."""
    header: dict[str, tuple[str, tuple[Index, ...]]] = Field(default={})
    """Types and shapes of the decoded weights; empty without a codec."""
    evaluates: bool = False
    most: Index | None = None
    """Size of the larger file (`payload` or `memory`) in bytes. Clients read at most this many bytes per file."""


@dataclass(eq=False)
class Mailbox:
    """Reads and writes the files of rounds."""

    store: Store
    rules: Rules | None = None
    """Rules for valid updates; None if updates need no checks, because clients run on this machine."""
    key: KeyOf | None = None
    """Function that returns the signing key; None if results are not signed."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Map a store key to the required length of its upload in bytes (`urls.Upload`)."""
    expected: Mapping[int, str] | None = None
    """Map each client to its assignment's checksum (`AssignmentMessage.assignments`); None if the store is trusted."""
    lease: str = ""
    """ID of the worker's lease; empty for results that the coordinator writes."""
    assignment_sums: dict[int, str] = field(default_factory=dict)
    """Map each client to the checksum of the last assignment that was written for the client."""
    seen: dict[tuple[int, int], Known] = field(default_factory=dict)
    """Map (round, client) to the last result that was read or written."""

    @property
    def _results(self) -> str:
        return f"leases/{self.lease}" if self.lease else "updates"

    def open_round(self, plan: RoundPlan) -> None:
        assignments = [
            {"client": o.client, "level": o.level, "spec": o.spec.to_json(), "seed": o.seed, "hints": dict(o.hints)}
            for o in plan.assignments
        ]
        self.store.put(f"{_folder(plan)}plan.json", canonical({"round": plan.round, "assignments": assignments}))

    def put_assignments(self, plan: RoundPlan) -> dict[int, list[str]]:
        """Write assignments for other processes. Return a mapping of each client to the store keys of its files."""
        keys: dict[int, list[str]] = {}
        files: dict[tuple[int, ...], tuple[str, int]] = {}
        """Map the `id()` of each tensor in a file to a tuple (file name, size in bytes)."""
        folder = f"{_folder(plan)}assignments/"

        def same(tensors: Params) -> tuple[int, ...]:
            return tuple(id(tensor) for tensor in tensors.values())

        def put_tensors(tensors: Params) -> None:
            value = laid_out(tensors)
            name = f"{sha256(value)}.safetensors"
            files[same(tensors)] = name, len(value)
            self.store.put(folder + name, value)

        def put_assignment(o: Assignment) -> None:
            payload, memory = (files[same(t)] if t else (None, 0) for t in (o.travels, o.memory))
            header = {} if o.encoded is None else coding.header_of(o.payload)
            assignment = StoredAssignment(
                **{name: getattr(o, name) for name in SAME},
                spec=o.spec.to_json(),
                payload=payload[0],
                memory=memory[0],
                codecs=None if o.codecs is None else sections_of(o.codecs),
                header={name: (str(dtype).removeprefix("torch."), shape) for name, (dtype, shape) in header.items()},
                most=max(payload[1], memory[1]),
            )
            value = assignment.model_dump_json().encode()
            self.store.put(f"{folder}{o.client}.json", value)
            self.assignment_sums[o.client] = run_files.sum_of(value)
            names = (f"{o.client}.json", assignment.payload, assignment.memory)
            keys[o.client] = [folder + name for name in names if name is not None]

        distinct = {same(t): t for o in plan.assignments for t in (o.travels, o.memory) if t}.values()
        list(overlapped(self.store, max(map(tensor_bytes, distinct), default=0), put_tensors, distinct))
        list(overlapped(self.store, 0, put_assignment, plan.assignments))
        return {assignment.client: keys[assignment.client] for assignment in plan.assignments}

    def count_assignments(self, round: int, evaluates: bool = False) -> int:
        """Return the number of stored assignments of the round."""
        return sum(key.endswith(".json") for key in self.store.list(f"{round_folder(round, evaluates)}assignments/"))

    def assignments(self, round: int, clients: Iterable[int], evaluates: bool = False) -> dict[int, Assignment]:
        """Read assignments. A tensor file that several assignments share is read only once. Raises IntegrityError if a
        file is missing or damaged, or if an assignment's checksum differs from the checksum in `expected`."""
        folder = f"{round_folder(round, evaluates)}assignments/"

        def read(client: int) -> StoredAssignment:
            name = f"{folder}{client}.json"
            if self.expected is None:
                value = self.store.get(name)
            else:
                value = run_files.read_verified(self.store, name, self.expected.get(client))
            assignment = parsed(StoredAssignment, value, self.store.uri(name))
            if (assignment.round, assignment.client, assignment.evaluates) != (round, client, evaluates):
                raise IntegrityError(f"{self.store.uri(name)} must be an assignment for this round and client")
            return assignment

        found = list(overlapped(self.store, 0, read, clients))
        files = {file: o.most for o in found for file in (o.payload, o.memory) if file is not None}
        known = {file: run_files.read_tensors(self.store, folder + file, most) for file, most in files.items()}
        return {o.client: self._assignment(o, known, self.store.uri(f"{folder}{o.client}.json")) for o in found}

    @staticmethod
    def _assignment(stored: StoredAssignment, known: Mapping[str, Params], name: str) -> Assignment:
        """Convert a stored assignment. `known` maps file names to the tensors in the files."""
        payload, memory = ({} if file is None else known[file] for file in (stored.payload, stored.memory))
        try:
            spec = SubmodelSpec.from_json(stored.spec)
            codecs = None if stored.codecs is None else codecs_of(stored.codecs)
            if codecs is not None and codecs.down is not None:
                header = {name: (getattr(torch, dtype), shape) for name, (dtype, shape) in stored.header.items()}
                payload = coding.decode(codecs.down, payload, header)
        except (ModelError, ConfigError, IntegrityError, AttributeError) as error:
            raise IntegrityError(f"{name} must be a valid assignment: {error}") from error
        same = {name: getattr(stored, name) for name in SAME}
        return Assignment(**same, spec=spec, payload=payload, memory=memory, codecs=codecs)

    def result_keys(self, round: int, client: int, evaluates: bool = False) -> list[str]:
        """Return the store keys of a result's files."""
        base = f"{round_folder(round, evaluates)}{self._results}/{client}"
        return [f"{base}.safetensors", f"{base}.json"]

    def put_result(self, plan: RoundPlan, result: ClientResult) -> None:
        """Write a result. The manifest is written last."""
        base, assignment = f"{_folder(plan)}{self._results}/{result.client}", plan.assignment_of[result.client]
        manifest, value = pack_result(result, assignment, self.lengths.get(f"{base}.safetensors"))
        if value is not None:
            self.store.put(f"{base}.safetensors", value)
        manifest = sign(manifest, None if self.key is None else self.key(assignment))
        text = manifest.model_dump_json().encode()
        length = self.lengths.get(f"{base}.json", 0)
        if length > (most := manifest_bytes(assignment)):
            raise ClientError(f"a manifest must be at most {most} bytes long, but the upload URL requires {length}")
        self.store.put(f"{base}.json", text.ljust(length))
        self._remember(manifest, result)

    def clients_with_results(self, round: int, evaluates: bool = False) -> set[int]:
        """Return all clients that have a manifest, even if the manifest is not valid."""
        folder = f"{round_folder(round, evaluates)}{self._results}/"
        found = re.compile(f"{re.escape(folder)}(0|[1-9][0-9]*)\\.json")
        return {int(match[1]) for match in map(found.fullmatch, self.store.list(folder)) if match}

    def finished(self, plan: RoundPlan) -> Iterator[ClientResult]:
        """Yield the valid results in the store. Delete invalid results, for example results that were signed with
        another key. The caller must repeat the assignments of clients whose results were deleted."""
        stored = self.clients_with_results(plan.round, plan.evaluates)
        for client in sorted(stored & plan.assignment_of.keys()):
            try:
                result = self._read(plan, client)
            except (Rejected, IntegrityError) as error:
                log.warning("round %d, client %d: %s; sending the assignment again", plan.round + 1, client, error)
                self.store.delete(*reversed(self.result_keys(plan.round, client, plan.evaluates)))
            else:
                yield result

    def receive(self, plan: RoundPlan, client: int) -> ClientResult:
        """Return a client's result. An invalid result becomes a failure at the stage `validate`."""
        try:
            return self._read(plan, client)
        except Rejected as error:
            return error.failure(plan.assignment_of[client])

    def held_by(self, plan: RoundPlan, clients: Iterable[int]) -> int:
        """Return how many bytes of memory are needed to read and decode the largest result."""
        state = {} if self.rules is None else self.rules.client_state
        distinct = {id(o.payload): o for o in map(plan.assignment_of.__getitem__, clients)}.values()
        sizes = (max(payload_bytes(o, state), 0 if o.evaluates else tensor_bytes(o.payload)) for o in distinct)
        return 2 * max(sizes, default=0)

    def result(self, plan: RoundPlan, client: int, known: Known | None = None) -> ClientResult:
        """Return a stored result. Raises IntegrityError if it is missing, damaged or different from `known`."""
        try:
            return self._read(plan, client, known)
        except (Rejected, IntegrityError) as error:
            name = self.store.uri(f"{_folder(plan)}{self._results}/{client}.safetensors")
            raise IntegrityError(f"{name}: the update of client {client} is damaged ({error}). {WAY_OUT}") from error

    def _read(self, plan: RoundPlan, client: int, known: Known | None = None) -> ClientResult:
        """Read a result. Raises Rejected if two attempts to read a worker's files fail, but the coordinator's own files
        can be read. For example, the worker may have encrypted the files or changed their owner."""
        for last in (False, True):
            try:
                return self._read_files(plan, client, known)
            except EnvironmentFailure as error:
                if not self.lease:
                    raise
                with suppress(IntegrityError):  # even a missing or damaged file shows that the store responds
                    self.store.get(f"{_folder(plan)}plan.json")
                if last:
                    raise Rejected("unreadable", f"{error} (the coordinator's own files can be read)") from error
        raise AssertionError("unreachable")

    def _read_files(self, plan: RoundPlan, client: int, known: Known | None) -> ClientResult:
        assignment, base = plan.assignment_of[client], f"{_folder(plan)}{self._results}/{client}"
        key = None if self.key is None else self.key(assignment)
        closed = None if known is None else known.content
        manifest = read_manifest(
            lambda most: self.store.get(f"{base}.json", most), assignment, key, bool(self.lease), closed
        )
        self._remember(manifest)
        if known is not None and known.metrics is not None:
            manifest = manifest.model_copy(update={"metrics": known.metrics})
        found = read_update(manifest, lambda most: self.store.get(f"{base}.safetensors", most), assignment, self.rules)
        self._remember(manifest, found)
        return found

    def _remember(self, manifest: ResultManifest, result: ClientResult | None = None) -> None:
        metrics = None if manifest.spec is None else dict(manifest.metrics)
        failure = result if isinstance(result, ClientFailure) else None
        self.seen[manifest.round, manifest.client] = Known(content_sum(manifest), metrics, failure)


def _folder(plan: RoundPlan) -> str:
    return round_folder(plan.round, plan.evaluates)
