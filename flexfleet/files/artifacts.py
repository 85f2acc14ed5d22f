"""The files that the steps pass to each other: small JSON files with a schema, written completely or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator
from pydantic_core import to_json

from fl_engine.codecs import codecs_of
from fl_engine.core.errors import ConfigError, FlexfleetError, IntegrityError, brief
from fl_engine.core.fields import LeavesOut
from fl_engine.core.types import Codecs, Params, Pool, PoolModel, SubmodelSpec
from fl_engine.preparation.apoz import ApozLayer, ApozScores
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.serialization import Pieces
from fl_engine.storage.store import FolderStore, decode, sha256
from fl_engine.training.evaluation import OWNERS

__all__ = [
    "WEIGHTS", "Apoz", "ApozLayer", "Artifact", "BareHistory", "ConfusionFile", "EvaluationFile", "History", "Level",
    "LevelScore", "OnClients", "PoolFile", "Result", "RunFile", "Status", "history_of", "row_of", "rows_of",
]  # fmt: skip

A = TypeVar("A", bound="Artifact")
Status = Literal["finished", "diverged", "nothing_merged"]
"""How a run ended (`files.run_status`)."""
WEIGHTS = "weights.safetensors"
"""File beside pool.json with the weights of the whole network that the rounds start from, if they are given."""


class Strict(BaseModel):
    """An object without unknown keys. Its numbers are finite, because JSON has no others."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Artifact(Strict):
    """A JSON file of a step."""

    schema_version: Literal[1] = 1

    def write(self, path: Path) -> Path:
        FolderStore(path.parent).put(path.name, self.to_bytes())
        return path

    def to_bytes(self) -> bytes:
        return (self.model_dump_json(indent=1) + "\n").encode()

    @classmethod
    def read(cls: type[A], path: Path) -> A:
        """Raises IntegrityError, which names the file, if it is missing, unreadable or invalid."""
        try:
            return cls.of(path.read_bytes(), str(path))
        except FileNotFoundError:
            raise IntegrityError(f"{path} does not exist: the step that writes it has not run") from None
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error

    @classmethod
    def of(cls: type[A], value: bytes, name: str) -> A:
        """Raises IntegrityError, which names the file, if it is invalid."""
        try:
            return cls.model_validate_json(value)
        except ValidationError as error:
            raise IntegrityError(f"{name} is not a valid {cls.__name__} file: {brief(error)}") from error


class Apoz(ApozScores, Artifact):
    """pretrain/apoz.json. `layers` is empty if the algorithm needs no APoZ."""


class Level(Strict, LeavesOut):
    """One pool model. `flops` are multiply-adds per sample, `share` is that of the full model's parameters, and `bytes`
    are those of its tensors as they are sent (an upper bound if a codec's size depends on the values)."""

    left_out = ("tiers",)
    name: str
    params: int
    share: float
    flops: int
    bytes: int
    widths: dict[str, int]
    dispatched: bool
    reported: bool
    gamma: float | None
    ratios: tuple[float, ...]
    similarity: float | None = None
    """Similarity of the pruning ratios to those of a reference pre-trained on all data (FlexFL Sec. IV-C1)."""
    spec: dict[str, Any]
    ensemble: bool = False
    """Its prediction is the mean over its exits."""
    static_bn: bool = False
    """Batch norm uses statistics of the training data."""
    codecs: dict[str, dict[str, Any]] | None = None
    """The codecs of this level, as in a configuration; null for the run's."""
    bytes_up: int | None = None
    """Bytes of its tensors on the way back; null if no codec is used, so that they equal `bytes`."""
    tiers: dict[str, dict[str, dict[str, Any]] | None] = Field(default={})
    """The tiers whose devices are sent this level, each with its codecs (null for the run's); left out without
    tiers."""


class PoolFile(Artifact, LeavesOut):
    """pool/pool.json, smallest model first."""

    left_out = ("weights_sha256",)
    algorithm: str
    model: str
    input_chw: tuple[int, ...]
    """The shape of a sample, (C, H, W) for images."""
    classes: int
    """Outputs of the network."""
    groups: dict[str, int]
    """Widths of the full model's prunable layers, in network order."""
    weights_sha256: str | None = None
    """The sha256 of WEIGHTS; left out for fresh weights."""
    levels: tuple[Level, ...] = Field(min_length=1)

    def weights(self, folder: Path) -> Params | None:
        """The weights in the `folder` of pool.json; None for fresh ones. Raises IntegrityError if the file is missing
        or damaged."""
        if self.weights_sha256 is None:
            return None
        path = folder / WEIGHTS
        try:
            value = path.read_bytes()
        except OSError as error:
            raise IntegrityError(
                f"{path} cannot be read ({error.strerror}), but pool.json names it. Make the pool again"
            ) from error
        if (found := sha256(value)) != self.weights_sha256:
            raise IntegrityError(f"{path} is damaged: its sha256 is {found[:12]}, expected {self.weights_sha256[:12]}")
        return decode(value, str(path))

    def pool(self) -> Pool:
        """Raises IntegrityError, which names the level, if a `spec` is not a sub-model, or a codec does not exist."""
        return tuple(
            PoolModel(
                name=v.name,
                spec=_spec_of(v),
                params=v.params,
                share=v.share,
                macs=v.flops,
                dispatched=v.dispatched,
                reported=v.reported,
                gamma=v.gamma,
                ratios=v.ratios,
                ensemble=v.ensemble,
                static_bn=v.static_bn,
                codecs=_codecs_of(v, v.codecs),
                sizes=None if v.bytes_up is None else (v.bytes, v.bytes_up),
                tiers=tuple((tier, _codecs_of(v, told)) for tier, told in v.tiers.items()),
            )
            for v in self.levels
        )


def _spec_of(level: Level) -> SubmodelSpec:
    try:
        return SubmodelSpec.from_json(level.spec)
    except (FlexfleetError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise IntegrityError(f"pool.json: the spec of {level.name!r} is no sub-model: {error}") from error


def _codecs_of(level: Level, told: Mapping[str, Any] | None) -> Codecs | None:
    try:
        return None if told is None else codecs_of(told)
    except ConfigError as error:
        raise IntegrityError(f"pool.json: {level.name!r} has {error}") from error


class RunFile(Artifact):
    """run.json: what a run is, fixed when it starts."""

    run_id: str
    token: str = ""
    """Unique. A resumed run finds its MLflow run by it, and a private run derives its noise from it."""
    config: dict[str, Any]
    numerics: dict[str, Any]
    earlier_numerics: tuple[dict[str, Any], ...] = ()
    """Numerics of the rounds before each resume with --accept-numerics."""
    worker_numerics: tuple[str, ...] = ()
    """How the arithmetic of workers on other machines differed from the coordinator's."""
    pool_sha256: str
    partition_sha256: str
    trace_sha256: str | None = None
    """The sha256 of all files that `fleet.trace` names."""
    folders_sha256: str | None = None
    """The sha256 of the data in `partition.folders`; null unless this machine simulates clients with their own data."""
    sources: dict[str, str] = {}
    """Map names (package.module:Name) of the user's own code to the sha256 of its source."""
    code_sha256: str | None = None
    """The sha256 of the wheel of `run.code`, code/<sha256>.whl beside this file."""
    mlflow_run_id: str | None = None
    key_at: str | None = None
    """Where the run's key is stored (`keys`), for people to read."""
    key_sha256: str | None = None
    ledger_at: str | None = None
    """Where a private run's rounds are stored (`keys.address`); a run elsewhere is a copy."""
    noise_stream: str | None = None
    """How a private run's noise follows from its key (`privacy.STREAM`)."""
    noise_numerics: dict[str, Any] | None = None
    """What a private run's noise is computed with (`numerics.describe_noise`)."""


class History(Artifact):
    """history.json: measurements of every round (`fl_engine.storage.checkpoints.Row`), and the model's checksum."""

    rounds: tuple[dict[str, Any], ...]
    model_sha256: str
    seconds: float

    @field_validator("rounds")
    @classmethod
    def _of_rows(cls, value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        for row in value:
            row_of(row)
        return value


class BareHistory(History):
    """history.json without what it says of single clients, which is checked and left out. A round can have ten thousand
    clients, and most readers need none of them."""

    @classmethod
    def of(cls, value: bytes, name: str) -> BareHistory:
        try:
            return cls.model_validate(json.loads(value.decode(), object_hook=_without_lines))
        except ValidationError as error:
            raise IntegrityError(f"{name} is not a valid History file: {brief(error)}") from error
        except ValueError as error:
            raise IntegrityError(f"{name} is not JSON: {error}") from error


def history_of(rows: Iterable[Row], model_sha256: str) -> Pieces:
    """The bytes of history.json as `History.write` writes them, with one row at a time in memory."""
    parts, seconds = [b'{\n "schema_version": 1,\n "rounds": ['], 0.0
    for row in rows:
        text = to_json(row.model_dump(mode="json"), indent=1, inf_nan_mode="null")
        parts.append((b",\n  " if len(parts) > 1 else b"\n  ") + text.replace(b"\n", b"\n  "))
        seconds += row.metrics["seconds_round"]
    about = to_json({"model_sha256": model_sha256, "seconds": round(seconds, 3)}, indent=1)
    return Pieces((*parts, (b"\n ]" if len(parts) > 1 else b"]") + about.replace(b"{", b",", 1) + b"\n"))


def _without_lines(value: dict[str, Any]) -> dict[str, Any]:
    """A round of history.json, checked, without its clients. Raises ValidationError."""
    if not value.keys() >= {"round", "metrics", "clients"}:
        return value
    row_of(value)
    return {**value, "clients": []}


def row_of(value: dict[str, Any]) -> Row:
    """Parse an entry of `History.rounds`. A loss that diverged is null there, and is left out here."""
    metrics = value.get("metrics")
    measured = {k: v for k, v in metrics.items() if v is not None} if isinstance(metrics, dict) else metrics
    return Row.model_validate({**value, "metrics": measured})


def rows_of(history: History) -> tuple[Row, ...]:
    """`row_of` for every round, without checking it again."""
    return tuple(
        Row.model_construct(
            round=int(value["round"]),
            metrics={k: float(v) for k, v in value["metrics"].items() if v is not None and math.isfinite(float(v))},
            clients=tuple(value["clients"]),
        )
        for value in history.rounds
    )


class LevelScore(Strict):
    """A level in evaluation.json, written as `{"accuracy": 0.93, "loss": 0.2, "params": 97}`."""

    metrics: dict[str, float] = Field(min_length=1)
    """All metrics of the task, the deciding one first, and the accuracies of `evaluation.OWNERS` if the server owns
    classes."""
    loss: float | None
    """Null if the model has diverged."""
    params: int

    @property
    def value(self) -> float:
        """The value of the deciding metric."""
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
    """A level's local accuracy: mean and standard deviation over the clients (`fl_engine.training.local_accuracy`)."""

    mean: float = Field(ge=0, le=1)
    sd: float = Field(ge=0, le=1)
    clients: int = Field(ge=1)


Histogram = dict[Annotated[int, Field(ge=0, le=100)], Annotated[int, Field(ge=1)]]
"""Map accuracies in whole %, rounded down, to numbers of clients."""


class ClientFigures(Strict):
    """The deciding metric over the clients, each counted once (`fl_engine.rounds.at_clients`)."""

    mean: float
    p10: float
    worst: float
    spread: float = Field(ge=0)
    loss: float
    clients: int = Field(ge=1)


class OnClients(Strict):
    """What the clients measured in the last round on held-out samples: in all, by level and by tier."""

    asked: int
    failed: int
    all: ClientFigures
    levels: dict[str, ClientFigures]
    tiers: dict[str, ClientFigures]


class EvaluationFile(Artifact, LeavesOut):
    """evaluation.json: the final model on the whole test set. `avg` is the mean of the deciding metric over the levels,
    `full` the largest model's value. `local` is each level's local accuracy and `local_histogram` its distribution, if
    the task has classes. `on_clients` is the evaluation at the clients, if `evaluate.on` is `clients`."""

    left_out = ("local", "local_histogram", "on_clients")
    rounds: int
    test_samples: int
    avg: float
    full: float
    levels: dict[str, LevelScore] = Field(min_length=1)
    local: dict[str, LocalScore] = {}
    local_histogram: dict[str, Histogram] = {}
    on_clients: OnClients | None = None

    @property
    def metric(self) -> str:
        """The name of the deciding metric."""
        return next(iter(next(iter(self.levels.values())).metrics))

    @property
    def by_owner(self) -> dict[str, dict[str, float]]:
        """Map the metrics of `evaluation.OWNERS` to values by level; empty if the server owns no classes."""
        held = [name for name in OWNERS if name in next(iter(self.levels.values())).metrics]
        return {name: self._of_levels(name) for name in held}

    @property
    def further(self) -> dict[str, dict[str, Any]]:
        """The task's other metrics: {metric: {full, levels{name: value}}}."""
        names = [each for each in next(iter(self.levels.values())).metrics if each not in (self.metric, *OWNERS)]
        found = {name: self._of_levels(name) for name in names}
        return {name: {"full": list(levels.values())[-1], "levels": levels} for name, levels in found.items()}

    def _of_levels(self, metric: str) -> dict[str, float]:
        return {level: score.metrics[metric] for level, score in self.levels.items()}


class ConfusionFile(Artifact):
    """confusion.json: by level, the number of test samples of a class (row) that were classified as a class (column).
    Without levels if the task has no classes."""

    levels: dict[str, tuple[tuple[int, ...], ...]]


class Result(Artifact):
    """result.json, and what `--json` prints."""

    run_id: str
    status: Status
    """A `diverged` or `nothing_merged` model is not published."""
    metrics: dict[str, Any]
    """Metrics of the run, those in brackets if the configuration or the task has them:

    - avg, full, levels{level: value}; [further{metric: {full, levels}}]: the task's other metrics - best{round, avg,
    full}: the round with the best avg; highest{50, 80, 100: {avg, full}}: within these % of the rounds - [local{level:
    {mean, sd, clients}}]: accuracy on each client's own distribution - [on_clients{asked, failed, all, levels, tiers}]:
    measured by clients on held-out samples - [by_owner{metric: {level: value}}]: accuracy on the devices' and on the
    server's classes - means over the rounds of `fl_engine.fleet.uniformity` and `fl_engine.rounds.phases` -
    [label_noise]: share of wrong labels; [precision{level: {precision: figures, or {refused: why}}}] - updates{merged,
    failed, reasons{reason: count}}: the most frequent reason first """
    bytes: dict[str, int]
    """down, up."""
    waste: float
    seconds: float
    model_sha256: str
    store_uri: str
    mlflow_run_id: str | None
    report: str
