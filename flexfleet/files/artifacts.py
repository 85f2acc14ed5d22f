"""Define the JSON files that steps pass to each other. Each file has a schema and is written atomically."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, PrivateAttr, ValidationError, field_serializer, model_serializer, model_validator

from fl_engine.codecs import codecs_of
from fl_engine.core.errors import FlexfleetError, IntegrityError, brief
from fl_engine.core.fields import LeavesOut
from fl_engine.core.records import Strict, parsed, read_bytes
from fl_engine.core.types import Codecs, Params, Pool, PoolModel, SubmodelSpec
from fl_engine.preparation.apoz import ApozScores
from fl_engine.rounds import chain
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore, Pieces, decode
from fl_engine.training.evaluation import OWNERS

A = TypeVar("A", bound="Artifact")
Status = Literal["finished", "diverged", "nothing_merged"]
"""Status of an ended run (`files.run_status`)."""
WEIGHTS = "weights.safetensors"
"""Name of the optional file with the network's initial weights, in the folder of pool.json."""


def read_params(path: Path, expected: str) -> Params:
    """Read tensors from an earlier step. Raises the same errors as `read_bytes`."""
    return decode(read_bytes(path, expected), str(path))


class Artifact(Strict):
    """A JSON file that a step writes."""

    schema_version: Literal[1] = 1

    def write(self, path: Path) -> Path:
        FolderStore(path.parent).put(path.name, self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def read(cls: type[A], path: Path) -> A:
        """Read the file. Raises IntegrityError with the path if the file is missing or invalid."""
        return cls.of(read_bytes(path), str(path))

    @classmethod
    def of(cls: type[A], value: bytes, name: str) -> A:
        """Parse the contents of the file `name`. Raises IntegrityError with this name if the contents are invalid."""
        return parsed(cls, value, name)


class Apoz(ApozScores, Artifact):
    """APoZ scores in pretrain/apoz.json. `layers` is empty if the algorithm does not need APoZ scores."""


AS_IN_POOL = (
    "name", "params", "share", "macs", "dispatched", "reported", "gamma", "ratios", "ensemble", "static_bn",
)  # fmt: skip
"""Fields that `Level` and `PoolModel` have in common."""


class Level(Strict, LeavesOut):
    """A pool model in pool.json. `macs` are multiply-adds per sample, and `share` is the fraction of the full model's
    parameters. `bytes` is the size of the encoded tensors, or an upper bound if the size depends on the values."""

    left_out = ("tiers",)
    name: str
    params: int
    share: float
    macs: int
    bytes: int
    widths: dict[str, int]
    dispatched: bool
    reported: bool
    gamma: float | None
    ratios: tuple[float, ...]
    similarity: float | None = None
    """Similarity of the pruning ratios to the ratios after pre-training on all training data (FlexFL Sec. IV-C1)."""
    spec: dict[str, Any]
    ensemble: bool = False
    """True if the prediction is the mean over the exits of the network."""
    static_bn: bool = False
    """True if batch norm uses statistics that are computed on the training data."""
    codecs: dict[str, dict[str, Any]] | None = None
    """Codecs for this level, in the format of the section `codec`; null if the level uses the codecs of the run."""
    bytes_up: int | None = None
    """Bytes of the uploaded tensors; null if no codec is set, because the upload then has the same size (`bytes`)."""
    tiers: dict[str, dict[str, dict[str, Any]] | None] = Field(default={})
    """Map each tier whose devices receive this level to the tier's codecs; null for the codecs of the run."""


class PoolFile(Artifact, LeavesOut):
    """Contents of pool/pool.json: the pool models, with the smallest model first."""

    left_out = ("weights_sha256",)
    algorithm: str
    model: str
    input_chw: tuple[int, ...]
    """Shape of a sample, (C, H, W) for images."""
    classes: int
    """Number of outputs of the network."""
    groups: dict[str, int]
    """Widths of the full model's prunable layers, in network order."""
    weights_sha256: str | None = None
    """The sha256 of the file WEIGHTS; omitted if the weights are initialized randomly."""
    levels: tuple[Level, ...] = Field(min_length=1)

    def weights(self, folder: Path) -> Params | None:
        """Return the initial weights from `folder`; None if the weights are initialized randomly. Raises IntegrityError
        if the file is missing or damaged."""
        if self.weights_sha256 is None:
            return None
        return read_params(folder / WEIGHTS, self.weights_sha256)

    def pool(self) -> Pool:
        """Return the pool models. Raises IntegrityError with the level's name if a `spec` or a codec is invalid."""
        return tuple(map(_model_of, self.levels))


def _model_of(level: Level) -> PoolModel:
    def codecs(section: Mapping[str, Any] | None) -> Codecs | None:
        return None if section is None else codecs_of(section)

    try:
        return PoolModel(
            **{name: getattr(level, name) for name in AS_IN_POOL},
            spec=SubmodelSpec.from_json(level.spec),
            codecs=codecs(level.codecs),
            sizes=None if level.bytes_up is None else (level.bytes, level.bytes_up),
            tiers=tuple((tier, codecs(section)) for tier, section in level.tiers.items()),
        )
    except (FlexfleetError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"pool.json: the level {level.name!r} is not valid: {error}") from error


class Forked(Strict):
    """Origin of a fork (`flexfleet fork`), which shares its first rounds with another run."""

    run_id: str
    round: int
    """Number of shared rounds."""
    link: str
    """Link of the last shared round (`rounds.chain`); empty if no round is shared."""


class RunFile(Artifact):
    """Configuration and inputs of a run, which are stored in run.json when the run starts."""

    run_id: str
    token: str = ""
    """Unique token of the run, which identifies its MLflow run and is an input to the noise of a private run."""
    config: dict[str, Any]
    numerics: dict[str, Any]
    earlier_numerics: tuple[dict[str, Any], ...] = ()
    """Previous values of `numerics`, each from before a resume with --accept-numerics."""
    worker_numerics: tuple[str, ...] = ()
    """Descriptions of numerical differences between remote workers and the coordinator."""
    pool_sha256: str
    partition_sha256: str
    trace_sha256: str | None = None
    """The sha256 of all files in `fleet.trace`."""
    folders_sha256: str | None = None
    """The sha256 of the data in `partition.folders`; null if this parameter is not set."""
    sources: dict[str, str] = Field(default={})
    """Map classes and functions of the user (package.module:Name) to the sha256 of their source code."""
    code_sha256: str | None = None
    """The sha256 of the wheel with the user's code (`run.code`). The wheel is stored as code/<sha256>.whl."""
    forked: Forked | None = None
    mlflow_run_id: str | None = None
    key_at: str | None = None
    """Address of the run's key, for error messages only."""
    key_sha256: str | None = None
    ledger_at: str | None = None
    """Address of a private run's ledger (`keys.address`). A ledger at another address is a copy of the run."""
    noise_stream: str | None = None
    """Version of the method that derives the noise of a private run from its key (`privacy.STREAM`)."""
    noise_numerics: dict[str, Any] | None = None
    """Numerics of the noise in a private run (`numerics.describe_noise`)."""


class History(Artifact):
    """Contents of history.json: the metrics of every round, and the checksum of the model. The entries of clients are
    validated and counted but not stored in memory, because a round can have ten thousand clients. Rounds are counted
    from 1 in the file and from 0 in `rounds`."""

    rounds: tuple[Row, ...]
    model_sha256: str
    seconds: float
    public_key: str = ""
    """Ed25519 key of the coordinator in hexadecimal digits; empty for a central training."""
    signature: str = ""
    """Signature of the last round's link and of `model_sha256` (`rounds.chain`)."""
    _results: Counter[tuple[int, str]] = PrivateAttr(default_factory=Counter)

    @property
    def results(self) -> Mapping[tuple[int, str], int]:
        """Map each tuple (client, code of the failure) to its number of results. Merged updates have the code ""."""
        return self._results

    @field_serializer("rounds")
    def _counted(self, rows: tuple[Row, ...]) -> list[Row]:
        return [_from_one(row) for row in rows]

    @classmethod
    def of(cls, value: bytes, name: str) -> History:
        results = Counter[tuple[int, str]]()
        try:
            found = json.loads(value.decode(), object_hook=partial(_without_clients, results))
            history = cls.model_validate(found)
        except ValueError as error:
            reason = brief(error) if isinstance(error, ValidationError) else error
            raise IntegrityError(f"{name} is not a valid History file: {reason}") from error
        history._results = results
        return history


def _from_one(row: Row) -> Row:
    return row.model_copy(update={"round": row.round + 1})


def _without_clients(results: Counter[tuple[int, str]], value: dict[str, Any]) -> dict[str, Any] | Row:
    """Parse a round of history.json. Count its entries for clients in `results`, and keep only entries with details of
    failures. Return other objects unchanged."""
    is_round = value.keys() >= {"round", "metrics", "clients"}
    if not is_round:
        return value
    row = Row.model_validate(value)
    for line in row.clients:
        results[line["client"], line.get("code", "")] += 1
    failed = tuple(line for line in row.clients if "details" in line)
    return row.model_copy(update={"round": row.round - 1, "clients": failed})


def history_of(rows: Iterable[Row], model_sha256: str, secret: bytes | None = None) -> Pieces:
    """Return the bytes of history.json, signed with a key that is derived from `secret`. Only one row at a time is kept
    in memory."""
    parts, seconds, link = [b'{\n "schema_version": 1,\n "rounds": ['], 0.0, ""
    for row in rows:
        parts.append((b",\n  " if len(parts) > 1 else b"\n  ") + _from_one(row).model_dump_json().encode())
        seconds += row.metrics["seconds_round"]
        link = row.link
    public_key, signature = ("", "") if secret is None else chain.sign(secret, link, model_sha256)
    end = f'],\n "model_sha256": "{model_sha256}",\n "seconds": {round(seconds, 3)},\n'
    end += f' "public_key": "{public_key}",\n "signature": "{signature}"\n}}\n'
    return Pieces((*parts, end.encode()))


class LevelScore(Strict):
    """Scores of a level in evaluation.json, for example `{"accuracy": 0.93, "loss": 0.2, "params": 97}`."""

    metrics: dict[str, float] = Field(min_length=1)
    """Metrics of the task, with the main metric first, and with `evaluation.OWNERS` if the server owns classes."""
    loss: float | None
    """Loss; null if the model has diverged."""
    params: int

    @property
    def value(self) -> float:
        """Value of the main metric."""
        return next(iter(self.metrics.values()))

    @model_validator(mode="before")
    @classmethod
    def _gathered(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "metrics" in given:
            return given
        beside = {name: value for name, value in given.items() if name in ("loss", "params")}
        return {"metrics": {name: value for name, value in given.items() if name not in beside}, **beside}

    @model_serializer
    def _beside(self) -> dict[str, Any]:
        return {**self.metrics, "loss": self.loss, "params": self.params}


class LocalScore(Strict):
    """Mean and standard deviation of a level's local accuracy over the clients (`training.local_accuracy`)."""

    mean: float = Field(ge=0, le=1)
    sd: float = Field(ge=0, le=1)
    clients: int = Field(ge=1)


Histogram = dict[Annotated[int, Field(ge=0, le=100)], Annotated[int, Field(ge=1)]]
"""Map each accuracy in percent, rounded down, to the number of clients with this accuracy."""


class ClientFigures(Strict):
    """Statistics of the main metric over the clients. Each client has the same weight."""

    mean: float
    p10: float
    worst: float
    spread: float = Field(ge=0)
    loss: float
    clients: int = Field(ge=1)


class OnClients(Strict):
    """Metrics on the clients' held-out samples in the last round, for all clients, for each level and for each tier."""

    asked: int
    failed: int
    all: ClientFigures
    levels: dict[str, ClientFigures]
    tiers: dict[str, ClientFigures]


class EvaluationFile(Artifact, LeavesOut):
    """Contents of evaluation.json: the metrics of the final model on the whole test set. `avg` is the mean of the main
    metric over the levels, and `full` is the value for the largest model. `local` and `local_histogram` are the local
    accuracies and their distribution, and are empty if the task has no classes."""

    left_out = ("local", "local_histogram", "on_clients", "kept_by_clients")
    rounds: int
    test_samples: int
    avg: float
    full: float
    levels: dict[str, LevelScore] = Field(min_length=1)
    local: dict[str, LocalScore] = Field(default={})
    local_histogram: dict[str, Histogram] = Field(default={})
    on_clients: OnClients | None = None
    kept_by_clients: tuple[str, ...] = ()
    """Model parameters that differ between clients. In the evaluated model, they have their initial values."""

    @property
    def metric(self) -> str:
        """Name of the main metric."""
        return next(iter(next(iter(self.levels.values())).metrics))

    @property
    def by_owner(self) -> dict[str, dict[str, float]]:
        """Map the metrics in `evaluation.OWNERS` to {level: value}; empty if the server does not own classes."""
        held = [name for name in OWNERS if name in next(iter(self.levels.values())).metrics]
        return {name: self._of_levels(name) for name in held}

    @property
    def further(self) -> dict[str, dict[str, Any]]:
        """Metrics other than the main metric and OWNERS: {metric: {full: value, levels: {level: value}}}."""
        names = [each for each in next(iter(self.levels.values())).metrics if each not in (self.metric, *OWNERS)]
        found = {name: self._of_levels(name) for name in names}
        return {name: {"full": list(levels.values())[-1], "levels": levels} for name, levels in found.items()}

    def _of_levels(self, metric: str) -> dict[str, float]:
        return {level: score.metrics[metric] for level, score in self.levels.items()}


class ConfusionFile(Artifact):
    """Contents of confusion.json: the confusion matrix of each level, with a row for each true class and a column for
    each predicted class. `levels` is empty if the task has no classes."""

    names: tuple[str, ...] = ()
    """Names of the classes; empty if the task does not name its classes."""
    levels: dict[str, tuple[tuple[int, ...], ...]]


class Forecast(Artifact):
    """Contents of forecast.json (`pipeline.forecast`). A figure has the keys value, low, high and unit, and, after the
    run, real. The file of a run has no levels and no tiers."""

    figures: dict[str, dict[str, Any]]
    levels: tuple[dict[str, Any], ...] = ()
    tiers: tuple[dict[str, Any], ...] = ()


class RunResult(Artifact):
    """Result of a run in result.json. The option `--json` prints the same object."""

    run_id: str
    status: Status
    """Status of the run. The model is published only if the status is `finished`."""
    metrics: dict[str, Any]
    """Metrics of the run:

    - avg, full, levels: Main metric as a mean over the levels, for the largest level, and for each level.
    - best: Number, `avg` and `full` of the round with the best `avg`.
    - highest: Highest `avg` and highest `full` in the first 50, 80 and 100 % of the rounds.
    - updates: Numbers of merged updates, of failed updates, and of failures by reason (most frequent reason first).
    - Means of timing metrics over the rounds (`fl_engine.rounds.timing`).

    The following metrics are omitted if the configuration or the task does not have them:

    - further: Other metrics of the task.
    - local: Accuracy of each level on a client's own distribution, as mean and standard deviation over the clients.
    - on_clients: Metrics that clients measured on held-out samples (`OnClients`).
    - kept_by_clients: Parameters that differ between clients and have their initial values in the evaluated model.
    - by_owner: Accuracy of each level on the devices' classes, and on the server's classes.
    - label_noise: Fraction of wrong labels.
    - backdoor_success: Success rate of the back door after the last round (`rounds.faults`).
    - precision: Metrics of each exported level in each precision, or the reason why this precision was rejected.
    """
    bytes: dict[str, int]
    """Total bytes that were sent to the clients (`down`) and to the server (`up`)."""
    waste: float
    seconds: float
    model_sha256: str
    store_uri: str
    mlflow_run_id: str | None
    report: str
    forecast: dict[str, dict[str, Any]] = Field(default={})
    """Figures in forecast.json; empty if the run has no forecast."""
