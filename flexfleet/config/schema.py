"""Define and check the parameters in params.yaml, as a typed and immutable configuration.

The defaults configure a complete run of FlexFL on scikit-learn's handwritten digits, with the paper's fleet. The
docstring of a field describes its parameter. The error for an unknown key suggests the most similar known key. Values
are never converted silently.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fl_engine.algorithms.training import Training
from fl_engine.core.augmentation import Augmenting
from fl_engine.core.fields import (
    Count,
    Fraction,
    Moves,
    NotNegative,
    Positive,
    Section,
    Unseen,
    UserPath,
    is_model,
    user_path,
)
from fl_engine.core.steps import Constant, Scheduling
from fl_engine.core.text import is_address
from fl_engine.data.partitioning import PartitionConfig
from fl_engine.fleet.devices import DEFAULT, Tier
from fl_engine.fleet.trace_files import Tracing
from fl_engine.models.build import INIT
from fl_engine.models.onnx_precisions import OnnxPrecision
from fl_engine.remote.settings import AgentsConfig, KubernetesConfig
from fl_engine.rounds import fault_injection
from fl_engine.rounds.options import NORM_BOUND, EvaluateConfig, RoundsConfig
from fl_engine.training.numerics import Precision, Strategy

UNSET = "default"
"""Value of an option of the network or algorithm that is not set. The option may belong to another registered network
or algorithm, so that params.yaml remains valid if only the name is changed."""


class DatasetConfig(Section):
    name: str = "digits"
    """A data set of `fl_engine.datasets`, or package.module:NAME."""
    root: Annotated[UserPath | None, Moves.PLACE] = None
    """Folder of the data files, or `repo@rev:path` in a DVC repository (git's credential helper supplies passwords).
    With null, the folder is FLEXFLEET_DATA, or ~/.cache/flexfleet/data if this variable is not set."""
    train_samples: Count | None = None
    """Number of training samples to use; null for all samples."""
    test_samples: Count | None = None
    """Number of test samples to use; null for all samples."""
    pad: Literal["auto", "none"] | Count = "auto"
    """Image size after zero-padding; auto for the smallest size that the network accepts; none for no padding."""


class NoiseConfig(Section):
    """Wrong labels in the clients' training data, based on errors of a centrally trained model (FedAIoT)."""

    labels: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of each client's training labels that are replaced by wrong labels."""
    sure: Fraction = 0.95
    """Labels of a class stay correct if the model predicts the same class for at least this fraction of its samples."""
    epochs: Count = 20
    """Epochs of the central training."""
    lr: Positive = 1e-3
    """Learning rate of the central training (Adam)."""


class FleetConfig(Section):
    tiers: tuple[Tier, ...] = DEFAULT
    """Tiers of devices, or the name of a fleet (`flexfleet list fleets`). `share` is the tier's fraction of all
    devices. `memory` is a percentage of the full model's parameters. Each device gets a standard deviation from
    `sigma`. Its free memory is memory - |N(0, sigma)|, or, with `limits` [low, high], N(memory, sigma) clipped to these
    limits. `width` is the width ratio of a sub-model that always fits. `speed` (10^9 multiply-adds per second) and
    `bandwidth` (10^6 bits per second) determine the time on the simulated clock. `watts`: power
    [computing, transferring] in W."""
    trace: Tracing | None = None
    """Trace with online times, speed and bandwidth of each device (docs/guides/traces.md). With null, all devices are
    always online, with the speed and bandwidth of their tier."""
    wait_s: Annotated[Positive, Moves.LENGTH] = 86_400.0
    """Maximum simulated seconds that a round waits for a client to come online. After this time, the run fails."""


class CodecConfig(Section):
    """Compression of the transferred weights. A level of an algorithm may have its own codecs."""

    down: dict[str, Any] = Field(default={"name": "identity"})
    """Codec for the weights sent to clients, which start training from the decoded weights."""
    up: dict[str, Any] = Field(default={"name": "identity"})
    """Codec for updates sent to the server, which adds a decoded update to the weights that the client received."""


class PretrainConfig(Section):
    epochs: Count = 100
    """Epochs of pre-training on the server's proxy data."""
    lr: Positive = 1e-3
    """Learning rate of Adam."""
    batch_size: Count = 50
    """Samples per step."""
    reference: bool = False
    """Also pre-train on all training data, to report how similar the two resulting pools are (FlexFL, Section
    IV-C1)."""


class CentralConfig(Section):
    """Options of `flexfleet central`, which trains the full network on all training samples."""

    epochs: Count = 100
    """Number of passes over all training samples."""
    batch_size: Count = 32
    """Samples per step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer, either sgd or adam with PyTorch's default options."""
    lr: Positive = 0.01
    """Initial learning rate."""
    momentum: NotNegative = 0.0
    """Momentum of SGD."""
    weight_decay: NotNegative = 0.0
    """Weight decay of SGD."""
    augment: tuple[Augmenting, ...] = ()
    """Augmentations, as in `training.augment`."""
    schedule: Scheduling = Constant()
    """Schedule of the learning rate over all epochs."""

    @model_validator(mode="after")
    def _of_the_optimizer(self) -> CentralConfig:
        if self.optimizer == "adam" and (self.momentum or self.weight_decay):
            raise ValueError("central.momentum and central.weight_decay must be 0 with Adam. They apply only to SGD")
        return self


class RunConfig(Section):
    store: Annotated[UserPath, Moves.PLACE] = "runs"
    """Folder that contains all runs."""

    @field_validator("store")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if is_address(value):
            raise ValueError("must be a folder. For ledgers in S3, set run.remote=s3://bucket/prefix")
        return value

    remote: Annotated[UserPath | None, Moves.PLACE] = None
    """s3://bucket/prefix for the ledgers of all runs, which other coordinators can read; null for `store`."""
    secrets: Annotated[UserPath | None, Moves.PLACE] = None
    """Folder or s3://bucket/prefix for the keys of the run and its devices. The bucket must differ from the bucket of
    `remote`, and has its own credentials (FLEXFLEET_SECRETS_AWS_*). With null, the keys are stored in the run's folder,
    or in a Secret in the cluster if `backend` is kubernetes."""
    backend: Literal["in_process", "processes", "kubernetes", "agents"] = "in_process"
    """Clients train in threads (`in_process`), worker processes (`processes`), pods (`kubernetes`) or devices
    (`agents`)."""
    patience_s: Annotated[Positive, Moves.EXECUTION] = 600.0
    """Seconds to wait for an unreachable server (S3, Kubernetes, MLflow) or for pods. After this time, the run stops
    and can be resumed."""
    keep: Annotated[str, Field(pattern="^(all|sums|last-[1-9][0-9]{0,5})$"), Moves.EXECUTION] = "sums"
    """Kept states and updates (docs/guides/check.md): all, last-N (of the last N rounds), or sums (none)."""
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port for the coordinator's Prometheus metrics (/metrics) and health (/healthz); null: no server."""
    code: Annotated[UserPath | None, Moves.PLACE] = None
    """Your own package (a folder with __init__.py, or a .py file). Worker processes and pods receive the package as a
    wheel, from which they import package.module:NAME."""
    devices: Annotated[tuple[str, ...], Moves.NUMERICS] = ("cpu",)
    """PyTorch devices of one kind that train clients in parallel, e.g. [cuda:0, cuda:1]; auto for [cuda] if available,
    otherwise [cpu]."""
    strategy: Annotated[Literal["auto"] | Strategy, Moves.NUMERICS] = "auto"
    """With `single`, a device trains one client at a time. With `batched`, a CPU trains several clients at once. With
    `auto`, the strategy depends on the network's size and the devices."""
    precision: Annotated[Literal["auto"] | Precision, Moves.NUMERICS] = "fp32"
    """Number format of the training, by default fp32. With bf16, the forward and backward pass use bfloat16. With amp,
    the precision is mixed (float16 on CUDA, bfloat16 on CPUs). With fp16, all numbers are float16 and weight decay is
    off (FedAIoT). With auto, the machine's fastest format is used. On CPUs, results with bf16 and amp are bit-identical
    only with strategy=single."""

    @property
    def kept_rounds(self) -> float:
        """Number of last rounds whose files are kept; infinity for all rounds."""
        if self.keep in ("all", "sums"):
            return math.inf if self.keep == "all" else 0
        return int(self.keep.removeprefix("last-"))

    @property
    def apart(self) -> bool:
        """True if clients are on other machines and sign their results."""
        return self.backend in ("kubernetes", "agents")

    @model_validator(mode="after")
    def _same_bits_on_every_device(self) -> RunConfig:
        kinds = sorted({name.partition(":")[0] for name in self.devices})
        if len(kinds) != 1:
            got = ", ".join(kinds) or "none"
            raise ValueError(
                f"run.devices must all have the same type, such as [cpu], because the type affects rounding, got {got}"
            )
        if self.strategy == "batched" and (self.precision == "fp16" or kinds != ["cpu"]):
            raise ValueError("run.strategy=batched requires CPUs and must not use fp16. Set run.strategy=auto")
        return self


class TrackingConfig(Section):
    mlflow: UserPath | None = "auto"
    """MLflow tracking URI. auto: MLFLOW_TRACKING_URI, or sqlite:///mlflow.db if unset. null: no tracking."""
    experiment: str | None = None
    """Name of the experiment; null for MLFLOW_EXPERIMENT_NAME, Kubeflow's name, or <dataset>-<model>-<partition>."""


class Range(Section):
    """Values of a parameter in a search, either numbers from `low` to `high` or the values in `choices`."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """Draw values from a log-uniform distribution."""
    whole: bool = False
    """Draw only whole numbers. The bounds `low` and `high` must also be whole numbers."""
    choices: tuple[Any, ...] = ()

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Range:
        if self.choices:
            if self.low is not None or self.high is not None or self.log or self.whole:
                raise ValueError("choices cannot be combined with low, high, log or whole")
        elif self.low is None or self.high is None or not -math.inf < self.low < self.high < math.inf:
            raise ValueError("low and high must be finite, and low must be less than high. Alternatively, set choices")
        elif self.log and self.low <= 0:
            raise ValueError("low must be greater than 0 if `log` is true")
        elif self.whole and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("low and high must be whole numbers if `whole` is true")
        return self


class TuneConfig(Section):
    """Options of `flexfleet tune`."""

    trials: Count = 30
    """Total number of complete and pruned trials of all workers."""
    metric: Literal["avg", "full"] = "avg"
    """Metric to optimize: its value in the last round, averaged over `seeds`."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0,)
    """Seeds for the runs of each trial."""
    held_out: tuple[int, ...] = (100, 101, 102)
    """Seeds for the final comparison between the best setting and the default."""
    space: dict[str, Range] = Field(default={})
    """Ranges by dotted name (`algorithm.gammas.0` for the first element of a list). If empty, the space that the
    algorithm declares is used."""
    workers: Count = 1
    """Number of parallel worker processes, or of pods in the pipeline. Pods require `storage`."""
    storage: UserPath | None = None
    """URL of a database, for workers on several machines. With null, FLEXFLEET_TUNE_STORAGE is used, or a journal
    in the study's folder if this variable is not set."""


class PublishConfig(Section):
    """Export and publication of a finished run."""

    models: bool = False
    """Export each reported level (safetensors, ONNX) and register it in MLflow."""
    name: str | None = None
    """Name of the registered models; null for <experiment>-<algorithm>."""
    onnx: bool = True
    """Also export the levels as ONNX."""
    precision: Literal["auto"] | Annotated[tuple[OnnxPrecision, ...], Field(min_length=1)] = ("fp32",)
    """Additional precisions for the ONNX files, such as [fp16, int8]. With auto, the smallest precision is used that
    has at least as many bits as the level's codec."""
    dvc: UserPath | None = None
    """Push partition, pool, model and report to this DVC remote (name, s3://bucket/prefix or folder); null for none."""

    @property
    def measured(self) -> bool:
        """True if precisions other than fp32 are exported."""
        return self.precision == "auto" or set(self.precision) != {"fp32"}

    @model_validator(mode="after")
    def _of_a_file(self) -> PublishConfig:
        if self.measured and not self.onnx:
            raise ValueError("publish.precision requires publish.onnx=true, because precisions apply to ONNX files")
        return self


class Config(Section):
    schema_version: Literal[1] = 1
    seed: int = 1
    """Seed for all random decisions. Private runs derive noise and client selection from the run's key instead."""
    dataset: DatasetConfig = DatasetConfig()
    partition: PartitionConfig = PartitionConfig()
    noise: NoiseConfig = NoiseConfig()
    model: dict[str, Any] = Field(default={"name": "small_cnn"})
    """Registered name or package.module:NAME of the network, and its options."""
    fleet: FleetConfig = FleetConfig()
    pretrain: PretrainConfig = PretrainConfig()
    algorithm: dict[str, Any] = Field(default={"name": "flexfl"})
    """Registered name or package.module:NAME of the algorithm, and its hyper-parameters."""
    training: Training = Training(fraction=0.3, epochs=5, batch_size=10, lr=0.05)
    central: Annotated[CentralConfig, Moves.PLACE] = CentralConfig()
    codec: CodecConfig = CodecConfig()
    rounds: RoundsConfig = RoundsConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    run: Annotated[RunConfig, Moves.EXECUTION] = RunConfig()
    kubernetes: Annotated[KubernetesConfig, Moves.EXECUTION] = KubernetesConfig()
    agents: Annotated[AgentsConfig, Moves.EXECUTION] = AgentsConfig()
    tracking: Annotated[TrackingConfig, Moves.PLACE, Unseen] = TrackingConfig()
    publish: Annotated[PublishConfig, Moves.PLACE, Unseen] = PublishConfig()
    tune: Annotated[TuneConfig, Moves.PLACE, Unseen] = TuneConfig()

    @field_validator("model")
    @classmethod
    def _weights_at_home(cls, value: dict[str, Any]) -> dict[str, Any]:
        init = value.get(INIT)
        return {**value, INIT: user_path(init)} if isinstance(init, str) else value

    def settled(self, began: Config | None = None) -> Config:
        """Return this configuration with `rounds.norm_bound=auto` replaced by a value.

        Args:
            began: Recorded configuration of a resumed run, which contains the value; None for a new run.
        """
        if self.rounds.norm_bound != "auto":
            return self
        on_devices = self.run.backend == "kubernetes" and self.kubernetes.placement == "device"
        bound = NORM_BOUND if self.run.backend == "agents" or on_devices else None
        rounds = {"norm_bound": began.rounds.norm_bound if began else bound}
        return self.model_copy(update={"rounds": self.rounds.model_copy(update=rounds)})

    @model_validator(mode="after")
    def _local_data(self) -> Config:
        p = self.partition
        if p.rule != "local":
            if p.folders is not None:
                raise ValueError("partition.folders requires partition.rule=local. Set this rule, or remove folders")
            return self
        if self.run.backend == "kubernetes":
            raise ValueError("partition.rule=local requires run.backend=agents, because pods have no data of their own")
        if self.run.backend != "agents" and p.folders is None:
            raise ValueError(
                "partition.folders must be the folder that contains the clients' data folders if partition.rule=local "
                f"and run.backend={self.run.backend}"
            )
        faults = fault_injection.parse(self.rounds.faults)
        needs = {
            "noise.labels=0": self.noise.labels == 0,
            "partition.server_classes=[]": not p.server_classes,
            "partition.proxy_shared=false": not p.proxy_shared,
            "partition.features=null": p.features is None,
            "pretrain.reference=false": not self.pretrain.reference,
            "dataset.train_samples=null": self.dataset.train_samples is None,
            "rounds.faults without uphill and backdoor": faults.kinds.isdisjoint(fault_injection.POISONED),
        }
        if wrong := [setting for setting, is_set in needs.items() if not is_set]:
            raise ValueError(f"partition.rule=local requires {', '.join(wrong)}, because only the clients have samples")
        return self

    @model_validator(mode="after")
    def _together(self) -> Config:
        if wrong := [client for client in self.rounds.without if client >= self.partition.clients]:
            raise ValueError(f"rounds.without must be clients from 0 to {self.partition.clients - 1}, got {wrong[0]}")
        if self.evaluate.on == "clients" and self.partition.proxy_shared:
            raise ValueError(
                "partition.proxy_shared must be false with evaluate.on=clients, because no client may train on the "
                "server's samples"
            )
        if self.run.backend == "agents" and set(self.run.devices) != {"cpu"}:
            raise ValueError(
                "run.devices must be [cpu] with run.backend=agents. The owner of a device chooses its torch device "
                "(flexfleet agent --device)"
            )
        return self


PRIVATE = tuple(name for name, field in Config.model_fields.items() if Unseen in field.metadata)
"""Sections with addresses whose passwords must be masked in a run's files."""


def moves(path: str) -> Moves:
    """Return what a change of this parameter affects. An unknown name is treated like its section."""
    here: Any = Config
    found = Moves.RESULT
    for part in path.split("."):
        field = here.model_fields.get(part) if is_model(here) else None
        if field is None:
            break
        found = next((each for each in field.metadata if isinstance(each, Moves)), found)
        here = field.annotation
    return found
