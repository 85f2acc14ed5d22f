"""A nightly regression run: its suite, its runs, their stores, and the commit of the code.

One commit makes a whole nightly regression run, also if it is resumed, because its models are published as those of
that commit.
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
"""Kind of the MLflow run."""


@dataclass(frozen=True)
class Night:
    """A nightly regression run: its suite, and its runs."""

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
        """Map `<case>/<label>` to the digest of the settings that its figures depend on."""
        pairs = [(case, entry.label) for case, entries in self.runs.items() for entry in entries]
        return {f"{case}/{label}": task_of(self.suite, case, label) for case, label in dict.fromkeys(pairs)}

    @property
    def config(self) -> Config:
        """The configuration of any run, for the stores and the tracking."""
        return next(iter(self.runs.values()))[0].config

    @property
    def folder(self) -> Path:
        return Path(self.config.run.store).with_name(self.id)

    @property
    def store(self) -> Store:
        """The folder, or its place in `run.remote`, beside the comparisons' stores."""
        remote = self.config.run.remote
        return FolderStore(self.folder) if remote is None else open_store(f"{remote.rpartition('/')[0]}/{self.id}")

    @property
    def stores(self) -> list[Store]:
        """The stores that hold the runs' ledgers."""
        return [store for entries in self.runs.values() for store in stores_of(entries)]


def keep_commit(night: Night) -> str:
    """Store the commit of the code before any run begins, and return it. Raises as `check_commit`."""
    check_commit(night)
    if track.commit() is None:
        log.warning(
            "the commit of this code is unknown, so a digest of its files is used, and reports cannot name commits. "
            "Build the image with COMMIT=$(git rev-parse HEAD), or set FLEXFLEET_COMMIT"
        )
    night.store.create(COMMIT, track.code().encode())
    return check_commit(night)


def check_commit(night: Night) -> str:
    """Return the commit of the code. Raises ConfigError if the run was begun with other code, or if its folder belongs
    to something else, such as a comparison."""
    store = night.store
    if COMMIT in store.list(COMMIT):
        return track.check_code(store.get(COMMIT).decode(), store.uri())
    if others := [key for key in store.list("") if key != track.token_key(KIND)]:
        raise ConfigError(
            f"{store.uri()} is not the folder of a nightly regression run: it has {others[0]}. Choose another --id"
        )
    return track.code()
