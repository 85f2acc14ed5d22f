"""Descriptions of a client's training, which `training.local` executes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fl_engine.core.augmentation import Augmentation
from fl_engine.core.samplers import Sampler, Shuffle
from fl_engine.core.schedules import Constant, Schedule
from fl_engine.core.types.submodels import Params, SubmodelSpec


@dataclass(frozen=True)
class SGD:
    """`torch.optim.SGD`. The learning rate is that of this round, including decay (see `LocalTask.schedule`)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Adam:
    lr: float
    reset: bool = False
    """Each epoch begins with a new optimizer, without moments and at step 0."""


@dataclass(frozen=True)
class OwnOptimizer:
    """The `torch.optim.Optimizer` that the function `name` (`package.module:NAME`) returns for this learning rate."""

    lr: float
    name: str


@dataclass(frozen=True)
class Distillation:
    """Self-distillation: the mean KL over `teachers` (sub-models of the trained one), times `weight`."""

    teachers: tuple[SubmodelSpec, ...]
    weight: float
    temperature: float
    training: bool = True
    """False switches off the teachers' dropout. Their batch norm always uses the batch's statistics, because the
    running ones are the student's."""


@dataclass(frozen=True)
class ExitLoss:
    """The loss of a multi-exit network: that of exit j times `weights[j]`, plus `kd_weight` times a distillation in
    which the `last` exit teaches the others (ScaleFL) or `all` teach each other (DepthFL)."""

    weights: tuple[float, ...]
    kd_weight: float
    temperature: float
    teachers: Literal["last", "all"]


@dataclass(frozen=True)
class Sandwich:
    """One step trains several of `LocalTask.widths`: the largest (the last) on the targets; the smallest and `random`
    others, drawn uniformly, on the targets and, with KL times `weight`, on the largest's outputs. The loss is the mean
    over these sub-models."""

    random: int
    weight: float
    temperature: float


Scaler = float | Literal["by_layer"]


@dataclass(frozen=True)
class LocalTask:
    """One client's training, for `local.train`."""

    spec: SubmodelSpec
    optimizer: SGD | Adam | OwnOptimizer
    epochs: int
    batch_size: int
    drop_last: bool
    seed: int
    distillation: Distillation | None = None
    clip_norm: float | None = None
    """Maximal norm of the gradient over all parameters."""
    exits: ExitLoss | None = None
    widths: tuple[SubmodelSpec, ...] = ()
    """Sub-models of the trained one. Each step trains one of them, drawn uniformly (ordered dropout)."""
    sandwich: Sandwich | None = None
    """Each step trains several of `widths`, of which the last is `spec`."""
    proximal: float = 0.0
    """mu: adds mu/2 * ||theta - anchor||^2 to the loss. The anchor is the start of training, unless the caller of
    `local.train` gives another."""
    proximal_squared: bool = True
    """False adds mu * ||theta - anchor|| instead (L2 over all weights), with gradient 0 at the anchor."""
    scaler: Scaler = 1.0
    """Divides the outputs of every convolution and hidden linear layer that can be cut, in training only (HeteroFL): by
    one number, or with `by_layer` by the share of the layer's outputs that is kept."""
    mask_labels: bool = False
    """Set the logits of classes that the client does not hold to 0, also the teachers', and do not send their rows back
    (HeteroFL)."""
    sampler: Sampler = Shuffle()
    augment: tuple[Augmentation, ...] = ()
    """Changes of the samples, applied in order to every batch."""
    schedule: Schedule = Constant()
    """How the learning rate changes over the steps of this task."""
    objective: str | None = None
    """A function (`package.module:NAME`) that returns the loss of a batch instead of the data's task. Excludes
    `distillation`, `exits` and `widths` (`training.user_code`)."""


@dataclass(frozen=True)
class Start:
    """The start of a client's training: the weights of `task.spec`, and by parameter what is subtracted from the
    gradient at every step (`linear`; FedDyn, SCAFFOLD)."""

    params: Params
    linear: Params = field(default_factory=dict)
