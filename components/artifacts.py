"""What the steps hand to each other: small JSON files with a schema, written whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from fl_engine.errors import IntegrityError, brief
from fl_engine.store import FolderStore
from fl_engine.types import Pool, PoolModel, SubmodelSpec

A = TypeVar("A", bound="Artifact")


class Artifact(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Literal[1] = 1

    def write(self, path: Path) -> Path:
        FolderStore(path.parent).put(path.name, (self.model_dump_json(indent=1) + "\n").encode())
        return path

    @classmethod
    def read(cls: type[A], path: Path) -> A:
        """Raises IntegrityError naming the file that is missing or not of this kind."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise IntegrityError(f"{path} does not exist: the step that writes it has not run") from None
        except ValidationError as error:
            raise IntegrityError(f"{path} is not a valid {cls.__name__} file: {brief(error)}") from error


class ApozLayer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    group: str
    size: int
    """Parameters of the layer."""
    apoz: float
    adjustment: float


class Apoz(Artifact):
    """pretrain/apoz.json. `layers` is empty where the algorithm does not ask for it."""

    layers: tuple[ApozLayer, ...]
    reference: tuple[float, ...] | None = None
    """APoZ after pre-training on all training data."""
    proxy_samples: int = 0
    proxy_accuracy: float | None = None
    seconds: float = 0.0


class Level(BaseModel):
    """One pool model. `flops` are multiply-adds per sample, `share` is of the full model's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True)
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
    """Of the pruning ratios to those of a reference pre-trained on all data (FlexFL Sec. IV-C1)."""
    spec: dict[str, Any]
    ensemble: bool = False
    """Answers with the mean over its exits."""
    static_bn: bool = False
    """Batch norm takes statistics of the training data."""


class PoolFile(Artifact):
    """pool/pool.json, smallest model first."""

    algorithm: str
    model: str
    input_chw: tuple[int, int, int]
    classes: int
    groups: dict[str, int]
    """Widths of the full model's prunable layers, in network order."""
    levels: tuple[Level, ...]

    def pool(self) -> Pool:
        return tuple(
            PoolModel(
                name=v.name,
                spec=SubmodelSpec.from_json(v.spec),
                params=v.params,
                share=v.share,
                macs=v.flops,
                dispatched=v.dispatched,
                reported=v.reported,
                gamma=v.gamma,
                ratios=v.ratios,
                ensemble=v.ensemble,
                static_bn=v.static_bn,
            )
            for v in self.levels
        )


class RunFile(Artifact):
    """run.json: what a run is, fixed when it starts."""

    run_id: str
    token: str = ""
    """Unique: by it a killed run finds the MLflow run that it had begun."""
    config: dict[str, Any]
    numerics: dict[str, Any]
    earlier_numerics: tuple[dict[str, Any], ...] = ()
    """Of the rounds before a resume with --accept-numerics: such a run is repeatable only in the same stretches."""
    pool_sha256: str
    partition_sha256: str
    mlflow_run_id: str | None = None


class History(Artifact):
    """history.json: every round's measurements (`fl_engine.ledger.Row`), and the final model's checksum."""

    rounds: tuple[dict[str, Any], ...]
    model_sha256: str
    seconds: float


class LevelScore(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    accuracy: float
    loss: float
    params: int


class EvaluationFile(Artifact):
    """evaluation.json: the final model on the whole test set. `full` is the largest model's accuracy."""

    rounds: int
    test_samples: int
    avg: float
    full: float
    levels: dict[str, LevelScore]


class ConfusionFile(Artifact):
    """confusion.json: by level, how many test images of a class (row) the final model took for which (column)."""

    levels: dict[str, tuple[tuple[int, ...], ...]]


class Result(Artifact):
    """result.json, and what `--json` prints."""

    run_id: str
    status: Literal["finished"]
    metrics: dict[str, Any]
    """avg, full, levels{name: accuracy}, best{round, avg, full}: the round with the best avg."""
    bytes: dict[str, int]
    """down, up."""
    waste: float
    seconds: float
    model_sha256: str
    store_uri: str
    mlflow_run_id: str | None
    report: str
