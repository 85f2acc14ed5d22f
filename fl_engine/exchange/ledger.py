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
    metrics/00000-00099-<sha256>.json   the measurements of rounds whose folders are gone

A round is over when its COMMITTED exists; everything before that is done again, or adopted. Committing round r
deletes what rounds up to r left (plans, updates) and the states before the previous commit, and packs the measurements
of PACKED commits into one file: however many rounds a run has, its files stay some hundreds.

Where several machines can reach the ledger, its coordinator holds a lease. State files then carry its number in front
of their names: one that was replaced without knowing it damages nothing that its successor has committed.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fl_engine.core.errors import EnvironmentFailure, IntegrityError, ModelError, Stopped, brief
from fl_engine.core.types import ClientFailure, Outcome, Params, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.exchange.acceptance import Moved
from fl_engine.exchange.updates import KeyOf, Manifest, Rejected, Rules, manifest_of, packed, said_of, signed, update_of
from fl_engine.storage.lease import Lease
from fl_engine.storage.store import Store, canonical, decode, encode, sha256

log = logging.getLogger("flexfleet")

R = TypeVar("R", bound=BaseModel)

FILE = re.compile(r"rounds/([0-9]{5,})/(.+)", re.DOTALL)
WRITER = re.compile(r"[1-9][0-9]{0,17}")
PACK = re.compile(r"metrics/([0-9]{5,})-([0-9]{5,})-[0-9a-f]{16}\.json")

WAY_OUT = (
    "To go on from the last good commit, resume with --discard-damaged: the rounds after it are computed again"
)
STATE_FILES = ("state.safetensors", "state.json", "metrics.json")
PACKED = 100
"""So many commits' measurements go into one file, or some more."""
LOOK_EVERY = 10
"""After so many commits it is looked whether there are enough."""
LINES = 2000
"""A packed file keeps so many lines about single clients; where there are more, those of every n-th round."""


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
    round: int
    accepted: dict[int, str]
    """Clients, and a checksum of what was seen of each: an answer that is replaced later does not count. (One that a
    client gives again, because its pod was started again, is the same but for its seconds.)"""
    refused: dict[int, tuple[str, str]] = {}
    """Clients whose updates are not merged, though nothing is wrong with the files: at which stage, and why."""
    metrics: dict[int, dict[str, float]] = {}
    """Of each update, as they were read: what a later answer says does not count."""
    moved: dict[int, Moved] = {}
    """How far each update moved, the refused ones too, where it was looked at."""
    checksum: str = ""
    """Of all the rest."""

    def sealed(self) -> Closed:
        unsaid = {name for name in ("metrics", "moved") if not getattr(self, name)}  # older records have none
        said = canonical(self.model_dump(exclude={"checksum", *unsaid}))
        return self.model_copy(update={"checksum": sha256(said)})


TensorFile = Annotated[str, Field(pattern=r"^[0-9a-f]{64}\.safetensors$")]


class Order(_Record):
    """A `WorkOrder`. `payload` and `memory` name the files beside it with the tensors; None: there are none."""

    round: int
    client: int
    spec: dict[str, Any]
    seed: int
    hints: dict[str, Any]
    payload: TensorFile | None
    memory: TensorFile | None


class Ledger:
    """`rules` say what an update may be, and `key` with which key a client signs its manifest; None: not checked, not
    signed (clients that are this very process). `own` is what the coordinator signs with. `lease`: None where nobody
    else can reach the store. `lengths`: keys that the store takes at one length alone, in bytes (see `s3.Upload`)."""

    def __init__(
        self,
        store: Store,
        keep_every: int | None = None,
        rules: Rules | None = None,
        key: KeyOf | None = None,
        own: KeyOf | None = None,
        lease: Lease | None = None,
        lengths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.store = store
        self.keep_every = keep_every
        self.rules = rules
        self.key = key
        self.own = own
        self.lease = lease
        self.lengths = dict(lengths)
        self._here: set[int] = set()
        """Rounds committed by this object: a listing that does not show them yet is wrong."""
        self._seen: dict[tuple[int, int], tuple[str, dict[str, float] | None]] = {}
        """By round and client: what `Closed` keeps of an answer; the metrics are an update's."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lease": None}  # the coordinator's alone, not its workers'

    # ------------------------------------------------------------------------------------------ commits
    def commits(self) -> list[int]:
        """Committed rounds, ascending."""
        return sorted({round for round, name, _ in self._files() if _plain(name) == "COMMITTED"})

    def _files(self) -> list[tuple[int, str, str]]:
        """(round, name, key) of each file of a round. What else lies there is nobody's."""
        found = []
        for key in self.store.list("rounds/"):
            match = FILE.fullmatch(key)
            if match and key.startswith(_folder(int(match[1]))):
                found.append((int(match[1]), match[2], key))
        return found

    def commit(self, round: int, tensors: Params, rest: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Makes `round` the last finished one, then removes what is no longer needed. Raises Stopped where another
        coordinator has taken over."""
        self.check_lease()
        files = {
            self._own("state.safetensors"): encode(tensors),
            self._own("state.json"): canonical(rest),
            self._own("metrics.json"): canonical([row.model_dump(mode="json") for row in rows]),
        }
        for name, value in files.items():
            self.store.put(f"{_folder(round)}{name}", value)
        sums = Committed(round=round, files={name: sha256(value) for name, value in files.items()})
        mark, value = f"{_folder(round)}{self._own('COMMITTED')}", sums.model_dump_json().encode()
        # One that is there already is this very one, whose answer was lost; or somebody else's.
        if not self.store.create(mark, value) and self.store.get(mark) != value:
            raise Stopped(f"{self.store.uri(mark)}: another coordinator has committed this round. Nothing is lost")
        self._here.add(round)
        self.check_lease()
        self._prune(round)
        if len(self._here) % LOOK_EVERY == 0:
            self._pack()

    def _own(self, name: str) -> str:
        """A file's name in this coordinator's hand."""
        return name if self.lease is None else f"{self.lease.number}-{name}"

    def _may_delete(self, name: str) -> bool:
        """Not what a coordinator has written that has taken over since."""
        return self.lease is None or _writer(name) <= self.lease.number

    def check_lease(self) -> None:
        """Raises Stopped where another coordinator has taken over."""
        if self.lease is not None:
            self.lease.check()

    def read(self, round: int) -> tuple[Params, dict[str, Any]]:
        """The state after a committed round. Raises IntegrityError naming the file that is not as committed."""
        tensors = self._committed(round, "state.safetensors")
        rest = _json(self._committed(round, "state.json"), self.store.uri(f"{_folder(round)}state.json"))
        self._committed(round, "metrics.json")
        return decode(tensors, self.store.uri(f"{_folder(round)}state.safetensors")), rest

    def rows(self) -> list[Row]:
        """Every committed round's measurements, in round order. Raises IntegrityError naming a damaged file, or the
        rounds that are missing."""
        commits = self.commits()
        rows: list[Row] = []
        for first, last, key in self._packs():
            if commits and first <= commits[-1]:
                rows += [row for row in self._unpacked(key) if len(rows) <= row.round <= commits[-1]]
                _check_whole(rows, min(last, commits[-1]), self.store.uri("metrics"))
        for round in commits:
            if round >= len(rows):
                rows += [row for row in self._rows(round) if row.round >= len(rows)]
                _check_whole(rows, round, self.store.uri(_folder(round)))
        return rows

    def last_good(self) -> int | None:
        """The newest committed round whose state is intact, and all measurements up to it; None: there is none."""
        good, done = None, 0
        commits = self.commits()
        for first, last, key in self._packs():
            try:
                if first > done or not commits or last > commits[-1]:
                    break
                self._unpacked(key)
            except IntegrityError:
                break
            done = max(done, last + 1)
        for round in commits:
            if round >= done:
                try:
                    _check_whole([*range(done), *self._rows(round)], round, "")
                except IntegrityError:
                    return good
                done = round + 1
            try:
                self.read(round)
            except IntegrityError:
                continue  # damaged, or removed by retention
            good = round
        return good

    def _rows(self, round: int) -> list[Row]:
        name = self.store.uri(f"{_folder(round)}metrics.json")
        return _rows_of(self._committed(round, "metrics.json"), name)

    # -------------------------------------------------------------------------------------------- packed
    def _packs(self) -> list[tuple[int, int, str]]:
        """(first round, last round, key), ascending."""
        matches = ((PACK.fullmatch(key), key) for key in self.store.list("metrics/"))
        return sorted((int(match[1]), int(match[2]), key) for match, key in matches if match)

    def _unpacked(self, key: str) -> list[Row]:
        try:
            value = self.store.get(key)
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if key.removesuffix(".json").rpartition("-")[2] != sha256(value)[:16]:
            raise IntegrityError(f"{self.store.uri(key)} is damaged: its name is not its sha256. {WAY_OUT}")
        return _rows_of(value, self.store.uri(key))

    def _pack(self) -> None:
        """Packs commits that are older than the last two, when there are enough of them."""
        done = max((last + 1 for _, last, _ in self._packs()), default=0)
        old = [round for round in self.commits()[:-2] if round >= done]
        if len(old) >= PACKED:
            rows = [row for round in old for row in self._rows(round) if row.round >= done]
            self._put_pack(_thinned(rows))
            self._prune(old[-1])

    def _put_pack(self, rows: Sequence[Row]) -> None:
        if rows:
            value = canonical([row.model_dump(mode="json") for row in rows])
            name = f"{rows[0].round:05d}-{rows[-1].round:05d}-{sha256(value)[:16]}.json"
            self.store.put(f"metrics/{name}", value)

    def _cut_packs(self, round: int, damaged: bool = False) -> None:
        """Forgets packed measurements after `round`; `damaged`: and those that cannot be read."""
        for first, last, key in self._packs():
            if first > round:
                self.store.delete(key)
            elif last > round or damaged:
                try:
                    rows = self._unpacked(key)
                except IntegrityError:
                    if not damaged:
                        raise
                    rows = []
                if last > round or not rows:
                    self._put_pack([row for row in rows if row.round <= round])
                    self.store.delete(key)

    # ------------------------------------------------------------------------------------------ checked files
    def _mark_key(self, round: int) -> str:
        """Of several coordinators' marks that of the last."""
        folder = _folder(round)
        names = [key.removeprefix(folder) for key in self.store.list(folder)]
        return folder + max((n for n in names if _plain(n) == "COMMITTED"), key=_writer, default="COMMITTED")

    def _mark(self, mark: str, round: int) -> Committed:
        found = _parse(Committed, self.store.get(mark), self.store.uri(mark))
        if found.round != round:
            raise IntegrityError(f"{self.store.uri(mark)} is of round {found.round}: folders were exchanged")
        return found

    def _committed(self, round: int, name: str) -> bytes:
        """A file of a committed round, checked against the checksum that was committed with it."""
        mark = self._mark_key(round)
        try:
            files = self._mark(mark, round).files
            name = next((found for found in files if _plain(found) == name), name)
            value = self.store.get(f"{_folder(round)}{name}")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if sha256(value) != files.get(name):
            raise IntegrityError(
                f"{self.store.uri(_folder(round) + name)} is damaged: its sha256 is {sha256(value)[:16]}..., "
                f"{self.store.uri(mark)} says {str(files.get(name))[:16]}... . {WAY_OUT}"
            )
        return value

    def discard_after(self, round: int | None) -> None:
        """Forgets every round after `round` (None: all), and packed measurements that are damaged."""
        self.check_lease()
        first = 0 if round is None else round + 1
        gone = [(name, key) for round, name, key in self._files() if round >= first and self._may_delete(name)]
        keys, marks = [key for _, key in gone], [key for name, key in gone if _plain(name) == "COMMITTED"]
        self.store.delete(*reversed(marks))  # from the end, so that no kill leaves a gap
        self.store.delete(*(k for k in keys if k not in marks))
        self._here = {r for r in self._here if r < first}
        self._cut_packs(first - 1, damaged=True)

    def tidy(self) -> None:
        """Removes what a kill left behind, a started round's updates excepted: they are adopted."""
        for prefix in ("rounds/", "metrics/"):
            self.store.sweep(prefix)
        commits = self.commits()
        self._cut_packs(commits[-1] if commits else -1)
        if commits:
            self._prune(commits[-1])
            self._pack()

    def _prune(self, round: int) -> None:
        files = self._files()
        marked = {found for found, name, _ in files if _plain(name) == "COMMITTED"} | self._here
        commits = sorted(r for r in marked if r <= round)
        if not commits:
            return
        packed = max((last for _, last, _ in self._packs()), default=-1)
        gone = []
        for folder, own, key in files:
            name = _plain(own)
            unfinished = folder <= round and (folder not in commits or name not in (*STATE_FILES, "COMMITTED"))
            kept = self.keep_every is not None and (folder + 1) % self.keep_every == 0
            old = folder < commits[-2:][0] and not kept
            done_with = old and (name in ("state.safetensors", "state.json") or folder <= packed)
            if (unfinished or done_with) and self._may_delete(own):
                gone.append(key)
        # The mark first: without it, what is left of a folder is nothing that anybody reads.
        self.store.delete(*sorted(gone, key=lambda key: not key.endswith("COMMITTED")))

    # -------------------------------------------------------------------------------------- inside a round
    def open_round(self, plan: RoundPlan) -> None:
        orders = [
            {"client": o.client, "spec": o.spec.to_json(), "seed": o.seed, "hints": dict(o.hints)} for o in plan.orders
        ]
        self.store.put(f"{_folder(plan.round)}plan.json", canonical({"round": plan.round, "orders": orders}))

    def put_orders(self, plan: RoundPlan) -> dict[int, list[str]]:
        """What clients in other processes read: by client, the keys. Tensors are written once, however many clients are
        sent the same."""
        keys: dict[int, list[str]] = {}
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
            folder = f"{_folder(plan.round)}orders/"
            self.store.put(f"{folder}{o.client}.json", order.model_dump_json().encode())
            files = (f"{o.client}.json", order.payload, order.memory)
            keys[o.client] = [folder + file for file in files if file is not None]
        return keys

    def ordered(self, round: int) -> int:
        """How many orders were written."""
        return sum(key.endswith(".json") for key in self.store.list(f"{_folder(round)}orders/"))

    def order(self, round: int, client: int) -> WorkOrder:
        """Raises IntegrityError where the order, or what it sends, is missing or damaged."""
        folder = f"{_folder(round)}orders/"
        name = f"{folder}{client}.json"
        order = _parse(Order, self.store.get(name), self.store.uri(name))
        if (order.round, order.client) != (round, client):
            raise IntegrityError(f"{self.store.uri(name)} is of round {order.round}, client {order.client}")
        try:
            spec = SubmodelSpec.from_json(order.spec)
        except ModelError as error:
            raise IntegrityError(f"{self.store.uri(name)} is no order: {error}") from error

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
            spec=spec,
            payload=get(order.payload),
            seed=order.seed,
            hints=order.hints,
            memory=get(order.memory),
        )

    def outcome_keys(self, round: int, client: int) -> list[str]:
        """What a client writes."""
        return [f"{_folder(round)}updates/{client}.{kind}" for kind in ("safetensors", "json")]

    def put_outcome(self, plan: RoundPlan, outcome: Outcome, spoil: Callable[[bytes], bytes] = bytes) -> None:
        """The payload first, the manifest last: it vouches for its file. `spoil` damages the file on the way."""
        base, order = f"{_folder(plan.round)}updates/{outcome.client}", plan.order_of[outcome.client]
        manifest, value = packed(outcome, order, self.lengths.get(f"{base}.safetensors"))
        if value is not None:
            self.store.put(f"{base}.safetensors", spoil(value))
        key = self.own or self.key
        manifest = signed(manifest, None if key is None else key(order))
        text = manifest.model_dump_json().encode()
        self.store.put(f"{base}.json", text.ljust(self.lengths.get(f"{base}.json", 0)))
        self._seen[plan.round, outcome.client] = said_of(manifest), _metrics(manifest)

    def answered(self, round: int) -> set[int]:
        """Clients that have left a manifest, good or bad."""
        folder = f"{_folder(round)}updates/"
        found = re.compile(f"{re.escape(folder)}(0|[1-9][0-9]*)\\.json")
        return {int(match[1]) for match in map(found.fullmatch, self.store.list(folder)) if match}

    def finished(self, plan: RoundPlan) -> Iterator[Outcome]:
        """Outcomes that are there and good; the other clients of this plan are to be asked (again), and what they left
        is deleted: clients with other keys, or none, may have been asked before."""
        for client in sorted(self.answered(plan.round) & {o.client for o in plan.orders}):
            try:
                outcome = self._read(plan, client)
            except (Rejected, IntegrityError) as error:
                log.warning("round %d, client %d: %s; asking again", plan.round + 1, client, error)
                self.store.delete(*reversed(self.outcome_keys(plan.round, client)))
            else:
                yield outcome

    def receive(self, plan: RoundPlan, client: int) -> Outcome:
        """A client's answer; one that is not to be trusted is a failure at the stage `validate`."""
        try:
            return self._read(plan, client)
        except Rejected as error:
            return ClientFailure(plan.round, client, "validate", str(error))

    def outcome(self, plan: RoundPlan, client: int, closed: Closed | None = None) -> Outcome:
        """With `closed`, what the round was closed with. Raises IntegrityError where the stored outcome is missing or
        damaged."""
        try:
            return self._read(plan, client, closed)
        except (Rejected, IntegrityError) as error:
            name = self.store.uri(f"{_folder(plan.round)}updates/{client}.safetensors")
            raise IntegrityError(f"{name}: the update of client {client} is not whole ({error}). {WAY_OUT}") from error

    def _read(self, plan: RoundPlan, client: int, closed: Closed | None = None) -> Outcome:
        """Where this client's files cannot be read and the coordinator's own can, it is the client's doing: it may have
        given them away, encrypted them with a key of its own, or made the server's answer one that nobody can read."""
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
        with suppress(IntegrityError):  # says of this file that it is missing, or damaged: it answers
            self.store.get(f"{_folder(plan.round)}plan.json")

    def _read_files(self, plan: RoundPlan, client: int, closed: Closed | None) -> Outcome:
        order, base = plan.order_of[client], f"{_folder(plan.round)}updates/{client}"
        client_key, own_key = (None if key is None else key(order) for key in (self.key, self.own))
        said = None if closed is None else closed.accepted[client]
        manifest = manifest_of(lambda limit: self.store.get(f"{base}.json", limit), order, client_key, own_key, said)
        self._seen[plan.round, client] = said_of(manifest), _metrics(manifest)
        if closed is not None and client in closed.metrics:
            manifest = manifest.model_copy(update={"metrics": closed.metrics[client]})
        return update_of(manifest, lambda limit: self.store.get(f"{base}.safetensors", limit), order, self.rules)

    def accepted(self, plan: RoundPlan, client: int, closed: Closed) -> Outcome:
        """The outcome that the round was closed with. Where clients hold keys and one has replaced or damaged its own
        since, a failure; without keys it is this machine's file that is damaged: raises IntegrityError."""
        if client in closed.refused:
            return ClientFailure(plan.round, client, *closed.refused[client])
        try:
            return self.outcome(plan, client, closed)
        except IntegrityError:
            if self.key is None:
                raise
            return ClientFailure(plan.round, client, "validate", "order: replaced after the round was closed")

    def close(
        self,
        plan: RoundPlan,
        clients: Sequence[int],
        refused: Mapping[int, ClientFailure] = MappingProxyType({}),
        moved: Mapping[int, Moved] = MappingProxyType({}),
    ) -> Closed:
        """Freezes the set that the merge uses, as it was read or written here: the outcomes of `clients`, some of them
        refused."""
        why = {client: (failure.stage, failure.reason) for client, failure in sorted(refused.items())}
        seen = {client: self._seen[plan.round, client] for client in sorted(clients)}
        self._seen.clear()
        closed = Closed(
            round=plan.round,
            accepted={client: said for client, (said, _) in seen.items()},
            refused=why,
            metrics={client: metrics for client, (_, metrics) in seen.items() if metrics is not None},
            moved=dict(sorted(moved.items())),
        ).sealed()
        self.store.put(f"{_folder(plan.round)}closed.json", closed.model_dump_json().encode())
        return closed

    def closed(self, plan: RoundPlan) -> Closed | None:
        """What the round was closed with; None: it was not."""
        key = f"{_folder(plan.round)}closed.json"
        if key not in self.store.list(key):
            return None
        try:
            found = _parse(Closed, self.store.get(key), self.store.uri(key))
            if found != found.sealed():
                raise IntegrityError(f"{self.store.uri(key)} is damaged: its checksum is another")
            others = (found.refused.keys() | found.metrics.keys() | found.moved.keys()) - found.accepted.keys()
            if found.round != plan.round or others or found.accepted.keys() != plan.order_of.keys():
                raise IntegrityError(f"{self.store.uri(key)} is of another round, or of other clients")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        return found


def _plain(name: str) -> str:
    """A state file's or a mark's name without its writer's number."""
    rest = name.partition("-")[2]
    return rest if _writer(name) else name


def _writer(name: str) -> int:
    """The number of the coordinator that wrote a state file or a mark; 0: it says none."""
    number, _, rest = name.partition("-")
    return int(number) if WRITER.fullmatch(number) and rest in (*STATE_FILES, "COMMITTED") else 0


def _check_whole(rows: Sequence[object], last: int, name: str) -> None:
    """Raises IntegrityError unless these are as many rounds as there are from 0 to `last`."""
    if rows and len(rows) != last + 1:
        raise IntegrityError(f"{name}: the measurements of {last + 1 - len(rows)} rounds are missing. {WAY_OUT}")


def _thinned(rows: Sequence[Row]) -> list[Row]:
    every = -(-sum(len(row.clients) for row in rows) // LINES) or 1
    return [row if i % every == 0 else row.model_copy(update={"clients": ()}) for i, row in enumerate(rows)]


def _folder(round: int) -> str:
    return f"rounds/{round:05d}/"


def _metrics(manifest: Manifest) -> dict[str, float] | None:
    return None if manifest.spec is None else dict(manifest.metrics)


def _parse(kind: type[R], value: bytes, name: str) -> R:
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise IntegrityError(f"{name} is not a valid {kind.__name__} record: {brief(error)}") from error


def _json(value: bytes, name: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{name} is no JSON: {error}. {WAY_OUT}") from error


def _rows_of(value: bytes, name: str) -> list[Row]:
    rows = _json(value, name)
    if not isinstance(rows, list):
        raise IntegrityError(f"{name} is no list of rounds. {WAY_OUT}")
    return [_parse(Row, json.dumps(row).encode(), name) for row in rows]
