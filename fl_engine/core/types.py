"""Types of values that modules exchange: sub-models (`core.submodels`), tasks, devices, assignments and results.

`core.contracts` defines the protocols of replaceable objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from fl_engine.core.augmentation import Augmentation
from fl_engine.core.errors import printable
from fl_engine.core.steps import Constant, Sampler, Schedule, Shuffle
from fl_engine.core.submodels import (
    FULL,
    HEAD,
    Axis,
    Codec,
    Codecs,
    Header,
    Keep,
    ParamLayout,
    Params,
    Pool,
    PoolModel,
    Prepared,
    Prunable,
    Slot,
    SubmodelSpec,
)

__all__ = [
    "FULL", "HEAD", "SGD", "Adam", "Assignment", "Axis", "ClientFailure", "ClientResult", "ClientUpdate", "Code",
    "Codec", "Codecs", "Device", "Distillation", "ExitLoss", "FailureDetails", "Header", "Keep", "LocalTask",
    "OwnOptimizer", "ParamLayout", "Params", "Pick", "Pool", "PoolModel", "Prepared", "Prunable", "Results",
    "RoundContext", "RoundPlan", "Sandwich", "Scaler", "Slot", "Stage", "Start", "SubmodelSpec", "Tables",
    "TaskContext", "changed",
]  # fmt: skip


@dataclass(frozen=True)
class SGD:
    """Options of `torch.optim.SGD`. `lr` includes the decay up to this round (see `LocalTask.schedule`)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam:
    lr: float


@dataclass(frozen=True)
class OwnOptimizer:
    """User-defined optimizer: the function `name` (`package.module:NAME`) returns an optimizer with the rate `lr`."""

    lr: float
    name: str


@dataclass(frozen=True)
class Distillation:
    """Self-distillation, with a loss of `weight` times the mean KL divergence from the sub-models `teachers`."""

    teachers: tuple[SubmodelSpec, ...]
    weight: float
    temperature: float
    training: bool = True
    """False switches off the teachers' dropout. Batch norm of the teachers always uses the batch's statistics, because
    the running statistics belong to the student."""
    reduction: Literal["classes", "batch"] = "classes"
    """With `classes`, the divergence is averaged over batch and classes; with `batch`, only over the batch."""


@dataclass(frozen=True)
class ExitLoss:
    """Loss of a multi-exit network: the sum of the exits' losses times `weights`, plus `kd_weight` times a distillation
    loss. With `last`, the last exit is the teacher of all other exits (ScaleFL). With `all`, each exit is a teacher of
    all other exits (DepthFL)."""

    weights: tuple[float, ...]
    kd_weight: float
    temperature: float
    teachers: Literal["last", "all"]


@dataclass(frozen=True)
class Sandwich:
    """Each step trains several sub-models of `LocalTask.widths`: the last (largest), the first (smallest), and `random`
    sub-models in between, drawn uniformly. All sub-models are trained on the targets. The largest sub-model is the
    teacher of all others, with a loss of `weight` times the KL divergence. The loss is the mean over the sub-models."""

    random: int
    weight: float
    temperature: float


Scaler = float | Literal["by_layer"]


@dataclass(frozen=True)
class LocalTask:
    """Options and sub-model of one client's training, which `local.train` executes."""

    spec: SubmodelSpec
    optimizer: SGD | Adam | OwnOptimizer
    epochs: int
    batch_size: int
    drop_last: bool
    seed: int
    distillation: Distillation | None = None
    clip_norm: float | None = None
    """Maximum norm of the gradient over all parameters; None disables clipping."""
    exits: ExitLoss | None = None
    widths: tuple[SubmodelSpec, ...] = ()
    """Sub-models of `spec`. Each step trains one of these sub-models, drawn uniformly (ordered dropout)."""
    sandwich: Sandwich | None = None
    """If set, each step trains several sub-models of `widths`. The last entry of `widths` must then be `spec`."""
    proximal: float = 0.0
    """Factor mu of the proximal term mu/2 * ||theta - start||^2, where `start` are the weights before training."""
    scaler: Scaler = 1.0
    """Divisor for the outputs of convolutions and hidden linear layers that can be sliced, in training only (HeteroFL).
    `by_layer` divides by the fraction of the layer's outputs that the sub-model keeps."""
    mask_labels: bool = False
    """If True, logits of classes without samples on the client are set to 0, including the teachers' logits. The update
    omits the weights of these classes (HeteroFL). Tasks without classes ignore this field (`Task.present`)."""
    sampler: Sampler = Shuffle()
    augment: tuple[Augmentation, ...] = ()
    """Augmentations in the order in which they are applied to each batch."""
    schedule: Schedule = Constant()
    """Schedule of the learning rate over the steps of this task."""
    objective: str | None = None
    """Function (`package.module:NAME`) that computes the loss of a batch instead of the data set's task. The function
    cannot be combined with `distillation`, `exits` or `widths` (`training.user_code`)."""


@dataclass(frozen=True)
class Start:
    """Initial state of a client's local training. `params` contains the weights of `task.spec`. `linear` contains terms
    that every step subtracts from the gradients (FedDyn, SCAFFOLD)."""

    params: Params
    linear: Params = field(default_factory=dict)


Pick = tuple[int, int]
"""A pair (client, index of the client's model in the pool)."""

Tables = dict[str, tuple[tuple[float, ...], ...]]
"""Learned values of a selector, as named tables of numbers that are stored as JSON."""


@dataclass(frozen=True)
class Device:
    """One device of the fleet.

    Attributes:
        memory: Capacity r_M in % of the full model's parameters.
        sigma: Standard deviation of the free memory (Gaussian), in % of the full model's parameters (FlexFL Table I).
        limits: Bounds of the free memory in %, if the Gaussian is clipped (AdaptiveFL).
        speed: Multiply-adds per second on the simulated clock.
        bandwidth: Bytes per second on the simulated clock.
        watts: Power while the device computes and while it transfers, in W; None if unknown.
    """

    client: int
    tier: str
    memory: float
    sigma: float
    limits: tuple[float, float] | None = None
    speed: float = 1e9
    bandwidth: float = 1e6
    watts: tuple[float, float] | None = None

    @cached_property
    def most(self) -> float:
        """Maximum free memory of the device, in % of the full model's parameters."""
        return self.memory if self.limits is None else self.limits[1]


@dataclass(frozen=True)
class RoundContext:
    """Information from which the server plans a round."""

    round: int
    seed: int
    """Seed of the run. In private aggregation, the seed is derived from the run's key."""
    fleet: tuple[Device, ...]
    """All devices in client order, with their nominal speeds and bandwidths."""
    available: tuple[Device, ...]
    """Devices that are available now, in client order, with their current speeds and bandwidths."""
    pool: Pool
    clock: float = 0.0
    """Simulated seconds from the start of the run to this round, including time in which no client was available."""
    over_provision: float = 1.0
    """Number of selected clients divided by the number of updates to merge."""
    slots: int | None = None
    """Number of clients that can be selected in addition to clients that are still training; None if unlimited."""
    samples: tuple[int, ...] = ()
    """Number of training samples of each client; empty if unknown."""
    draws: tuple[int, ...] = ()
    """Number of samples that each client trains on per round, counting repeated samples; empty if unknown."""
    without: frozenset[int] = frozenset()
    """Clients that must not be selected, although they are in `fleet` and `available` (`rounds.without`)."""


@dataclass(frozen=True)
class Assignment:
    """Instructions and tensors for one client in a round.

    Attributes:
        level: Pool index of the sent model, or of the pool model of the same size if the sent model is not in the pool.
        hints: Small JSON values for the algorithm's method `task`.
        memory: Additional tensors for the client, which count as traffic. Tensors of the server (FedDyn's gradients,
            SCAFFOLD's variate) have the names of parameters. The engine adds the client's state as `state/<name>`.
        codecs: Codecs that the algorithm's `plan` chose. If None, the engine sets the codecs of the level or run.
        encoded: Encoded form of `payload`, which is sent to the client instead of `payload`.
        evaluates: True if the client does not train, but evaluates `payload` on held-out samples.
    """

    round: int
    client: int
    spec: SubmodelSpec
    payload: Params
    seed: int
    level: int
    hints: Mapping[str, Any] = field(default_factory=dict)
    memory: Params = field(default_factory=dict)
    codecs: Codecs | None = None
    encoded: Params | None = None
    evaluates: bool = False

    @property
    def travels(self) -> Params:
        """Tensors that are sent to the client."""
        return self.payload if self.encoded is None else self.encoded


@dataclass(frozen=True)
class RoundPlan:
    round: int
    assignments: tuple[Assignment, ...]
    wanted: int | None = None
    """Maximum number of updates to merge. None merges all updates."""
    adopted: int = 0
    """Number of this round's updates that were stored before the coordinator restarted."""
    noise_seed: bytes | None = None
    """256-bit seed of the noise in private aggregation (`privacy`), derived from the run's key."""
    evaluates: bool = False
    """True if `Assignment.evaluates` is true for all assignments."""

    @property
    def label(self) -> str:
        """Name of the round in the store, such as `12`, or `12e` for the evaluation of round 12."""
        return f"{self.round}e" if self.evaluates else f"{self.round}"

    @property
    def enough(self) -> int:
        """Maximum number of updates that the round merges."""
        return len(self.assignments) if self.wanted is None else self.wanted

    @cached_property
    def assignment_of(self) -> dict[int, Assignment]:
        """Map each client to its assignment."""
        return {assignment.client: assignment for assignment in self.assignments}


@dataclass(frozen=True)
class ClientUpdate:
    """Update of a client. `spec` is the sub-model that the client trained.

    Attributes:
        payload: Tensors on the CPU, without untrained parameters. Empty if the assignment only evaluates.
        num_examples: Number of samples of the client, |d|, or of held-out samples in an evaluation.
        metrics: Metrics such as `loss` and `seconds`. In an evaluation, the metrics of `clients.evaluation_bounds`.
        level: Index of the sub-model in the pool, set by the server; None if the pool does not contain the sub-model.
        elapsed: Seconds of the assignment on the simulated clock, set by the server.
        state: New state of the client (`contracts.KeepsClientState`). The engine removes the state before the merge.
        encoded: Encoded form of `payload`, which is sent to the server instead of `payload`.
        seconds_decode: Wall-clock seconds that decoding took, set by the server.
    """

    round: int
    client: int
    spec: SubmodelSpec
    payload: Params
    num_examples: int
    metrics: Mapping[str, float]
    level: int | None = None
    elapsed: float = 0.0
    state: Params = field(default_factory=dict)
    encoded: Params | None = None
    seconds_decode: float = 0.0

    @property
    def travels(self) -> Params:
        """Tensors that are sent to the server."""
        return self.payload if self.encoded is None else self.encoded


Stage = Literal["drop", "prune", "train", "evaluate", "pod", "validate", "straggle", "quorum"]
"""Stage in which a client failed.

Before the update, a client can drop out (drop), have too little memory (prune), fail to train or evaluate, or lose its
pod. An update can fail validation (validate), arrive too late (straggle), or belong to a round with too few updates
(quorum)."""

Code = Literal[
    "file", "schema", "assignment", "signature", "spec", "checksum", "names", "dtype", "shape", "encoding", "finite",
    "statistics", "examples", "metrics", "norm", "dropped", "unreadable",
]  # fmt: skip
"""Reason why an update failed validation (`exchange.updates`). The code `finite` also marks training that diverged."""


FAILURE_LINES = 12
FAILURE_LENGTH = 160
"""Maximum number of characters in a line."""

Line = Annotated[str, AfterValidator(lambda text: printable(text)[:FAILURE_LENGTH])]
Lines = Annotated[tuple[Line, ...], Field(max_length=FAILURE_LINES)]


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FailureDetails:
    """The end of a client's log, the traceback, the peak memory of its process, and the seconds until the failure. A
    client may send anything here, so the lines are shortened and control characters are escaped."""

    log: Lines = ()
    traceback: Lines = ()
    peak_mb: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    seconds: float = Field(default=0.0, ge=0, allow_inf_nan=False)


@dataclass(frozen=True)
class ClientFailure:
    """Failure of a client that sent no update or whose update was rejected. `reason` is a message for users. `code` is
    set for the stage `validate` and for training that diverged. If an update arrived, the server sets `elapsed` to the
    simulated seconds of the assignment."""

    round: int
    client: int
    stage: Stage
    reason: str
    code: Code | None = None
    elapsed: float = 0.0
    details: FailureDetails | None = field(default=None, compare=False)  # a measurement


ClientResult = ClientUpdate | ClientFailure

Results = Iterable[ClientResult]
"""Results of a round in client order."""

R = TypeVar("R", ClientUpdate, ClientFailure, LocalTask)


def changed(record: R, **fields: Any) -> R:
    """Return a copy with changed fields, in a tenth of the time that `dataclasses.replace` takes."""
    new = object.__new__(type(record))
    new.__dict__.update(record.__dict__, **fields)
    return new


@dataclass(frozen=True)
class TaskContext:
    """Information from which a client creates the task of an assignment."""

    layout: ParamLayout
    pool: Pool
    device: Device
    observed: float
    """Current free memory, in % of the full model's parameters (`devices.observe`)."""
