"""A client's training, as a description: nothing in it runs. `training.local` carries it out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fl_engine.core.augmentation import Augmentation
from fl_engine.core.samplers import Sampler, Shuffle
from fl_engine.core.schedules import Constant, Schedule
from fl_engine.core.types.submodels import Params, SubmodelSpec


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD` by name; the learning rate is that of this round, decay included (see `LocalTask.schedule`)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam:
    lr: float
    reset: bool = False
    """Each epoch begins with a new optimiser, without moments and at step 0."""


@dataclass(frozen=True)
class OwnOptimizer:
    """The `torch.optim.Optimizer` that the function `name`, a `package.module:NAME`, makes for this learning rate."""

    lr: float
    name: str


@dataclass(frozen=True)
class Distillation:
    """Self-distillation: mean over `teachers` (sub-models of the trained one) of KL, times `weight`."""

    teachers: tuple[SubmodelSpec, ...]
    weight: float
    temperature: float
    training: bool = True
    """False: the teachers drop no units. Their batch norm takes the batch's statistics either way: running ones are the
    student's."""


@dataclass(frozen=True)
class ExitLoss:
    """Training of all exits of a multi-exit network: the task's loss of exit j times `weights[j]`, plus `kd_weight`
    times a distillation between exits: `last` teaches the others (ScaleFL), or `all` teach each other (DepthFL)."""

    weights: tuple[float, ...]
    kd_weight: float
    temperature: float
    teachers: Literal["last", "all"]


@dataclass(frozen=True)
class Sandwich:
    """How a step trains `LocalTask.widths` together: the last of them, the largest, on the targets; the first, the
    smallest, and `random` others, drawn uniformly and distinct, on the targets and on the largest's outputs: KL times
    `weight`. The step's loss is the mean over these sub-models."""

    random: int
    weight: float
    temperature: float


Scaler = float | Literal["by_layer"]


@dataclass(frozen=True)
class LocalTask:
    """A description of one client's training, for `local.train`: nothing in it runs."""

    spec: SubmodelSpec
    optimizer: SGD | Adam | OwnOptimizer
    epochs: int
    batch_size: int
    drop_last: bool
    seed: int
    distillation: Distillation | None = None
    clip_norm: float | None = None
    """Largest norm of the gradient over all parameters."""
    exits: ExitLoss | None = None
    widths: tuple[SubmodelSpec, ...] = ()
    """Sub-models of the trained one; each step trains one of them, drawn uniformly (ordered dropout)."""
    sandwich: Sandwich | None = None
    """With it, each step trains several of `widths`, of which the last is `spec`."""
    proximal: float = 0.0
    """mu: adds mu/2 * ||theta - anchor||^2 to the loss, for each client by itself. The anchor is what training starts
    from, unless the caller of `local.train` gives another."""
    proximal_squared: bool = True
    """False: adds mu * ||theta - anchor|| instead (L2 over all weights); its gradient is 0 at the anchor."""
    scaler: Scaler = 1.0
    """Divides the outputs of every convolution and hidden linear layer that a sub-model can cut, in training only
    (HeteroFL): one number for all layers, or with `by_layer`, for each the share of its outputs that is kept."""
    mask_labels: bool = False
    """The logits of classes that the client does not hold are 0, its teachers' too, and their rows are not sent back
    (HeteroFL)."""
    sampler: Sampler = Shuffle()
    augment: tuple[Augmentation, ...] = ()
    """Changes of the samples, made one after the other on every batch."""
    schedule: Schedule = Constant()
    """How the optimiser's learning rate changes over the steps of this task."""
    objective: str | None = None
    """A function, `package.module:NAME`, that gives the loss of a batch instead of the task of the data and of
    `distillation`, `exits` and `widths`, which cannot stand beside it (`training.user_code`)."""


@dataclass(frozen=True)
class Start:
    """What a client's training starts from: the weights of `task.spec`; and `linear`, by parameter what is subtracted
    from its gradient at every step (FedDyn, SCAFFOLD), shapes of the weights."""

    params: Params
    linear: Params = field(default_factory=dict)
