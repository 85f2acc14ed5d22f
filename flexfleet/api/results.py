"""What a run gives, read from its folder."""

from __future__ import annotations

import copy
import html
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError, nearest
from fl_engine.core.slicing import runnable
from fl_engine.core.text import path_of
from fl_engine.core.types import Params
from fl_engine.data import partition_files
from fl_engine.models.export import RawNetwork, type_of, with_statistics
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.replay import ClientRound, replay
from fl_engine.rounds.run import Run
from fl_engine.storage import code
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import decode
from fl_engine.training.evaluation import weights_of
from fl_engine.training.isolation import isolated
from fl_engine.training.numerics import describe, differing
from flexfleet.api.arguments import plain, with_own_data
from flexfleet.api.callbacks import Callback, run_watched
from flexfleet.api.calls import told
from flexfleet.api.tables import table, to_html
from flexfleet.config import Config, codecs, parse_schema, parse_with_algorithm
from flexfleet.config.sources import sources
from flexfleet.files import manifest
from flexfleet.files.artifacts import ConfusionFile, PoolFile, RunFile
from flexfleet.files.artifacts import Result as ResultFile
from flexfleet.files.measure import measure_in
from flexfleet.files.run_folder import check_is_folder
from flexfleet.files.run_status import Tally, tally_of
from flexfleet.pipeline import own_code
from flexfleet.pipeline.partition import folders_sum, simulated
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import devices_decide, store_of
from flexfleet.pipeline.site import given_weights, initial_state, site_of, trace_of
from flexfleet.pipeline.status import OF_STUDY, status_of

DEFAULT_STORE = Path("runs")


class Result:
    """A run: its figures, its model, its rounds. A finished one, or one that was stopped and can be resumed.

    run_id, folder    the run's name and folder
    config            its configuration, as nested mappings
    status            `finished`; `stopped`: it can be resumed; `diverged` or `nothing_merged`: its model is of no use
    metrics           avg, full, levels{name: value}, ... of the last evaluation (see `files.artifacts.Result`)
    report            the page of a finished run; None for one that is stopped
    history           a line for each round
    clients           a line for each client and round
    levels            a line for each sub-model: size, multiply-adds, and its score
    params            the global model's weights by name: a copy
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError if there is no run, EnvironmentFailure if its folder cannot be read, IntegrityError if a
        file has changed since the run finished."""
        self.folder = path_of(folder).absolute()  # a notebook may change its folder
        self._made: Resolved | None = None
        check_is_folder(self.folder)
        if not (self.folder / "run.json").is_file():
            if (self.folder / "central.json").is_file():
                raise ConfigError(f"{self.folder} holds a central training, not a federated run")
            raise ConfigError(f"{self.folder} is no folder of a run: it has no run.json")
        manifest.check(self.folder)

    def __repr__(self) -> str:
        return f"<flexfleet.Result {self.run_id}: {self.status}, round {len(self._rows)}{self._told()}, {self._tally}>"

    def _repr_html_(self) -> str:
        names = ["run", "status", "rounds", "failures"]
        said = [self.run_id, self.status, len(self._rows), str(self._tally)]
        if "avg" in self.metrics:
            measure = measure_in(self._scored)
            names += [f"avg {measure.unit}", f"full {measure.unit}"]
            said += [measure.said(self.metrics[of]) for of in ("avg", "full")]
        page = f'<p><a href="{html.escape(str(self.report))}">report</a></p>' if self.report else ""
        return to_html([name.strip() for name in names], [said]) + page

    def _told(self) -> str:
        if "avg" not in self.metrics:
            return ""
        measure = measure_in(self._scored)
        avg, full = (measure.with_unit(self.metrics[of]) for of in ("avg", "full"))
        return f", avg {avg}, full {full}"

    # ------------------------------------------------------------------------------------------------ figures
    @cached_property
    def _run(self) -> RunFile:
        return RunFile.read(self.folder / "run.json")

    @cached_property
    def _config(self) -> Config:
        return parse_schema(self._run.config)

    @contextmanager
    def _resolved(self, used: Collection[str] | None = None) -> Iterator[Resolved]:
        """Yield what the configuration names, with the run's own code from its folder. Raises ConfigError if the source
        of what the sections `used` (None: all) name has changed since the run started."""
        with code.enabled_within(), isolated():
            own_code.enable(self._run, self.folder)
            if self._made is None:
                config, algorithm = parse_with_algorithm(own_code.stored(self._run), stored=True)
                self._made = Resolved(with_own_data(config, self.folder), algorithm)
            own_code.check_sources(self._run.sources, sources(self._made.config, used), self.folder)
            yield self._made

    @cached_property
    def _ledger(self) -> Ledger:
        return ledger_in(store_of(self._config, self.run_id, self.folder))

    @cached_property
    def _rows(self) -> Sequence[Row]:
        return self._ledger.checkpoints.rows()

    @property
    def _tally(self) -> Tally:
        return tally_of(row.metrics for row in self._rows)

    @property
    def _scored(self) -> Mapping[str, float]:
        """The measurements of the last round that was evaluated."""
        return next((row.metrics for row in reversed(self._rows) if "avg" in row.metrics), {})

    @cached_property
    def _pool(self) -> PoolFile:
        return PoolFile.read(self.folder / "pool" / "pool.json")

    @cached_property
    def _ended(self) -> str:
        return status_of(self._config, self.folder, self._rows)

    @cached_property
    def _result(self) -> ResultFile | None:
        path = self.folder / "result.json"
        if not path.is_file() or self._ended == "unfinished":
            return None
        return ResultFile.read(path)

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._run.config)  # the user may change what is handed out

    @property
    def status(self) -> str:
        return "stopped" if self._ended == "unfinished" else self._ended

    @property
    def report(self) -> Path | None:
        return None if self._result is None else self.folder / "report.html"

    @property
    def model_sha256(self) -> str | None:
        """The sha256 of the final weights; None for a run that is stopped."""
        return None if self._result is None else self._result.model_sha256

    @property
    def metrics(self) -> dict[str, Any]:
        if self._result is not None:
            return copy.deepcopy(self._result.metrics)
        scored = self._scored
        if not scored:
            return {}
        largest = [level.name for level in self._pool.levels if level.reported][-1]
        of_largest = (key.removesuffix(f"/{largest}") for key in scored if key.endswith(f"/{largest}"))
        name = next(key for key in of_largest if key != "loss" and scored[f"{key}/{largest}"] == scored["full"])
        levels = {key.removeprefix(f"{name}/"): value for key, value in scored.items() if key.startswith(f"{name}/")}
        return {"avg": scored["avg"], "full": scored["full"], "levels": levels}

    @property
    def history(self) -> Any:
        return table([{"round": row.round + 1, **row.metrics} for row in self._rows])

    @property
    def clients(self) -> Any:
        return table([{"round": row.round + 1, **line} for row in self._rows for line in row.clients])

    @property
    def levels(self) -> Any:
        scores, local = self.metrics.get("levels", {}), self.metrics.get("local", {})
        sizes = ("name", "params", "share", "flops", "bytes", "dispatched", "reported")
        lines = [{key: getattr(level, key) for key in sizes} for level in self._pool.levels]
        for line in lines:
            found = local.get(line["name"], {})
            line.update(score=scores.get(line["name"]), local=found.get("mean"), local_sd=found.get("sd"))
        return table(lines)

    # -------------------------------------------------------------------------------------------------- model
    @property
    def params(self) -> Params:
        return {name: tensor.clone() for name, tensor in self._params.items()}  # the user may change what is handed out

    @cached_property
    def _params(self) -> Params:
        if self._result is not None:
            return decode((self.folder / "model.safetensors").read_bytes(), str(self.folder / "model.safetensors"))
        last = max(self._ledger.checkpoints.commits(), default=None)
        if last is None:
            raise ConfigError(f"{self.run_id}: no round is committed yet: resume it")
        tensors, _ = self._ledger.checkpoints.read(last)
        prefix = "params/"
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    def model(self, level: str | None = None) -> nn.Module:
        """Return a copy of the network of a level (None: the largest), in evaluation mode. It takes raw samples, as the
        data set has them. Batch norm without statistics, or with statistics for each level (`static_bn`), gets those of
        the server's proxy data, as in `publish`. Raises ConfigError if the level does not exist, a needed proxy is
        missing, or the source of the network or the data set has changed."""
        with self._resolved(("model", "dataset")) as resolved:
            pool = self._pool.pool()
            names = [member.name for member in pool]
            wanted = names[-1] if level is None else level
            if wanted not in names:
                raise ConfigError(f"there is no level {wanted!r}{nearest(str(wanted), names)}")
            data, family, member = resolved.data, resolved.family, pool[names.index(wanted)]
            prepare_process(("cpu",))
            parts = partition_files.load(self.folder / "partition", data)
            proxy = torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))
            views = weights_of(self._params, family.layout(), member)
            weights = {name: tensor.clone() for name, tensor in views.items()}
            family, weights = with_statistics(family, weights, member, data, proxy)
            network = runnable(family, member.spec, weights).eval()
        axes = len(data.input_shape)
        return RawNetwork(network, type_of(data), axes, data.mean, data.std, member.ensemble).eval()

    def confusion(self, level: str | None = None) -> Any:
        """Return the confusion matrix of a level (None: the largest): counts of test samples by class (row) and
        predicted class (column). Raises ConfigError if the run is not finished, or the level was not evaluated."""
        if self._result is None:
            raise ConfigError(f"{self.run_id} is stopped: its confusion is counted when it has finished; resume it")
        found = ConfusionFile.read(self.folder / "confusion.json").levels
        if not found:
            raise ConfigError(f"{self.run_id}: its task has no classes")
        wanted = list(found)[-1] if level is None else level
        if wanted not in found:
            if wanted in [level.name for level in self._pool.levels]:
                raise ConfigError(
                    f"level {wanted!r} is not reported, so its answers are not counted: {', '.join(found)} are"
                )
            raise ConfigError(f"there is no level {wanted!r}{nearest(str(wanted), found)}")
        return table([{str(j): count for j, count in enumerate(row)} for row in found[wanted]])

    # ------------------------------------------------------------------------------------------------- rounds
    def resume(
        self,
        rounds: int | None = None,
        *,
        mlflow_uri: str | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> Result:
        """Continue a stopped run, or a finished one with more rounds.

        Args:
            rounds: Number of rounds in all; None: as configured.
            mlflow_uri: Address of its MLflow, if it has moved or has a password, which run.json does not hold.
        """
        __tracebackhide__ = True

        def go() -> Result:
            folder = self.folder if self.folder.name != ".." else self.folder.resolve()
            resolved = _to_go_on_with(folder, rounds, mlflow_uri)
            return run_watched(resolved, folder.name, True, callbacks, progress, Result)

        try:
            return told(go)
        finally:  # what was read before is not so any more
            for name in ("_run", "_config", "_ledger", "_rows", "_pool", "_ended", "_result", "_params"):
                self.__dict__.pop(name, None)
            self._made = None

    def replay(self, round: int, client: int) -> ClientRound:
        """Compute once more what `client` did in `round`, counted from 1: order, task, start, update, change.

        The rounds since the last stored state are computed again; with options={'rounds.keep_every': 1} there are none.

        Raises:
            ConfigError: The client was not asked, or failed; or what it trained on, or its memory, is not known here.
            IntegrityError: The run's files or data have changed.
            EnvironmentFailure: This machine would compute other bits.
        """
        for name, value in (("round", round), ("client", client)):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError(f"{name} is a whole number, got {value!r}")
        with self._resolved() as resolved:
            config = resolved.config
            if devices_decide(config):
                raise ConfigError(
                    f"what clients trained follows from the memory that they had free ({config.run.backend}.observe="
                    "cgroup), so a round cannot be computed again"
                )
            before = self._run.numerics
            site = site_of(resolved, self.folder / "partition", self.folder / "pool", before)
            if site.most is not None:
                if config.run.apart:
                    raise ConfigError(
                        "what clients have trained on lies on their devices (partition.rule=local), so no client's "
                        "work can be replayed here"
                    )
                site = simulated(resolved, site)
                if self._run.folders_sha256 not in (None, folders_sum(site)):
                    raise IntegrityError("the run had other data in partition.folders than there are now")
            if others := differing(before, describe(site.numerics, config.run.devices)):
                raise EnvironmentFailure(
                    f"this machine would not compute the same bits as the one where the run was made: {others}"
                )
            initial = initial_state(resolved, site, given_weights(self.folder / "pool", site.family))
            trace, wait = trace_of(config, site)[0], config.fleet.wait_s
            run = Run(resolved.algorithm, site, config.rounds, config.run.devices, None, codecs(config), trace, wait)
            backend = InProcess(site, config.run.devices)
            return replay(run, initial, backend, self._ledger, round - 1, client)


def _to_go_on_with(folder: Path, rounds: int | None, mlflow_uri: str | None) -> Resolved:
    """Return the configuration of the run in the folder, which may be a copy or have another name."""
    run = RunFile.read(folder / "run.json")
    values = dict(run.config)
    values["run"] = {**values["run"], "store": str(folder.parent)}
    if rounds is not None:
        values["rounds"] = {**values["rounds"], "stop": plain(rounds, "rounds")}
    if mlflow_uri is not None:
        values["tracking"] = {**values["tracking"], "mlflow": plain(mlflow_uri, "mlflow_uri")}
    config, algorithm = parse_with_algorithm(values, stored=True)
    config = with_own_data(config, folder)
    if config.run.remote is not None and run.run_id != folder.name and folder.parent.name in OF_STUDY:
        study = folder.resolve().parent.parent.name
        raise ConfigError(f"{folder} is a run of the study {study}, and goes on with it alone: resume the study")
    return Resolved(config, algorithm)


def load(run: str | Path | Result) -> Result:
    """Open the run in a folder, or of this name in the folder `runs`.

    Import the module of your own network, algorithm or data set first, because a run's files cannot import it. Raises
    ConfigError if there is no run, IntegrityError if a file has changed since the run finished.

    Example:
        >>> flexfleet.load("runs/a").history
    """
    if isinstance(run, Result):
        return Result(run.folder)
    return Result(in_store(run, "run.json"))


def in_store(name: str | Path, file: str) -> Path:
    """The folder that holds this file, here or in the folder `runs`. Raises ConfigError where there is no such
    folder."""
    if not isinstance(name, str | Path):
        raise ConfigError(f"a folder or a name is expected, got {name!r}")
    path, inside = path_of(name), DEFAULT_STORE / name
    found = next((each for each in (path, inside) if (each / file).is_file()), None)
    if found is None and not any(map(os.path.lexists, (path, inside))):
        places = dict.fromkeys((str(path), str(inside)))  # one, where the path is absolute
        raise ConfigError(f"there is no folder {', nor '.join(places)}")
    return found or (path if os.path.lexists(path) else inside)
