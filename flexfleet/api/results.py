"""Read the result of a run from the run's folder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_engine.backends.in_process import prepare_process
from fl_engine.core.clients import kept_parameters, personal_weights
from fl_engine.core.contracts import HasPersonalModels
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.slicing import runnable
from fl_engine.core.text import path_of
from fl_engine.core.types import Params, PoolModel
from fl_engine.data.local_data import LOCAL
from fl_engine.data.partition import Partition
from fl_engine.models import export as exports
from fl_engine.rounds.replay import ClientRound
from fl_engine.selection.capacity import level_of
from fl_engine.storage.store import decode
from fl_engine.storage.tensor_files import named
from fl_engine.training.evaluation import weights_of
from fl_engine.training.local import OnStep
from flexfleet.api.arguments import plain, with_own_data
from flexfleet.api.callbacks import Callback
from flexfleet.api.calls import api_call, find_folder, run_watched, table
from flexfleet.api.stored_run import StoredRun
from flexfleet.config import parse_with_algorithm
from flexfleet.config.dotted import applied
from flexfleet.files.artifacts import ConfusionFile, RunFile
from flexfleet.files.measure import levels_in, measure_in
from flexfleet.files.run_status import tally_of
from flexfleet.pipeline.partition import fleet_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.recompute import Verified, replay_client, verify
from flexfleet.pipeline.status import OF_STUDY

if TYPE_CHECKING:
    from pandas import DataFrame


class Result(StoredRun):
    """Result of a finished run, or of a stopped run that can be resumed. Tables are DataFrames if pandas is installed,
    otherwise lists of mappings.

    Attributes:
        run_id: Name of the run.
        folder: Folder of the run.
        config: Configuration of the run, as nested mappings.
        status: `finished`, `stopped` (can be resumed), or `diverged` or `nothing_merged` (the model is not usable).
        metrics: Metrics of the last evaluation: avg, full, levels {name: value}, ... (see `files.artifacts.RunResult`).
        report: Path of the HTML report; None for a stopped run.
        model_sha256: The sha256 of the final weights; None for a stopped run.
        history: Table with one row for each round.
        clients: Table with one row for each round and each client that trained, failed or evaluated its model in this
            round. If `evaluate.on=clients`, a column contains the metric that the client measured.
        partition: Map each client to an int64 array (n,) with the indices of its training samples in the data set.
        levels: Table with size, multiply-adds, bytes and score of each sub-model.
        params: A copy of the global model's state_dict.

    Examples:
        >>> result = flexfleet.run(rounds=5)
        >>> result.metrics["avg"], result.history
    """

    def __repr__(self) -> str:
        scores = ""
        if "avg" in self.metrics:
            measure = measure_in(self._scored)
            scores = f", avg {measure.with_unit(self.metrics['avg'])}, full {measure.with_unit(self.metrics['full'])}"
        tally, rounds = tally_of(row.metrics for row in self._rows), len(self._rows)
        more = ""
        if self.status == "stopped":
            more = f"; finish all {self._config.rounds.stop} rounds with .resume()"
            if 0 < rounds < self._config.rounds.stop:
                more += f", or finish after round {rounds} with .resume(rounds={rounds})"
        return f"<flexfleet.Result {self.run_id}: {self.status}, round {rounds}{scores}, {tally}{more}>"

    # ------------------------------------------------------------------------------------------------ figures
    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def config(self) -> dict[str, Any]:
        return copy.deepcopy(self._run.config)  # return a copy, because callers may change the result

    @property
    def report(self) -> Path | None:
        return None if self._result is None else self.folder / "report.html"

    @property
    def model_sha256(self) -> str | None:
        return None if self._result is None else self._result.model_sha256

    @property
    def metrics(self) -> dict[str, Any]:
        if self._result is not None:
            return copy.deepcopy(self._result.metrics)
        scored = self._scored
        return {"avg": scored["avg"], "full": scored["full"], "levels": levels_in(scored)} if scored else {}

    @property
    def history(self) -> DataFrame:
        return table(self._history)

    @property
    def _history(self) -> list[dict[str, Any]]:
        return [{"round": row.round + 1, **row.metrics} for row in self._rows]

    @property
    def clients(self) -> DataFrame:
        rows: list[dict[str, Any]] = []
        for row in self._rows:
            lines = {line["client"]: {"round": row.round + 1, **line} for line in row.clients}
            for line in row.evaluations:
                given = lines.get(line["client"], {"round": row.round + 1, "sent": line["level"]})
                scores = {key: value for key, value in line.items() if key not in ("level", "tier", "loss")}
                lines[line["client"]] = {**given, **scores}
            rows += [lines[client] for client in sorted(lines)]
        return table(rows)

    @cached_property
    def partition(self) -> dict[int, NDArray[np.int64]]:
        parts = Partition.load(self.folder / "partition").clients
        return {client: np.array(indices) for client, indices in enumerate(parts)}

    def client_data(self, client: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of a client's samples and targets. The samples are not normalised. Samples that the client
        holds out for evaluation are included.

        Args:
            client: Number of the client.

        Raises:
            ConfigError: The client does not exist, or the clients have their own data (`partition.rule=local`).

        Examples:
            >>> x, y = result.client_data(3)
        """
        if self._config.partition.rule == LOCAL:
            raise ConfigError.at("partition.rule=local: only the clients can read their samples")
        chosen = torch.from_numpy(self.partition[self._client(client)])
        with self._resolved(("dataset",)) as resolved:
            return resolved.data.train_x[chosen], resolved.data.train_y[chosen]

    def _client(self, client: int) -> int:
        if isinstance(client, bool) or not hasattr(client, "__index__") or client not in self.partition:
            raise ConfigError.at(f"client must be from 0 to {len(self.partition) - 1}, got {client!r}")
        return int(client)

    @property
    def levels(self) -> DataFrame:
        scores, local = self.metrics.get("levels", {}), self.metrics.get("local", {})
        sizes = ("name", "params", "share", "macs", "bytes", "dispatched", "reported")
        lines = [{key: getattr(level, key) for key in sizes} for level in self._pool.levels]
        for line in lines:
            found = local.get(line["name"], {})
            line.update(score=scores.get(line["name"]), local=found.get("mean"), local_sd=found.get("sd"))
        return table(lines)

    # -------------------------------------------------------------------------------------------------- model
    @property
    def params(self) -> Params:
        return {name: tensor.clone() for name, tensor in self._params.items()}  # copies, which callers may change

    @cached_property
    def _params(self) -> Params:
        if self._result is not None:
            return decode((self.folder / "model.safetensors").read_bytes(), str(self.folder / "model.safetensors"))
        last = max(self._ledger.checkpoints.commits(), default=None)
        if last is None:
            raise ConfigError(f"{self.run_id} has no committed round yet. Resume it")
        tensors, _ = self._ledger.checkpoints.read(last)
        prefix = "params/"
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    def model(self, level: str | None = None) -> nn.Module:
        """Return a copy of a level's network in evaluation mode. The network expects raw samples of the data set. If
        the batch-norm layers do not have statistics, the statistics are computed from the server's proxy data.

        Args:
            level: Name of the level; None for the largest level.

        Raises:
            ConfigError: The level does not exist, proxy data are required but missing, or the code of the network or
                data set has changed.

        Examples:
            >>> result.model("M1")(data.test_x).argmax(1)
        """
        with self._resolved(("model", "dataset")) as resolved:
            member = self._member(level)
            return self._network(resolved, member, weights_of(self._params, resolved.family.layout(), member))

    def _member(self, level: str | None) -> PoolModel:
        pool = self._pool.pool()
        names = [member.name for member in pool]
        wanted = names[-1] if level is None else level
        if wanted not in names:
            raise ConfigError(f"there is no level {wanted!r}{nearest(str(wanted), names)}", path="level")
        return pool[names.index(wanted)]

    @api_call
    def export(self, level: str | None, path: str | Path, *, onnx: bool = True) -> Path:
        """Write the files of a level into a folder, for inference on a device: `model.onnx` (for raw samples, without
        flexfleet), `model.safetensors` (the weights) and `submodel.json` (a description of the network).
        `fl_engine.models.export.load` loads the level in Python.

        Args:
            level: Name of the level; None for the largest level.
            path: The folder. A missing folder is created.
            onnx: True to write `model.onnx`, which requires the extra `export`.

        Returns:
            The folder.

        Raises:
            ConfigError: The level does not exist or was not evaluated, or the network cannot be exported.
            EnvironmentFailure: The packages for ONNX are not installed.

        Examples:
            >>> result.export("M1", "device/M1")
        """
        folder = path_of(path)
        if folder.suffix == ".onnx":
            raise ConfigError.at(f"path must be a folder, not an .onnx file, got {str(path)!r}")
        with self._resolved(("model", "dataset")) as resolved:
            member, data = self._member(level), resolved.data
            score = self.metrics.get("levels", {}).get(member.name)
            if score is None:
                known = ", ".join(self.metrics.get("levels", {})) or "none"
                raise ConfigError.at(f"level {member.name} has no test score. Levels with a score: {known}")
            prepare_process(("cpu",))
            name, proxy = resolved.config.model["name"], self._proxy(resolved)
            _, network = exports.export(name, resolved.family, self._params, member, data, proxy, score, folder)
            if onnx:
                exports.to_onnx(network, data, folder / exports.ONNX)
        return folder

    def _proxy(self, resolved: Resolved) -> torch.Tensor:
        """Return the indices of the server's proxy samples."""
        parts = Partition.load(self.folder / "partition", resolved.data)
        return torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))

    def personal(self, client: int) -> nn.Module:
        """Return the personal model of a client in evaluation mode. The model has the level of the client's device. In
        FedPer and FedBN, the model consists of global parameters and the parameters that the client keeps. In Ditto,
        each client has a separate model. For a client that has never been selected, the global model is returned.

        Args:
            client: Number of the client.

        Raises:
            ConfigError: The client does not exist, or the algorithm does not have personal models.

        Examples:
            >>> x, y = result.client_data(3)
            >>> (result.personal(3)(x).argmax(1) == y).float().mean()
        """
        client = self._client(client)
        with self._resolved() as resolved:
            algorithm, family, pool = resolved.algorithm, resolved.family, self._pool.pool()
            if not kept_parameters(algorithm, family, pool) and not isinstance(algorithm, HasPersonalModels):
                raise ConfigError(f"{type(algorithm).__name__} trains one model for all clients. Use result.model()")
            member = pool[level_of(fleet_of(resolved, pool)[client], pool)]
            weights = weights_of(self._params, family.layout(), member)  # raises an error if no round was committed
            files = named(self._ledger.checkpoints.rest(max(self._ledger.checkpoints.commits())))
            state = self._ledger.states.get(files[client]) if client in files else {}
            return self._network(resolved, member, personal_weights(algorithm, state, weights))

    def _network(self, resolved: Resolved, member: PoolModel, views: Params) -> nn.Module:
        """Return the level's network in evaluation mode, with a copy of the weights in `views`."""
        data, family = resolved.data, resolved.family
        prepare_process(("cpu",))
        weights = {name: tensor.clone() for name, tensor in views.items()}
        family, weights = exports.with_statistics(family, weights, member, data, self._proxy(resolved))
        return exports.raw_network(runnable(family, member.spec, weights).eval(), data, member.ensemble)

    def confusion(self, level: str | None = None) -> DataFrame:
        """Return the confusion matrix of a reported level. Each cell is the number of test samples (for segmentation,
        pixels) with a true class (row) and a predicted class (column). Rows and columns have class names, if known.

        Args:
            level: Name of the level; None for the largest level.

        Raises:
            ConfigError: The run is not finished, the task does not have classes, or the level is not reported.

        Examples:
            >>> result.confusion("M1")
        """
        if self._result is None:
            raise ConfigError(f"{self.run_id} has not finished, so its confusion matrix does not exist. Resume it")
        file = ConfusionFile.read(self.folder / "confusion.json")
        found = file.levels
        if not found:
            raise ConfigError(f"{self.run_id} has no confusion matrix, because its task has no classes")
        wanted = list(found)[-1] if level is None else level
        if wanted not in found:
            raise ConfigError(f"there is no reported level {wanted!r}{nearest(str(wanted), found)}")
        names = file.names or tuple(map(str, range(len(found[wanted]))))
        return table([dict(zip(names, row, strict=True)) for row in found[wanted]], file.names)

    # ------------------------------------------------------------------------------------------------- rounds
    @api_call
    def resume(
        self,
        rounds: int | None = None,
        *,
        mlflow_uri: str | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
    ) -> Result:
        """Continue a stopped run, or extend a finished run with more rounds.

        Args:
            rounds: Total number of rounds, including finished rounds; None for the configured number.
            mlflow_uri: Address of MLflow, if it has changed or has a password. run.json does not contain passwords.
            callbacks: As in `flexfleet.run`.
            progress: As in `flexfleet.run`.

        Returns:
            The new result.

        Raises:
            FlexfleetError: The run cannot be resumed. The errors of `flexfleet.run` are also raised.

        Examples:
            >>> result.resume(rounds=20)
        """
        folder = self.folder if self.folder.name != ".." else self.folder.resolve()
        run = RunFile.read(folder / "run.json")  # read the run's ID, because the folder may be a renamed copy
        given = {"run.store": folder.parent, "rounds.stop": rounds, "tracking.mlflow": mlflow_uri}
        values = applied(run.config, {path: plain(value, path) for path, value in given.items() if value is not None})
        config, algorithm = parse_with_algorithm(values, stored=True)
        config = with_own_data(config, folder)
        if config.run.remote is not None and run.run_id != folder.name and folder.parent.name in OF_STUDY:
            study = folder.resolve().parent.parent.name
            raise ConfigError(f"{folder} belongs to the study {study} and cannot be resumed alone. Resume the study")
        try:
            return run_watched(Resolved(config, algorithm), folder.name, True, callbacks, progress, Result)
        finally:  # clear cached values, because the files have changed
            vars(self).clear()
            self.folder, self._made = folder, None

    def replay(
        self, round: int, client: int, *, settings: Mapping[str, Any] | None = None, on_step: OnStep | None = None
    ) -> ClientRound:
        """Repeat the training of one client in one round.

        The rounds since the last stored state are also repeated. To store the state after each round, run with
        options={'run.keep': 'all'}.

        Args:
            round: Number of the round, counted from 1.
            client: Number of the client.
            settings: Parameters of the algorithm or the training that change for this training only.
            on_step: Function that is called with the sub-model, its weights and the batch before each step.

        Returns:
            The assignment, the weights before training, the update, and the difference between update and weights.

        Raises:
            ConfigError: The client was not selected or failed, or this machine does not have the client's data or
                memory.
            IntegrityError: The run's files or data have changed.
            EnvironmentFailure: This machine cannot produce bit-identical results.

        Examples:
            >>> result.replay(round=2, client=7).change
        """
        for name, value in (("round", round), ("client", client)):
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise ConfigError.at(f"{name} must be a whole number, got {value!r}")
        with self._resolved() as resolved:
            return replay_client(resolved, self.folder, self._run, round - 1, client, settings or {}, on_step)

    def verify(
        self,
        rounds: Collection[int] = (),
        *,
        sample: int = 0,
        all: bool = False,
        public_key: str | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Verified:
        """Check that nothing in the run has changed, and compute parts of the run again.

        The files, the hash chain of the rounds and the signature are always checked. On a machine that produces the
        same bits, kept updates (`run.keep`) are merged again, and the final model is evaluated again.

        Args:
            rounds: Rounds whose clients train again, counted from 1.
            sample: Number of additional rounds, drawn at random, whose clients train again.
            all: True to train all rounds again.
            public_key: Expected key of the signature, for example from a paper.
            progress: Function that receives a line of text for each round that was computed again.

        Raises:
            IntegrityError: Something differs. The message names the first file, round or client.
            ConfigError: The run does not have one of the rounds.

        Examples:
            >>> result.verify(sample=1).trained
        """
        with self._resolved() as resolved:
            chosen = [each - 1 for each in rounds]
            return verify(resolved, self.folder, self._run, chosen, sample, all, public_key, progress)


def load(run: str | Path | Result) -> Result:
    """Open a run without importing code. If the run uses your own network, algorithm or data set, first import its
    module.

    Args:
        run: Folder of the run, or its name in the folder `runs`.

    Returns:
        The run.

    Raises:
        ConfigError: The run does not exist.
        IntegrityError: A file has changed since the run finished.

    Examples:
        >>> flexfleet.load("runs/a").history
    """
    return Result(find_folder(run, "run.json"))
