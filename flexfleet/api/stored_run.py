"""Read the files of a run on demand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from fl_engine.core.errors import ConfigError
from fl_engine.core.text import path_of
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage import code
from fl_engine.storage.checkpoints import Row
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import with_own_data
from flexfleet.config import Config, parse_schema, parse_with_algorithm
from flexfleet.config.sources import sources
from flexfleet.files.artifacts import PoolFile, RunFile, RunResult
from flexfleet.files.run_folder import check_is_folder, check_manifest
from flexfleet.pipeline import own_code
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import store_of
from flexfleet.pipeline.status import status_of


class StoredRun:
    """The folder of a run. Each file is read when it is first used."""

    def __init__(self, folder: str | Path) -> None:
        """Open the run in a folder.

        Raises:
            ConfigError: The folder does not contain a run.
            IntegrityError: A file has changed since the run finished.
        """
        self.folder = path_of(folder).absolute()  # a notebook may change the working directory later
        self._made: Resolved | None = None
        check_is_folder(self.folder)
        if not (self.folder / "run.json").is_file():
            raise ConfigError(f"{self.folder} is not the folder of a run, because it has no run.json")
        check_manifest(self.folder)

    @cached_property
    def _run(self) -> RunFile:
        return RunFile.read(self.folder / "run.json")

    @cached_property
    def _config(self) -> Config:
        return parse_schema(self._run.config)

    @contextmanager
    def _resolved(self, used: Collection[str] | None = None) -> Iterator[Resolved]:
        """Yield the configuration with its algorithm, data and network. User code is imported from the run's folder.
        Raises ConfigError if user code in the sections `used` of the configuration has changed; None for all."""
        with code.enabled_within(), isolated():
            own_code.enable(self._run, self.folder)
            if self._made is None:
                config, algorithm = parse_with_algorithm(own_code.stored(self._run), stored=True)
                self._made = Resolved(with_own_data(config, self.folder), algorithm)
            own_code.check_sources(self._run.sources, sources(self._made.config, used), self.folder)
            yield self._made

    @cached_property
    def _ledger(self) -> Ledger:
        return Ledger(store_of(self._config, self._run.run_id, self.folder))

    @cached_property
    def _rows(self) -> Sequence[Row]:
        return self._ledger.checkpoints.rows()

    @property
    def _scored(self) -> Mapping[str, float]:
        """Metrics of the last evaluated round."""
        return next((row.metrics for row in reversed(self._rows) if "avg" in row.metrics), {})

    @cached_property
    def _pool(self) -> PoolFile:
        return PoolFile.read(self.folder / "pool" / "pool.json")

    @cached_property
    def _result(self) -> RunResult | None:
        path = self.folder / "result.json"
        return RunResult.read(path) if path.is_file() and self.status != "stopped" else None

    @cached_property
    def status(self) -> str:
        return status_of(self._config, self.folder, self._rows).replace("unfinished", "stopped")
