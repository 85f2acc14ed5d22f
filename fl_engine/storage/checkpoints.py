"""The committed rounds of a run, which make it resumable after a kill at any instant.

    rounds/00012/state.safetensors      the algorithm's state after the round
    rounds/00012/state.json
    rounds/00012/metrics.json           what was measured since the commit before
    rounds/00012/COMMITTED              written last, with the checksums of the three files above
    metrics/00000-00099-<sha256>.json   the measurements of rounds whose folders were deleted

A round is finished when its COMMITTED exists. After a kill, results of an unfinished round are adopted, and the rest is
computed again. The commit of round r deletes what rounds up to r left (plans, assignments, updates:
`exchange.mailbox`) and the states before the previous commit. The measurements of PACKED commits are packed into one
file. So a run stores a few hundred files, however many rounds it has.

If several machines can reach the store, the coordinator holds a lease, and the names of its files begin with the
lease's number. So a coordinator that was replaced cannot damage the commits of its successor.
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

MARK = "COMMITTED"
STATE_FILES = ("state.safetensors", "state.json", "metrics.json")
PACKED = 100
"""A packed file holds the measurements of at least this many commits."""
LOOK_EVERY = 10
"""After this many commits, the number of unpacked commits is compared with PACKED."""
LINES = 2000
"""The most lines about single clients in a packed file. If there are more, the lines of every n-th round are kept."""


class Row(Record):
    """One round's measurements. `clients` has a line per assignment: client, sent, trained, loss, seconds, failure.

    Metrics that are not finite (a model that diverged) are left out, because JSON cannot express them.
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
    """Maps each file's name to its sha256."""


class Checkpoints:
    """`keep_every`: keep the state of every n-th round; None: only the last two commits. `lease`: None if only this
    machine can reach the store."""

    def __init__(self, store: Store, keep_every: int | None = None, lease: Lease | None = None) -> None:
        self.store = store
        self.keep_every = keep_every
        self.lease = lease
        self._here: set[int] = set()
        """Rounds that this object has committed, which a listing may not show yet."""

    # ------------------------------------------------------------------------------------------ commits
    def commits(self) -> list[int]:
        """Return the committed rounds, ascending."""
        return sorted({round for round, name, _ in self._files() if _plain(name) == MARK})

    def _files(self) -> list[tuple[int, str, str]]:
        """(round, name, key) of each file of a round."""
        found = []
        for key in self.store.list("rounds/"):
            match = FILE.fullmatch(key)
            if match and key.startswith(round_folder(int(match[1]))):
                found.append((int(match[1]), match[2], key))
        return found

    def commit(self, round: int, tensors: Params, rest: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Make `round` the last finished one, then remove what is no longer needed. Raises Stopped if another
        coordinator has taken over."""
        self.check_lease()
        files: dict[str, Value] = {
            self._own("state.safetensors"): laid_out(tensors),
            self._own("state.json"): json.dumps(rest, allow_nan=False).encode(),  # keeps the order of the keys
            self._own("metrics.json"): canonical([row.model_dump(mode="json") for row in rows]),
        }
        for name, value in files.items():
            self.store.put(f"{round_folder(round)}{name}", value)
        sums = Committed(round=round, files={name: sha256(value) for name, value in files.items()})
        mark, value = f"{round_folder(round)}{self._own(MARK)}", sums.model_dump_json().encode()
        # An existing mark is this coordinator's if the store's answer to an earlier try was lost.
        if not self.store.create(mark, value) and self.store.get(mark) != value:
            raise Stopped(f"{self.store.uri(mark)}: another coordinator has committed this round. Nothing is lost")
        self._here.add(round)
        self.check_lease()
        self._prune(round)
        if len(self._here) % LOOK_EVERY == 0:
            self._pack()

    def _own(self, name: str) -> str:
        """The file's name, after the number of this coordinator's lease."""
        return name if self.lease is None else f"{self.lease.number}-{name}"

    def _may_delete(self, name: str) -> bool:
        """False for a file of a coordinator that has taken over."""
        return self.lease is None or _writer(name) <= self.lease.number

    def check_lease(self) -> None:
        """Raise Stopped if another coordinator has taken over."""
        if self.lease is not None:
            self.lease.check()

    def read(self, round: int) -> tuple[Params, dict[str, Any]]:
        """Return the state after a committed round. Raises IntegrityError, which names the file that has changed."""
        tensors, rest = self._committed(round, "state.safetensors"), self.rest(round)
        self._committed(round, "metrics.json")
        return decode(tensors, self.store.uri(f"{round_folder(round)}state.safetensors")), rest

    def rest(self, round: int) -> dict[str, Any]:
        """Return the part of the state that is JSON. Raises as `read` does."""
        name = self.store.uri(f"{round_folder(round)}state.json")
        found: dict[str, Any] = json_of(self._committed(round, "state.json"), name)
        return found

    def with_state(self) -> list[int]:
        """Return the committed rounds whose state is stored, ascending."""
        files = self._files()
        commits = {round for round, name, _ in files if _plain(name) == MARK} | self._here
        last = set(sorted(commits)[-2:])
        return sorted(last | {round for round, name, _ in files if _plain(name) == "state.json" and round in commits})

    def rows(self, lines: bool = True) -> list[Row]:
        """Return all committed measurements in the order of the rounds. Without `lines` the lines of single clients,
        which take most of the time and memory, are left out. Raises IntegrityError, which names a damaged file or the
        rounds that are missing."""
        return list(self.each_row(lines))

    def each_row(self, lines: bool = True) -> Iterator[Row]:
        """Yield what `rows` returns. Only the rows of one file are in memory."""
        commits, done = self.commits(), 0
        for first, last, key in self._packs():
            if commits and first <= commits[-1]:
                found = [row for row in self._unpacked(key, lines) if done <= row.round <= commits[-1]]
                done += len(found)
                _check_complete(done, min(last, commits[-1]), self.store.uri("metrics"))
                yield from found
        for round in commits:
            if round >= done:
                found = [row for row in self._rows(round, lines) if row.round >= done]
                done += len(found)
                _check_complete(done, round, self.store.uri(round_folder(round)))
                yield from found

    def last_good(self, check: Callable[[Mapping[str, Any]], None] = lambda _: None) -> int | None:
        """Return the newest committed round whose state and all measurements up to it are intact, or None. `check`
        raises IntegrityError if other files that a commit's JSON names are not intact."""
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
                    _check_complete(done + len(self._rows(round)), round, "")
                except IntegrityError:
                    return good
                done = round + 1
            try:
                check(self.read(round)[1])
            except IntegrityError:
                continue  # damaged, or deleted because it is old
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
        value = self.store.get(key)
        if key.removesuffix(".json").rpartition("-")[2] != sha256(value)[:16]:
            raise IntegrityError(f"{self.store.uri(key)} is damaged: its name is not its sha256. {WAY_OUT}")
        return _rows_of(value, self.store.uri(key), lines)

    def _pack(self) -> None:
        """Pack the commits before the last two, if there are enough of them."""
        done = max((last + 1 for _, last, _ in self._packs()), default=0)
        old = [round for round in self.commits()[:-2] if round >= done]
        if len(old) >= PACKED:
            self._put_pack(self._thinned(old, done))
            self._prune(old[-1])

    def _thinned(self, commits: Sequence[int], first: int) -> list[Row]:
        """The measurements of these commits from round `first` on, with about LINES lines. Commits are read twice, so
        that the lines of one commit are in memory and not all lines."""

        def each() -> Iterator[Row]:
            return (row for commit in commits for row in self._rows(commit) if row.round >= first)

        every = -(-sum(len(row.clients) for row in each()) // LINES) or 1
        return [row if i % every == 0 else row.model_copy(update={"clients": ()}) for i, row in enumerate(each())]

    def _put_pack(self, rows: Sequence[Row]) -> None:
        if rows:
            value = canonical([row.model_dump(mode="json") for row in rows])
            name = f"{rows[0].round:05d}-{rows[-1].round:05d}-{sha256(value)[:16]}.json"
            self.store.put(f"metrics/{name}", value)

    def _cut_packs(self, round: int, damaged: bool = False) -> None:
        """Delete packed measurements after `round`; with `damaged` also packed files that cannot be read."""
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
    def _committed(self, round: int, name: str) -> bytes:
        """Return a file of a committed round, checked against its committed checksum."""
        folder = round_folder(round)
        names = [key.removeprefix(folder) for key in self.store.list(folder)]
        # The mark of the last coordinator counts.
        mark = folder + max((n for n in names if _plain(n) == MARK), key=_writer, default=MARK)
        try:
            found = parsed(Committed, self.store.get(mark), self.store.uri(mark))
            if found.round != round:
                raise IntegrityError(f"{self.store.uri(mark)} belongs to round {found.round}")
            name = next((own for own in found.files if _plain(own) == name), name)
            value = self.store.get(f"{folder}{name}")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        if sha256(value) != found.files.get(name):
            damaged = f"{self.store.uri(folder + name)} is damaged: its sha256 is not that in {self.store.uri(mark)}"
            raise IntegrityError(f"{damaged}. {WAY_OUT}")
        return value

    # ------------------------------------------------------------------------------------------ deleting
    def discard_after(self, round: int | None) -> None:
        """Delete all rounds after `round` (None: all rounds), and packed measurements that are damaged."""
        self.check_lease()
        first = 0 if round is None else round + 1
        gone = [(name, key) for round, name, key in self._files() if round >= first and self._may_delete(name)]
        keys, marks = [key for _, key in gone], [key for name, key in gone if _plain(name) == MARK]
        self.store.delete(*reversed(marks))  # the last round first, so that a kill leaves no gap
        self.store.delete(*(k for k in keys if k not in marks))
        self._here = {r for r in self._here if r < first}
        self._cut_packs(first - 1, damaged=True)

    def tidy(self) -> None:
        """Remove what a kill left behind, except the updates of a started round, which are adopted."""
        for prefix in ("rounds/", "metrics/"):
            self.store.sweep(prefix)
        commits = self.commits()
        self._cut_packs(commits[-1] if commits else -1)
        if commits:
            self._prune(commits[-1])
            self._pack()

    def _prune(self, round: int) -> None:
        files = self._files()
        marked = {found for found, name, _ in files if _plain(name) == MARK} | self._here
        commits = sorted(r for r in marked if r <= round)
        if not commits:
            return
        packed = max((last for _, last, _ in self._packs()), default=-1)
        gone = []
        for folder, own, key in files:
            name = _plain(own)
            unfinished = folder <= round and (folder not in commits or name not in (*STATE_FILES, MARK))
            kept = self.keep_every is not None and (folder + 1) % self.keep_every == 0
            old = folder < commits[-2:][0] and not kept
            done_with = old and (name in ("state.safetensors", "state.json") or folder <= packed)
            if (unfinished or done_with) and self._may_delete(own):
                gone.append(key)
        # The mark is deleted first, because nobody reads a folder without one.
        self.store.delete(*sorted(gone, key=lambda key: not key.endswith(MARK)))


def _plain(name: str) -> str:
    """The name of a state file or a mark without its writer's number."""
    rest = name.partition("-")[2]
    return rest if _writer(name) else name


def _writer(name: str) -> int:
    """The lease number of the coordinator that wrote a state file or a mark; 0 if the name has no number."""
    number, _, rest = name.partition("-")
    return int(number) if WRITER.fullmatch(number) and rest in (*STATE_FILES, MARK) else 0


def _check_complete(rounds: int, last: int, name: str) -> None:
    """Raise IntegrityError unless there are as many rounds as from 0 to `last`."""
    if rounds and rounds != last + 1:
        raise IntegrityError(f"{name}: the measurements of {last + 1 - rounds} rounds are missing. {WAY_OUT}")


def _rows_of(value: bytes, name: str, lines: bool) -> list[Row]:
    rows = json_of(value, name)
    if not isinstance(rows, list):
        raise IntegrityError(f"{name} is not a list of rounds. {WAY_OUT}")
    return [parsed(Row, json.dumps(row if lines else {**row, "clients": []}).encode(), name) for row in rows]
