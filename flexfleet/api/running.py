"""`flexfleet.run`: a run from Python."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.samples import Data
from fl_engine.training.guest import guest
from flexfleet.api.asked import Default, check_kinds, check_reach, config_of, plain, with_own_data
from flexfleet.api.bar import Bar, in_notebook
from flexfleet.api.callbacks import Callback, Watching
from flexfleet.api.errors import told
from flexfleet.api.results import Result
from flexfleet.config import Config, parse_with_algorithm
from flexfleet.config.names import new_name
from flexfleet.config.names import plain as plain_name
from flexfleet.files.artifacts import RunFile
from flexfleet.runs.status import OF_STUDY
from flexfleet.runs.whole import run as run_all
from flexfleet.steps import own_code
from flexfleet.steps.prepare import Resolved
from flexfleet.tracking.trackers import Several

log = logging.getLogger("flexfleet")


DATASET, MODEL, ALGORITHM = Default("digits"), Default("small_cnn"), Default("flexfl")


def run(
    dataset: str | Data = DATASET,
    model: Any = MODEL,
    algorithm: Any = ALGORITHM,
    *,
    rounds: int | None = None,
    clients: int | None = None,
    partition_rule: str | None = None,
    dirichlet_alpha: float | None = None,
    client_fraction: float | None = None,
    local_epochs: int | None = None,
    learning_rate: float | None = None,
    seed: int | None = None,
    mlflow_uri: str | None = None,
    store_uri: str | None = None,
    options: Mapping[str, Any] | None = None,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    run_id: str | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
) -> Result:
    """Partitions the data, trains, evaluates and reports: what `flexfleet run` does, with the same bits.

    `dataset`: a name, or data (`from_arrays`, `from_folder`, ...). `model`: a name, a torch module's class, or a
    function that builds one. `algorithm`: a name, a class, or an object of one with its options. The keywords are the
    fields of the run form; `options` sets every other parameter by its dotted name, e.g. {"training.momentum": 0.9};
    `config` is a params.yaml, or its sections, below both. No file is read that is not named here. `store_uri`: the
    folder of all runs (default `runs`), or s3://bucket/prefix for their ledgers. `mlflow_uri`: default
    sqlite:///mlflow.db; options={"tracking.mlflow": None}: none.

    `resume`: go on with the run of this `run_id`. `progress`: False shows nothing; else there is a line for each round,
    in a notebook a bar and the warnings (True: the lines there too).

    Raises ConfigError, DataError or another FlexfleetError for whatever is wrong, before anything trains where it can
    be known then. A run that a callback stops gives a result with the status `stopped`.
    """
    keywords = {
        "dataset": dataset,
        "model": model,
        "algorithm": algorithm,
        "rounds": rounds,
        "clients": clients,
        "partition_rule": partition_rule,
        "dirichlet_alpha": dirichlet_alpha,
        "client_fraction": client_fraction,
        "local_epochs": local_epochs,
        "learning_rate": learning_rate,
        "seed": seed,
        "mlflow_uri": mlflow_uri,
        "store_uri": store_uri,
    }
    __tracebackhide__ = True

    def go() -> Result:
        check_kinds(config, options)
        return _run(config_of(config, options, keywords), run_id, resume, callbacks, progress)

    return told(go)


def resumed(
    result: Result,
    rounds: int | None,
    mlflow_uri: str | None,
    callbacks: Sequence[Callback],
    progress: bool | None,
) -> Result:
    """The run in the folder, gone on with: by the folder's name, also where that is a copy or was renamed."""
    __tracebackhide__ = True

    def go() -> Result:
        folder = result.folder if result.folder.name != ".." else result.folder.resolve()
        run = RunFile.read(folder / "run.json")
        values = dict(own_code.recorded(run))
        values["run"] = {**values["run"], "store": str(folder.parent)}
        if rounds is not None:
            values["rounds"] = {**values["rounds"], "stop": plain(rounds, "rounds")}
        if mlflow_uri is not None:
            values["tracking"] = {**values["tracking"], "mlflow": plain(mlflow_uri, "mlflow_uri")}
        config = with_own_data(parse_with_algorithm(values)[0], folder)
        if config.run.remote is not None and run.run_id != folder.name and folder.parent.name in OF_STUDY:
            study = folder.resolve().parent.parent.name
            raise ConfigError(f"{folder} is a run of the study {study}, and goes on with it alone: resume the study")
        return _run(config, folder.name, True, callbacks, progress)

    return told(go)


def _run(
    config: Config, run_id: str | None, resume: bool, callbacks: Sequence[Callback], progress: bool | None
) -> Result:
    if resume and run_id is None:
        raise ConfigError("resume=True needs run_id, the name of the run to go on with")
    if not isinstance(callbacks, Sequence):
        raise ConfigError(f"callbacks: a list of objects of flexfleet.Callback is expected, got {callbacks!r}")
    check_reach(config)
    watching = Watching(callbacks)
    with guest(), shown(progress):
        resolved = Resolved.of(config)
        name = new_name(config) if run_id is None else plain_name(run_id, "run_id")
        folder = Path(config.run.store) / name
        status = "failed"
        try:
            run_all(
                resolved,
                name,
                resume=resume,
                observer=Several([_Beginning(watching, folder), *([Bar()] if barred(progress) else [])]),
                watcher=watching if callbacks else None,
            )
            status = "finished"
        except Stopped:
            status = "stopped"
            if not watching.stopped:
                raise
        except KeyboardInterrupt:
            status = "stopped"
            raise
        finally:
            watching.end(status)
    return Result(folder)


class _Beginning(Tracker):
    """A tracker that tells the callbacks of the run's beginning: a run tells its parameters once, before its rounds."""

    def __init__(self, watching: Watching, folder: Path) -> None:
        self._watching = watching
        self._folder = folder

    def params(self, values: Mapping[str, Any]) -> None:
        self._watching.start(Result(self._folder))


def barred(progress: bool | None) -> bool:
    """Whether a bar is shown instead of lines."""
    return progress is None and in_notebook()


@contextmanager
def shown(progress: bool | None) -> Iterator[None]:
    """The package's log on stderr, or by the process's own handlers where it has some; nothing where `progress` is
    False. A level that the process has set for the package's log holds, but for a bar's or for False."""
    level, propagate, handler = log.level, log.propagate, None
    if progress is False or barred(progress):
        log.setLevel(logging.ERROR if progress is False else logging.WARNING)
    else:
        log.setLevel(level or logging.INFO)
        if not (log.handlers or logging.getLogger().handlers):
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
            log.propagate = False
            log.addHandler(handler)
    try:
        yield
    finally:
        if handler is not None:
            log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
