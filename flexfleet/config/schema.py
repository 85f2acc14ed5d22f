"""params.yaml as typed, frozen, self-checking configuration.

The defaults are a complete run: FlexFL on scikit-learn's handwritten digits, with the paper's fleet. The text below a
field explains it; an unknown key is an error that names the nearest one; nothing is converted silently.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from fl_engine.algorithms.training import Training
from fl_engine.core.augmentation import Augmenting
from fl_engine.core.errors import masked
from fl_engine.core.fields import (
    Count,
    Fraction,
    Index,
    Moves,
    NotNegative,
    Positive,
    Section,
    Unseen,
    UserPath,
    is_model,
    user_path,
)
from fl_engine.core.schedules import Constant, Scheduling
from fl_engine.core.text import folder_hint, is_meant
from fl_engine.data.partitioning import Rule
from fl_engine.fleet.devices import DEFAULT, Tier
from fl_engine.fleet.trace_sources import Tracing
from fl_engine.models.build import INIT
from fl_engine.models.onnx_quantization import OnnxPrecision
from fl_engine.remote.settings import AgentsConfig, KubernetesConfig
from fl_engine.rounds.terms import NORM_BOUND, EvaluateConfig, RoundsConfig
from fl_engine.training.numerics import Precision, Strategy


class DatasetConfig(Section):
    name: str = "digits"
    """A data set of `fl_engine.datasets`, or package.module:NAME."""
    root: Annotated[UserPath | None, Moves.PLACE] = None
    """Folder of the data files, or a DVC repository (`repo@rev:path` or a .dvc file; git's credential helper supplies
    passwords); null: FLEXFLEET_DATA, else ~/.cache/flexfleet/data."""
    train_samples: Count | None = None
    """Number of training samples to use; null: all."""
    test_samples: Count | None = None
    """Number of test samples to use; null: all."""
    pad: Literal["auto", "none"] | Count = "auto"
    """Zero-pad images to this side in pixels; auto: to the smallest side that the network takes; none: do not pad."""


class PartitionConfig(Section):
    rule: Rule = "dirichlet"
    clients: Count = 20
    """Number of clients."""
    alpha: float = 0.6
    """Concentration of dirichlet, dirichlet_per_client and quantity; smaller is more heterogeneous."""
    cap: bool = False
    """With dirichlet, give a class only to clients that hold less than an equal share of all samples."""
    labels_per_client: Count = 2
    """With disjoint_labels, the number of labels that each client holds."""
    minimum: Count = 20
    """Least number of samples of a client. The dirichlet rules and quantity ensure it; other rules fail if a client has
    fewer."""
    map: UserPath | None = None
    """With manual, a JSON file with each client's training samples: {"clients": [[0, 3, ...], ...]}."""
    folders: Annotated[UserPath | None, Moves.PLACE] = None
    """With local, the folder with one folder of data for each simulated client; null: enrolled devices have their own
    data."""
    most: Count = 100_000
    """With local, the largest number of training samples that a client may report."""
    features: UserPath | None = None
    """Deal by clusters of features instead of by labels: an .npy file with one row per training sample, or a network
    whose last hidden features count; null: deal by labels."""
    clusters: Annotated[int, Field(ge=2)] = 10
    """Number of k-means clusters of `features`."""
    proxy: float = 0.05
    """Share of the training data that the server keeps: 80 % to pre-train, 20 % to measure APoZ."""
    proxy_shared: bool = False
    """Clients get the proxy's samples too (FlexFL's Table III). For studies only, because such a server sees its
    clients' data."""
    server_classes: tuple[Index, ...] = ()
    """Classes that only the server holds, as in FedX, e.g. [8, 9]; they replace `proxy`."""
    seed: int | None = None
    """Seed of the partition; null: the run's seed."""


class NoiseConfig(Section):
    """Wrong labels at the clients, drawn from the mistakes of a centrally trained model (FedAIoT)."""

    labels: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each client's training labels to make wrong; 0: none."""
    sure: Fraction = 0.95
    """Labels of a class stay right if the model assigns at least this share of the class to one class."""
    epochs: Count = 20
    """Epochs of the central training."""
    lr: Positive = 1e-3
    """Learning rate of the central training (Adam)."""


class FleetConfig(Section):
    tiers: tuple[Tier, ...] = DEFAULT
    """Tiers of devices, or the name of a fleet (`flexfleet list fleets`). share: part of the fleet. memory: capacity in
    % of the full model's parameters. sigma: standard deviations, of which a device draws one; it has memory - |N(0,
    sigma)| free, or with limits [low, high] N(memory, sigma) clipped to them. width: the width ratio of a sub-model
    that fits in any case. speed (10^9 multiply-adds per second) and bandwidth (10^6 bits per second) drive the
    simulated clock."""
    trace: Tracing | None = None
    """When each device is online, how fast it is then, and its bandwidth (docs/guides/traces.md); null: all are online,
    with their tier's speed and bandwidth."""
    wait_s: Annotated[Positive, Moves.LENGTH] = 86_400.0
    """Simulated seconds that a round waits for a client to come online before the run fails."""


class CodecConfig(Section):
    """Compression of the weights; a level of an algorithm may have its own."""

    down: dict[str, Any] = Field(default={"name": "identity"})
    """To the clients, which train from the decoded weights."""
    up: dict[str, Any] = Field(default={"name": "identity"})
    """To the server, which adds the decoded change to the weights that it sent."""


class PretrainConfig(Section):
    epochs: Count = 100
    """Epochs on the proxy."""
    lr: Positive = 1e-3
    """Learning rate of Adam."""
    reset_adam: bool = False
    """Begin each epoch with a new Adam, as FlexFL's code does."""
    batch_size: Count = 50
    """Samples per step."""
    reference: bool = False
    """Also pre-train on all training data, to report how similar that pool is (FlexFL Sec. IV-C1). For studies only."""


class CentralConfig(Section):
    """For `flexfleet central`, which trains the full network on all training samples."""

    epochs: Count = 100
    """Passes over all training samples."""
    batch_size: Count = 32
    """Samples per step."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """Adam is torch's, with its defaults."""
    lr: Positive = 0.01
    """Learning rate at the beginning."""
    momentum: NotNegative = 0.0
    """Momentum of SGD."""
    weight_decay: NotNegative = 0.0
    """Weight decay of SGD."""
    augment: tuple[Augmenting, ...] = ()
    """As in `training`."""
    schedule: Scheduling = Constant()
    """Learning rate over all epochs."""

    @model_validator(mode="after")
    def _of_the_optimizer(self) -> CentralConfig:
        if self.optimizer == "adam" and (self.momentum or self.weight_decay):
            raise ValueError("central.momentum and central.weight_decay are of SGD: set them to 0 for Adam")
        return self


class RunConfig(Section):
    store: Annotated[UserPath, Moves.PLACE] = "runs"
    """Folder of all runs."""

    @field_validator("store")
    @classmethod
    def _a_folder(cls, value: str) -> str:
        if is_meant(value):
            raise ValueError(
                f"a folder of this machine is expected{folder_hint(value)}; for ledgers in S3 set "
                "run.remote=s3://bucket/prefix"
            )
        return value

    remote: Annotated[UserPath | None, Moves.PLACE] = None
    """s3://bucket/prefix for the ledgers of all runs, where another coordinator finds them; null: in `store`."""
    secrets: Annotated[UserPath | None, Moves.PLACE] = None
    """Where the run's key and the devices' keys are stored: a folder, or s3://bucket/prefix in another bucket than
    `remote`, with its own credentials (FLEXFLEET_SECRETS_AWS_*); null: a Secret of the cluster with kubernetes, else
    the run's folder."""
    backend: Literal["in_process", "processes", "kubernetes", "agents"] = "in_process"
    """What trains the clients: threads, worker processes, pods (`kubernetes`) or enrolled devices (`agents`)."""
    patience_s: Annotated[Positive, Moves.EXECUTION] = 600.0
    """Seconds to wait for a server that does not answer (S3, Kubernetes, MLflow) and for pods to start, before the run
    stops; it can be resumed."""
    code: Annotated[UserPath | None, Moves.PLACE] = None
    """Your own package (a folder with __init__.py, or a .py file); null: none. Worker processes and pods get it as a
    wheel and import package.module:NAME from it."""
    devices: Annotated[tuple[str, ...], Moves.NUMERICS] = ("cpu",)
    """Torch devices that train clients at the same time, all of one kind, e.g. [cuda:0, cuda:1]; auto: [cuda] if
    available, else [cpu]."""
    strategy: Annotated[Literal["auto"] | Strategy, Moves.NUMERICS] = "auto"
    """single: a device trains one client at a time; batched: several together (small networks on CPUs); auto: what
    suits the network's size and the devices."""
    precision: Annotated[Literal["auto"] | Precision, Moves.NUMERICS] = "fp32"
    """bf16: forward and backward pass in bfloat16. amp: mixed precision (float16 on CUDA, bfloat16 on CPUs). fp16:
    everything in float16, without weight decay (FedAIoT). auto: the fastest that the machine supports natively. With
    bf16 and amp on CPUs, only strategy=single gives equal bits."""

    @property
    def apart(self) -> bool:
        """Whether clients are on other machines and sign their results."""
        return self.backend in ("kubernetes", "agents")

    @model_validator(mode="after")
    def _one_at_a_time(self) -> RunConfig:
        if self.precision == "fp16" and self.strategy == "batched":
            raise ValueError("run.precision=fp16 trains one client at a time: set run.strategy to single or auto")
        return self

    @model_validator(mode="after")
    def _same_bits_on_every_device(self) -> RunConfig:
        kinds = sorted({name.partition(":")[0] for name in self.devices})
        if len(kinds) > 1:
            raise ValueError(
                f"run.devices are of different kinds ({', '.join(kinds)}): a client's bits would depend on which of "
                "them trains it. Name devices of one kind"
            )
        if kinds != ["cpu"] and self.strategy == "batched":
            raise ValueError(
                f"run.strategy=batched is for CPUs, and run.devices is {list(self.devices)}, where a client's bits "
                "would depend on how many train beside it. Set run.strategy to single or auto"
            )
        return self


class TrackingConfig(Section):
    mlflow: UserPath | None = "sqlite:///mlflow.db"
    """MLflow tracking URI; null: off."""
    experiment: str | None = None
    """Name of the experiment; null: <dataset>-<model>-<partition>, or Kubeflow's if its tasks have an MLflow."""


class Range(Section):
    """What a parameter may be in a search: from `low` to `high`, or one of `choices`."""

    low: float | None = None
    high: float | None = None
    log: bool = False
    """As likely between 1 and 10 as between 10 and 100."""
    whole: bool = False
    """Whole numbers only, low and high too."""
    choices: tuple[Any, ...] = ()

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Range:
        if self.choices:
            if self.low is not None or self.high is not None or self.log or self.whole:
                raise ValueError("choices stand alone: without low, high, log and whole")
        elif self.low is None or self.high is None or not self.low < self.high or (self.log and self.low <= 0):
            raise ValueError("low and high are expected, low below high, and above 0 for log; or choices")
        elif not (math.isfinite(self.low) and math.isfinite(self.high)):
            raise ValueError("finite numbers are expected for low and high")
        return self


class TuneConfig(Section):
    """For `flexfleet tune`."""

    trials: Count = 30
    """Number of complete and pruned trials of all workers."""
    metric: Literal["avg", "full"] = "avg"
    """The metric of the last round, as a mean over `seeds`."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of each trial's runs."""
    held_out: tuple[int, ...] = (100, 101, 102)
    """Seeds of the final comparison of the best setting and the default."""
    space: dict[str, Range] = Field(default={})
    """Ranges by dotted name (`algorithm.gammas.0`: the first of a list); empty: what the algorithm declares."""
    workers: Count = 1
    """Number of parallel workers: processes, or pods in the pipeline, which need `storage`."""
    storage: UserPath | None = None
    """URL of a database, for workers on several machines; null: FLEXFLEET_TUNE_STORAGE, else a journal in the study's
    folder."""


class PublishConfig(Section):
    """What happens to a finished run."""

    models: bool = False
    """Export each reported level (safetensors, ONNX) and register it in MLflow."""
    name: str | None = None
    """Name of the registered models; null: <experiment>-<algorithm>."""
    onnx: bool = True
    """Export the levels as ONNX too."""
    precision: Literal["auto"] | Annotated[tuple[OnnxPrecision, ...], Field(min_length=1)] = ("fp32",)
    """Further precisions of the ONNX files: fp16, int8 (dynamic), int8_static; auto: the smallest one that has as many
    bits as the level's codec."""
    dvc: UserPath | None = None
    """Remote (s3://bucket/prefix or a folder) to which DVC pushes partition, pool, model and report; null: none."""

    @property
    def measured(self) -> bool:
        """Whether other precisions than fp32 are exported."""
        return self.precision == "auto" or set(self.precision) != {"fp32"}

    @model_validator(mode="after")
    def _of_a_file(self) -> PublishConfig:
        if self.measured and not self.onnx:
            raise ValueError("publish.precision converts the ONNX files: set publish.onnx=true, or leave precision out")
        return self


class Config(Section):
    schema_version: Literal[1] = 1
    seed: int = 0
    """Seed of everything random, except the noise and client choice of private runs, which follow from the run's
    key."""
    dataset: DatasetConfig = DatasetConfig()
    partition: PartitionConfig = PartitionConfig()
    noise: NoiseConfig = NoiseConfig()
    model: dict[str, Any] = Field(default={"name": "small_cnn"})
    """name (registered, or package.module:NAME) and the network's own options."""
    fleet: FleetConfig = FleetConfig()
    pretrain: PretrainConfig = PretrainConfig()
    algorithm: dict[str, Any] = Field(default={"name": "flexfl"})
    """name (registered, or package.module:NAME) and the algorithm's own hyper-parameters."""
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
        """Return this configuration with a value instead of `rounds.norm_bound=auto`.

        Args:
            began: The recorded configuration of the run that is resumed, which has a value; None for a new run.
        """
        if self.rounds.norm_bound != "auto":
            return self
        on_devices = self.run.backend == "kubernetes" and self.kubernetes.placement == "device"
        bound = NORM_BOUND if self.run.backend == "agents" or on_devices else None
        rounds = {"norm_bound": began.rounds.norm_bound if began else bound}
        return self.model_copy(update={"rounds": self.rounds.model_copy(update=rounds)})

    @model_validator(mode="after")
    def _data_of_devices(self) -> Config:
        p = self.partition
        if p.rule != "local":
            if p.folders is not None:
                raise ValueError("partition.folders is for partition.rule=local: leave it out, or set the rule")
            return self
        if self.run.backend == "kubernetes":
            raise ValueError(
                "partition.rule=local needs devices with their own data, which pods are not: set run.backend=agents or "
                "in_process with partition.folders"
            )
        if self.run.backend != "agents" and p.folders is None:
            raise ValueError(
                f"partition.rule=local with run.backend={self.run.backend} needs partition.folders, the data of the "
                "simulated clients; or set run.backend=agents"
            )
        knows = {
            "noise.labels=0": self.noise.labels == 0,
            "partition.server_classes=[]": not p.server_classes,
            "partition.proxy_shared=false": not p.proxy_shared,
            "partition.features=null": p.features is None,
            "pretrain.reference=false": not self.pretrain.reference,
            "dataset.train_samples=null": self.dataset.train_samples is None,
        }
        if wrong := [setting for setting, kept_to in knows.items() if not kept_to]:
            raise ValueError(
                "partition.rule=local: the server knows neither samples nor labels of its clients, so set "
                + ", ".join(wrong)
            )
        return self

    @model_validator(mode="after")
    def _held_out_from_the_server_too(self) -> Config:
        if self.evaluate.on == "clients" and self.partition.proxy_shared:
            raise ValueError(
                "evaluate.on=clients needs samples that nobody trains on, but partition.proxy_shared=true gives them "
                "to the server: set partition.proxy_shared=false, or evaluate.on=server"
            )
        return self

    @model_validator(mode="after")
    def _agents_on_their_own_devices(self) -> Config:
        if self.run.backend == "agents" and set(self.run.devices) != {"cpu"}:
            raise ValueError(
                f"run.devices = {list(self.run.devices)} cannot be with run.backend=agents: leave it at [cpu]. "
                "Where an invited device trains, its owner says (flexfleet agent --device)"
            )
        return self


PRIVATE = tuple(name for name, field in Config.model_fields.items() if Unseen in field.metadata)
"""Sections whose addresses only the person who starts a run may see, not the readers of its files."""


def moves(path: str) -> Moves:
    """Return what another value of this parameter changes. An unknown name counts like its section."""
    here: Any = Config
    moved = Moves.RESULT
    for part in path.split("."):
        field = here.model_fields.get(part) if is_model(here) else None
        if field is None:
            break
        moved = next((each for each in field.metadata if isinstance(each, Moves)), moved)
        here = field.annotation
    return moved


def public(config: Config) -> Config:
    """Return the configuration for files that others read: addresses in PRIVATE sections lose user and password."""

    def hidden(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: hidden(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [hidden(inner) for inner in value]
        return masked(value) if isinstance(value, str) else value

    values = config.model_dump(mode="json")
    return Config.model_validate_json(json.dumps(values | {name: hidden(values[name]) for name in PRIVATE}))


def shown(config: Config) -> dict[str, Any]:
    """Return `flatten` for others to read: every address loses user and password."""
    return {key: masked(value) if isinstance(value, str) else value for key, value in flatten(config).items()}


def flatten(config: Config) -> dict[str, Any]:
    """Return the values by dotted name, for MLflow's parameters and for the differences between two runs."""
    out: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else key, inner)
        elif not isinstance(value, dict):
            out[prefix] = value

    walk("", config.model_dump(mode="json"))
    return out
