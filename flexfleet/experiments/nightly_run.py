"""A night: its suite, its runs, the places where they are kept, and the commit of the code that makes it.

One commit makes a whole night, however often it is resumed: else models of one commit would be judged, and could become
champion, as those of another.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import ConfigError
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config
from flexfleet.config.comparison_runs import Entry
from flexfleet.experiments.compare import stores_of
from flexfleet.experiments.nightly_suite import NightlySuite, task_of
from flexfleet.tracking import record as track

log = logging.getLogger("flexfleet")

COMMIT = "commit"
"""Key in a night's store of the commit of the code that makes it."""
KIND = "regression"
"""Of a night's MLflow run. Earlier versions kept its token (`record.lasting_token`) in the night's store, and no
commit."""


@dataclass(frozen=True)
class Night:
    """A night to run: its suite, its runs and its reference."""

    path: Path
    suite: NightlySuite
    id: str
    runs: Mapping[str, Sequence[Entry]]
    """By case, seed by seed."""

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(entry.seed for entry in next(iter(self.runs.values()))))

    @property
    def tasks(self) -> dict[str, str]:
        """By `<case>/<label>`: the digest of what its figures are of."""
        pairs = [(case, entry.label) for case, entries in self.runs.items() for entry in entries]
        return {f"{case}/{label}": task_of(self.suite, case, label) for case, label in dict.fromkeys(pairs)}

    @property
    def config(self) -> Config:
        """The configuration of any run, for the places where files are kept and runs are tracked."""
        return next(iter(self.runs.values()))[0].config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.store).with_name(self.id)

    @property
    def store(self) -> Store:
        """The night's folder, or its place in `run.remote`, beside those of its comparisons."""
        remote = self.config.run.remote
        return FolderStore(self.folder) if remote is None else open_store(f"{remote.rpartition('/')[0]}/{self.id}")

    @property
    def stores(self) -> list[Store]:
        """The stores that hold the runs' ledgers."""
        return [store for entries in self.runs.values() for store in stores_of(entries)]


def keep_commit(night: Night) -> str:
    """Keeps the commit of the code in the night's store, before any of its runs begins, and gives it. Raises what
    `check_commit` raises."""
    check_commit(night)
    if track.commit() is None:
        log.warning(
            "the commit of this code is unknown: the night is bound to its files instead, and reports cannot name "
            "commits. Build the image with COMMIT=$(git rev-parse HEAD) in the environment, or set FLEXFLEET_COMMIT"
        )
    night.store.create(COMMIT, track.code().encode())
    return check_commit(night)


def check_commit(night: Night) -> str:
    """The commit of the code. Raises ConfigError for a night that was begun with another code. That includes a night
    with runs and without a commit: the version that began it kept none, so it was not this code. Raises it too if the
    place is another thing's: of a comparison, for example, whose id looks like a night's."""
    store = night.store
    if COMMIT in store.list(COMMIT):
        return track.check_code(store.get(COMMIT).decode(), store.uri())
    if any(run.list(key) for run in night.stores for key in ("run.json", track.RUN_KEY)):
        track.check_code(None, store.uri())
    if others := [key for key in store.list("") if key != track.token_key(KIND)]:
        raise ConfigError(
            f"{store.uri()} belongs to something else, not to a night: it holds {others[0]}. To go on with a night, "
            "give the id that it was begun with; for a new one, choose another --id"
        )
    return track.code()
