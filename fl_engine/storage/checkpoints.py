"""Commit the rounds of a run, so that the run can be resumed after it was killed at any time.

    `rounds/00012/state.safetensors`: The tensors of the algorithm's state after the round.
    `rounds/00012/state.json`: All other values of the state.
    `rounds/00012/metrics.json`: The measurements since the previous commit.
    `rounds/00012/COMMITTED`: The checksums of the other three files. COMMITTED is written last.
    `metrics/00000-00099-<sha256>.json`: The measurements of rounds whose folders were deleted.

A round is committed when its marker file COMMITTED exists. After a kill, the stored results of an unfinished round are
reused, and missing results are computed again. The commit of round r deletes the plans, assignments and updates of
rounds up to r (`exchange.mailbox`), and all states older than the previous commit. The measurements of PACKED commits
are packed into one file. Therefore a run stores only a few hundred files.

If several machines can access the store, the coordinator holds a lock, and the names of the coordinator's files begin
with the lock's number. Therefore a replaced coordinator cannot damage its successor's commits.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import field_validator

from fl_engine.core.errors import IntegrityError, Stopped
from fl_engine.core.fields import LeavesOut
from fl_engine.core.records import Record, parsed
from fl_engine.core.types import Params
from fl_engine.storage.run_files import WAY_OUT, json_of, round_folder
from fl_engine.storage.run_lock import RunLock
from fl_engine.storage.store import Store, Value, canonical, decode, laid_out, sha256

log = logging.getLogger("flexfleet")

FILE = re.compile(r"rounds/([0-9]{5}|[1-9][0-9]{5,})/(?:([1-9][0-9]{0,17})-)?(.+)", re.DOTALL)
PACK = re.compile(r"metrics/([0-9]{5,})-([0-9]{5,})-[0-9a-f]{16}\.json")

MARK = "COMMITTED"
STATE_FILES = ("state.safetensors", "state.json", "metrics.json")
RESULT_FILES = ("plan.json", "closed.json", "updates/")
"""Names, or beginnings of names, of the files from which a round can be merged again."""
PACKED = 100
"""Minimum number of commits in a file with packed measurements."""


class Row(Record, LeavesOut):
    """One round's measurements. `clients` has a dict per assignment: client, sent, trained, loss, seconds, failure.

    Metrics that are not finite are omitted, because JSON cannot represent them.
    """

    left_out = ("evaluations", "plan", "model", "link")
    round: int
    metrics: dict[str, float]
    clients: tuple[dict[str, Any], ...]
    evaluations: tuple[dict[str, Any], ...] = ()
    """A dict for each client that evaluated, with its client number, level, tier, main metric and loss."""
    plan: str = ""
    """Checksum of the assignments (`rounds.chain`); empty in a central training."""
    model: str = ""
    """Checksum of the algorithm's state after the round."""
    link: str = ""
    """Checksum of all other fields and of the previous row's link."""

    @field_validator("metrics")
    @classmethod
    def _finite(cls, metrics: dict[str, float]) -> dict[str, float]:
        odd = [name for name, value in metrics.items() if not math.isfinite(value)]
        if odd:
            log.warning("omitting metrics that are not finite: %s", ", ".join(odd))
        return {name: value for name, value in metrics.items() if name not in odd}


class Committed(Record):
    round: int
    files: dict[str, str]
    """Map the name of each file to its SHA-256."""


class RoundFile(NamedTuple):
    round: int
    writer: int
    """Lock number of the coordinator that wrote the file; 0 without a lock."""
    name: str
    """File name without the lock number."""
    key: str


class Checkpoints:
    """Reads and writes commits. `keep_every` is n to keep the state of every n-th round, or None to keep only the last
    two states. `lock` is the run's lock, or None if only this machine can access the store. The states and results of
    the last `keep_rounds` rounds are also kept, and the state of the round `pinned`."""

    def __init__(
        self,
        store: Store,
        keep_every: int | None = None,
        lock: RunLock | None = None,
        keep_rounds: float = 0,
        pinned: int | None = None,
    ) -> None:
        self.store, self.keep_every, self.lock = store, keep_every, lock
        self.keep_rounds, self.pinned = keep_rounds, pinned
        self.best: int | None = None
        """Round with the best model, whose state is also kept."""

    def commits(self) -> list[int]:
        """Return the committed rounds in ascending order."""
        return sorted({file.round for file in self._files() if file.name == MARK})

    def _files(self, prefix: str = "rounds/") -> list[RoundFile]:
        matches = ((FILE.fullmatch(key), key) for key in self.store.list(prefix))
        return [RoundFile(int(m[1]), int(m[2] or 0), m[3], key) for m, key in matches if m]

    def commit(self, round: int, tensors: Params, rest: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """Commit `round`, then delete unneeded files. Raises Stopped if another coordinator has taken over."""
        self.check_lock()
        files: dict[str, Value] = {
            self._own("state.safetensors"): laid_out(tensors),
            self._own("state.json"): json.dumps(rest, allow_nan=False).encode(),  # keys keep their order
            self._own("metrics.json"): canonical([row.model_dump(mode="json") for row in rows]),
        }
        for name, value in files.items():
            self.store.put(f"{round_folder(round)}{name}", value)
        sums = Committed(round=round, files={name: sha256(value) for name, value in files.items()})
        mark, value = f"{round_folder(round)}{self._own(MARK)}", sums.model_dump_json().encode()
        # If the store's response was lost, an earlier attempt of this coordinator may have created the marker.
        if not self.store.create(mark, value) and self.store.get(mark) != value:
            raise Stopped(f"{self.store.uri(mark)}: another coordinator has committed this round. Nothing is lost")
        self.check_lock()
        self._prune(round)

    def _own(self, name: str) -> str:
        """Return the file name with the prefix of this coordinator's lock number."""
        return name if self.lock is None else f"{self.lock.number}-{name}"

    def _may_delete(self, file: RoundFile) -> bool:
        """Return False if a later coordinator wrote the file."""
        return self.lock is None or file.writer <= self.lock.number

    def check_lock(self) -> None:
        """Raise Stopped if another coordinator has taken over."""
        if self.lock is not None:
            self.lock.check()

    def read(self, round: int) -> tuple[Params, dict[str, Any]]:
        """Return the state after a committed round. Raises IntegrityError with the file's name if a file is damaged."""
        tensors, rest = self._committed(round, "state.safetensors"), self.rest(round)
        self._committed(round, "metrics.json")
        return decode(tensors, self.store.uri(f"{round_folder(round)}state.safetensors")), rest

    def rest(self, round: int) -> dict[str, Any]:
        """Return the JSON part of the state. Raises the same errors as `read`."""
        name = self.store.uri(f"{round_folder(round)}state.json")
        found: dict[str, Any] = json_of(self._committed(round, "state.json"), name)
        return found

    def with_state(self) -> list[int]:
        """Return the committed rounds with a stored state in ascending order."""
        files = self._files()
        commits = {file.round for file in files if file.name == MARK}
        return sorted({file.round for file in files if file.name == "state.json"} & commits)

    def rows(self, lines: bool = True) -> list[Row]:
        """Return all committed measurements, sorted by round. `lines=False` omits the clients' lines, which need most
        of the time and memory. Raises IntegrityError if a file is damaged or rounds are missing."""
        return list(self.each_row(lines))

    def each_row(self, lines: bool = True) -> Iterator[Row]:
        """Yield the rows that `rows` returns, with only one file's rows in memory at a time."""
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
        """Return the last committed round with an intact state and intact measurements of all earlier rounds; None if
        no round is intact. `check` receives a commit's JSON, and raises IntegrityError if the commit is not intact."""
        done = 0
        with suppress(IntegrityError):
            for row in self.each_row(lines=False):
                done = row.round + 1
        for round in reversed(self.commits()):
            if round < done:
                with suppress(IntegrityError):  # the state is damaged or was deleted
                    check(self.read(round)[1])
                    return round
        return None

    def _rows(self, round: int, lines: bool = True) -> list[Row]:
        name = self.store.uri(f"{round_folder(round)}metrics.json")
        return _rows_of(self._committed(round, "metrics.json"), name, lines)

    def _packs(self) -> list[tuple[int, int, str]]:
        """Return a tuple (first round, last round, key) for each packed file, sorted by round."""
        matches = ((PACK.fullmatch(key), key) for key in self.store.list("metrics/"))
        return sorted((int(match[1]), int(match[2]), key) for match, key in matches if match)

    def _unpacked(self, key: str, lines: bool = True) -> list[Row]:
        value = self.store.get(key)
        if key.removesuffix(".json").rpartition("-")[2] != sha256(value)[:16]:
            raise IntegrityError(f"{self.store.uri(key)} is damaged: its SHA-256 is wrong. {WAY_OUT}")
        return _rows_of(value, self.store.uri(key), lines)

    def _put_pack(self, rows: Sequence[Row]) -> None:
        if rows:
            value = canonical([row.model_dump(mode="json") for row in rows])
            name = f"{rows[0].round:05d}-{rows[-1].round:05d}-{sha256(value)[:16]}.json"
            self.store.put(f"metrics/{name}", value)

    def _cut_packs(self, round: int, damaged: bool = False) -> None:
        """Delete packed measurements after `round`. If `damaged` is True, also delete unreadable packed files."""
        for first, last, key in self._packs():
            if first > round:
                self.store.delete(key)
            elif last > round:
                try:
                    rows = self._unpacked(key)
                except IntegrityError:
                    if not damaged:
                        raise
                    rows = []
                self._put_pack([row for row in rows if row.round <= round])
                self.store.delete(key)

    def _committed(self, round: int, name: str) -> bytes:
        """Read a file of a committed round, and verify the file with the committed checksum."""
        folder = round_folder(round)
        writers = [file.writer for file in self._files(folder) if file.name == MARK]
        own = f"{max(writers)}-" if any(writers) else ""  # only the marker of the last coordinator is valid
        mark, key = f"{folder}{own}{MARK}", f"{folder}{own}{name}"
        try:
            found = parsed(Committed, self.store.get(mark), self.store.uri(mark))
            if found.round != round:
                raise IntegrityError(f"{self.store.uri(mark)} must be the marker of round {round}, got {found.round}")
            value = self.store.get(key)
            if sha256(value) != found.files.get(f"{own}{name}"):
                raise IntegrityError(f"{self.store.uri(key)} is damaged: its SHA-256 is not in {self.store.uri(mark)}")
        except IntegrityError as error:
            raise IntegrityError(f"{error}. {WAY_OUT}") from error
        return value

    def discard_after(self, round: int | None) -> None:
        """Delete all rounds after `round`, which `last_good` has returned. If `round` is None, delete all rounds."""
        self.check_lock()
        first = 0 if round is None else round + 1
        gone = [file for file in self._files() if file.round >= first and self._may_delete(file)]
        marks = [file.key for file in gone if file.name == MARK]
        self.store.delete(*reversed(marks))  # delete the last round first, so that a kill does not leave a gap
        self.store.delete(*(file.key for file in gone if file.name != MARK))
        self._cut_packs(first - 1, damaged=True)

    def tidy(self) -> None:
        """Delete incomplete files of a killed run, but not the updates of an unfinished round, which are reused."""
        for prefix in ("rounds/", "metrics/"):
            self.store.sweep(prefix)
        commits = self.commits()
        self._cut_packs(commits[-1] if commits else -1)
        if commits:
            self._prune(commits[-1])

    def _prune(self, round: int) -> None:
        files = self._files()
        commits = sorted({file.round for file in files if file.name == MARK and file.round <= round})
        if not commits:
            return
        packed = max((last for _, last, _ in self._packs()), default=-1)
        unpacked = [commit for commit in commits[:-2] if commit > packed]
        if len(unpacked) >= PACKED:
            self._put_pack([row for commit in unpacked for row in self._rows(commit) if row.round > packed])
            packed = unpacked[-1]

        def is_over(file: RoundFile) -> bool:
            if file.round in commits and file.name.startswith(RESULT_FILES):
                return file.round <= round - self.keep_rounds
            if file.round not in commits or file.name not in (*STATE_FILES, MARK):
                return file.round <= round
            kept = self.keep_every is not None and (file.round + 1) % self.keep_every == 0
            kept = kept or file.round in (self.pinned, self.best)
            kept = kept or (self.keep_rounds > 0 and file.round >= round - self.keep_rounds)
            has_state = file.name in ("state.safetensors", "state.json")
            return file.round < commits[-2:][0] and not kept and (has_state or file.round <= packed)

        gone = [file for file in files if is_over(file) and self._may_delete(file)]
        # Delete the marker first, because a folder without a marker is never read.
        self.store.delete(*(file.key for file in sorted(gone, key=lambda file: file.name != MARK)))


def _check_complete(rounds: int, last: int, name: str) -> None:
    """Raise IntegrityError if a round from 0 to `last` is missing. `rounds` is the number of rounds that were read."""
    if rounds and rounds != last + 1:
        raise IntegrityError(f"{name}: the measurements of {last + 1 - rounds} rounds are missing. {WAY_OUT}")


def _rows_of(value: bytes, name: str, lines: bool) -> list[Row]:
    rows = [row if lines else {**row, "clients": []} for row in json_of(value, name)]
    return [parsed(Row, json.dumps(row).encode(), name) for row in rows]
