"""What is committed of a run: what makes it resumable after a kill at any instant.

    rounds/00012/state.safetensors      the algorithm's state after the round
    rounds/00012/state.json
    rounds/00012/metrics.json           what was measured since the commit before
    rounds/00012/COMMITTED              last, with the checksums of the three files above
    metrics/00000-00099-<sha256>.json   the measurements of rounds whose folders are gone

A round is over when its COMMITTED exists. After a kill, whatever is not committed is computed again, or adopted.
Committing round r deletes what rounds up to r left (plans, orders, updates: `exchange.mailbox`) and the states before
the previous commit, and packs the measurements of PACKED commits into one file. So a run keeps a few hundred files,
however many rounds it has.

Where several machines can reach the store, the coordinator holds a lease, and the names of its state files begin with
the lease's number. A coordinator that was replaced and does not know it yet thus cannot damage what its successor has
committed.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import field_validator

from fl_engine.core.errors import IntegrityError, Stopped
from fl_engine.core.types import Params
from fl_engine.storage.lease import Lease
from fl_engine.storage.run_files import WAY_OUT, Record, json_of, parsed, round_folder
from fl_engine.storage.serialization import Value, laid_out
from fl_engine.storage.store import Store, canonical, decode, sha256

log = logging.getLogger("flexfleet")

FILE = re.compile(r"rounds/([0-9]{5,})/(.+)", re.DOTALL)
WRITER = re.compile(r"[1-9][0-9]{0,17}")
PACK = re.compile(r"metrics/([0-9]{5,})-([0-9]{5,})-[0-9a-f]{16}\.json")

STATE_FILES = ("state.safetensors", "state.json", "metrics.json")
PACKED = 100
"""A packed file holds the measurements of at least this many commits."""
LOOK_EVERY = 10
"""The number of unpacked commits is compared with PACKED once in this many commits."""
LINES = 2000
"""The most lines about single clients in a packed file; where there are more, those of every n-th round are kept."""
HELD_LINES = 10 * LINES
"""The most lines that are in memory while commits are packed, besides those of one commit."""


class Row(Record):
    """One round's measurements. `clients` has a line per order: client, sent, trained, loss, seconds, failure.

    A metric that is not finite (a model that diverged) is left out: JSON has no word for it, and no plot can show it.
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


class Committed(Record):
    round: int
    files: dict[str, str]
    """File name to sha256."""


class Checkpoints:
    """`keep_every`: keep the state of every n-th round; None: only the last two commits. `lease`: None where nobody
    else can reach the store."""

    def __init__(self, store: Store, keep_every: int | None = None, lease: Lease | None = None) -> None:
        self.store = store
        self.keep_every = keep_every
        self.lease = lease
        self._here: set[int] = set()
        """Rounds committed by this object: a listing that does not show them yet is wrong."""

    # ------------------------------------------------------------------------------------------ commits
    def commits(self) -> list[int]:
        """Committed rounds, ascending."""
        return sorted({round for round, name, _ in self._files() if _plain(name) == "COMMITTED"})

    def _files(self) -> list[tuple[int, str, str]]:
        """(round, name, key) of each file of a round. Other files in these folders are ignored."""
        found = []
        for key in self.store.list("rounds/"):
            match = FILE.fullmatch(key)
            if match and key.startswith(round_folder(int(match[1]))):
                found.append((int(match[1]), match[2], key))
        return found

    def commit(self, round: int, tensors: Params, rest: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Makes `round` the last finished one, then removes what is no longer needed. Raises Stopped where another
        coordinator has taken over."""
        self.check_lease()
        files: dict[str, Value] = {
            self._own("state.safetensors"): laid_out(tensors),
            self._own("state.json"): json.dumps(rest, allow_nan=False).encode(),  # in its own order, as it comes back
            self._own("metrics.json"): canonical([row.model_dump(mode="json") for row in rows]),
        }
        for name, value in files.items():
            self.store.put(f"{round_folder(round)}{name}", value)
        sums = Committed(round=round, files={name: sha256(value) for name, value in files.items()})
        mark, value = f"{round_folder(round)}{self._own('COMMITTED')}", sums.model_dump_json().encode()
        # A mark that is there already is ours, and the store's answer to writing it was lost; or it is somebody else's.
        if not self.store.create(mark, value) and self.store.get(mark) != value:
            raise Stopped(f"{self.store.uri(mark)}: another coordinator has committed this round. Nothing is lost")
        self._here.add(round)
        self.check_lease()
        self._prune(round)
        if len(self._here) % LOOK_EVERY == 0:
            self._pack()

    def _own(self, name: str) -> str:
        """The file's name, with the number of this coordinator's lease in front where there is one."""
        return name if self.lease is None else f"{self.lease.number}-{name}"

    def _may_delete(self, name: str) -> bool:
        """Whether the file is not one of a coordinator that has taken over since."""
        return self.lease is None or _writer(name) <= self.lease.number

    def check_lease(self) -> None:
        """Raises Stopped where another coordinator has taken over."""
        if self.lease is not None:
            self.lease.check()

    def read(self, round: int) -> tuple[Params, dict[str, Any]]:
        """The state after a committed round. Raises IntegrityError naming the file that is not as committed."""
        tensors, rest = self._committed(round, "state.safetensors"), self.rest(round)
        self._committed(round, "metrics.json")
        return decode(tensors, self.store.uri(f"{round_folder(round)}state.safetensors")), rest

    def rest(self, round: int) -> dict[str, Any]:
        """The part of the state that is JSON. Raises as `read` does."""
        found: dict[str, Any] = json_of(
            self._committed(round, "state.json"), self.store.uri(f"{round_folder(round)}state.json")
        )
        return found

    def with_state(self) -> list[int]:
        """Committed rounds whose state is kept, ascending."""
        files = self._files()
        commits = {round for round, name, _ in files if _plain(name) == "COMMITTED"} | self._here
        last = set(sorted(commits)[-2:])
        return sorted(last | {round for round, name, _ in files if _plain(name) == "state.json" and round in commits})

    def rows(self, lines: bool = True) -> list[Row]:
        """Every committed round's measurements, in round order; without `lines`, those of single clients are left out,
        which take most of the time and of the memory where rounds are large. Raises IntegrityError naming a damaged
        file, or the rounds that are missing."""
        return list(self.each_row(lines))

    def each_row(self, lines: bool = True) -> Iterator[Row]:
        """What `rows` gives, one after the other; only those of one file are in memory."""
        commits, done = self.commits(), 0
        for first, last, key in self._packs():
            if commits and first <= commits[-1]:
                found = [row for row in self._unpacked(key, lines) if done <= row.round <= commits[-1]]
                done += len(found)
                _check_whole(done, min(last, commits[-1]), self.store.uri("metrics"))
                yield from found
        for round in commits:
            if round >= done:
                found = [row for row in self._rows(round, lines) if row.round >= done]
                done += len(found)
                _check_whole(done, round, self.store.uri(round_folder(round)))
                yield from found

    def last_good(self, check: Callable[[Mapping[str, Any]], None] = lambda _: None) -> int | None:
        """The newest committed round whose state is intact, and all measurements up to it; None: there is none.
        `check` raises IntegrityError where what a commit's JSON names is not intact."""
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
                    _check_whole(done + len(self._rows(round)), round, "")
                except IntegrityError:
                    return good
                done = round + 1
            try:
                check(self.read(round)[1])
            except IntegrityError:
                continue  # damaged, or removed by retention
            good = round
        return good

    def _rows(self, round: int, lines: bool = True) -> list[Row]:
        name = self.store.uri(f"{round_folder(round)}metrics.json")
        return _rows_of(self._committed(round, "metrics.json"), name, lines)

    # -------------------------------------------------------------------------------------------- packed
    def _packs(self) -> list[tuple[int, int, str]]:
        """(first round, last round, key), ascending."""
        matches = ((PACK.fullmatch(key), key) for key in self.store.list("metrics/"))
        return sorted((int(match[1]), int(match[2]), key) for match, key in matches if match)

    def _unpacked(self, key: str, lines: bool = True) -> list[Row]:
        try:
            value = self.store.get(key)
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if key.removesuffix(".json").rpartition("-")[2] != sha256(value)[:16]:
            raise IntegrityError(f"{self.store.uri(key)} is damaged: its name is not its sha256. {WAY_OUT}")
        return _rows_of(value, self.store.uri(key), lines)

    def _pack(self) -> None:
        """Packs commits that are older than the last two, when there are enough of them."""
        done = max((last + 1 for _, last, _ in self._packs()), default=0)
        old = [round for round in self.commits()[:-2] if round >= done]
        if len(old) >= PACKED:
            self._put_pack(self._thinned(old, done))
            self._prune(old[-1])

    def _thinned(self, commits: Sequence[int], first: int) -> list[Row]:
        """The measurements of these commits from round `first` on, with at most about LINES lines. Where there are more
        than HELD_LINES, the commits whose lines are kept are read twice."""
        rows, commit_of, total, bare = list[Row](), list[int](), 0, 0
        for commit in commits:
            found = [row for row in self._rows(commit) if row.round >= first]
            total += sum(len(row.clients) for row in found)
            rows += found
            commit_of += [commit] * len(found)
            if total > HELD_LINES:
                rows[bare:] = map(_bare, rows[bare:])
                bare = len(rows)
        every = -(-total // LINES) or 1
        if bare:
            wanted = {row.round for row in rows[::every]}
            again = (row for commit in sorted(set(commit_of[::every])) for row in self._rows(commit))
            kept = {row.round: row for row in again if row.round in wanted}
            rows[::every] = [kept[row.round] for row in rows[::every]]
        return [row if i % every == 0 else _bare(row) for i, row in enumerate(rows)]

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
        """By round, the mark; where several coordinators left one, that of the last."""
        folder = round_folder(round)
        names = [key.removeprefix(folder) for key in self.store.list(folder)]
        return folder + max((n for n in names if _plain(n) == "COMMITTED"), key=_writer, default="COMMITTED")

    def _mark(self, mark: str, round: int) -> Committed:
        found = parsed(Committed, self.store.get(mark), self.store.uri(mark))
        if found.round != round:
            raise IntegrityError(f"{self.store.uri(mark)} is of round {found.round}: folders were exchanged")
        return found

    def _committed(self, round: int, name: str) -> bytes:
        """A file of a committed round, checked against the checksum that was committed with it."""
        mark = self._mark_key(round)
        try:
            files = self._mark(mark, round).files
            name = next((found for found in files if _plain(found) == name), name)
            value = self.store.get(f"{round_folder(round)}{name}")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if sha256(value) != files.get(name):
            raise IntegrityError(
                f"{self.store.uri(round_folder(round) + name)} is damaged: its sha256 is {sha256(value)[:16]}..., "
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
        # The mark goes first: nobody reads a folder that has none.
        self.store.delete(*sorted(gone, key=lambda key: not key.endswith("COMMITTED")))


def _plain(name: str) -> str:
    """A state file's or a mark's name without its writer's number."""
    rest = name.partition("-")[2]
    return rest if _writer(name) else name


def _writer(name: str) -> int:
    """The number of the coordinator that wrote a state file or a mark; 0: the name has no number."""
    number, _, rest = name.partition("-")
    return int(number) if WRITER.fullmatch(number) and rest in (*STATE_FILES, "COMMITTED") else 0


def _check_whole(rounds: int, last: int, name: str) -> None:
    """Raises IntegrityError unless that many rounds are those from 0 to `last`."""
    if rounds and rounds != last + 1:
        raise IntegrityError(f"{name}: the measurements of {last + 1 - rounds} rounds are missing. {WAY_OUT}")


def _bare(row: Row) -> Row:
    return row.model_copy(update={"clients": ()}) if row.clients else row


def _rows_of(value: bytes, name: str, lines: bool) -> list[Row]:
    rows = json_of(value, name)
    if not isinstance(rows, list):
        raise IntegrityError(f"{name} is no list of rounds. {WAY_OUT}")
    if not lines:
        rows = [{**row, "clients": []} if isinstance(row, dict) else row for row in rows]
    return [parsed(Row, json.dumps(row).encode(), name) for row in rows]
