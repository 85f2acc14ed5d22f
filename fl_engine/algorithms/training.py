"""Local training: the options of the section `training`, which all algorithms of a comparison share."""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.core.augmentation import Augmenting
from fl_engine.core.fields import Count, Fraction, NotNegative, Positive
from fl_engine.core.samplers import Sampling, Shuffle
from fl_engine.core.schedules import Constant, Scheduling
from fl_engine.core.types import SGD, OwnOptimizer


@dataclass(frozen=True)
class Training:
    """Local training, the same for every algorithm of a comparison. Defaults: FlexFL Sec. IV and its code; `fraction`,
    `batch_size` and `lr` of a run suit the bundled digits (FlexFL: 0.1, 50, 0.01)."""

    fraction: Fraction = 0.1
    """Share of all clients selected per round."""
    epochs: Count = 5
    """Epochs that a client trains per round."""
    batch_size: Count = 50
    """Samples per step."""
    lr: Positive = 0.01
    """Learning rate of SGD in the first round."""
    momentum: NotNegative = 0.5
    """Momentum of SGD."""
    weight_decay: NotNegative = 1e-4
    """Weight decay of SGD."""
    lr_decay: Positive = 0.998
    """The learning rate of round r, counted from 0, is lr * lr_decay^r."""
    lr_steps: tuple[Count, ...] = ()
    """Rounds, counted from 0, at which the learning rate is divided by ten (FedRolex Table 3.7)."""
    clip_norm: Positive | None = None
    """Largest norm of a step's gradient (HeteroFL's code: 1); null: no limit."""
    drop_last: bool = True
    """Leave out a last batch that is not full."""
    sampler: Sampling = Shuffle()
    """shuffle: each sample once per epoch. balanced: as many draws with replacement, each label equally likely; with
    `smoothing`, a sample's weight is 1 / (smoothing + its label's count)."""
    augment: tuple[Augmenting, ...] = ()
    """Random changes of images and maps in training, one after the other, e.g. [{name: crop}, {name: flip}]. Boxes
    follow all but crop."""
    schedule: Scheduling = Constant()
    """Learning rate within a client's training of one round. cosine: from lr to `floor` * lr; with `restart`, again
    after so many epochs, each time `factor` times as long."""
    objective: str | None = None
    """Your own loss, package.module:NAME: objective(model, x, y, start), where `start` has the weights that training
    began from; null: the task's loss plus the algorithm's terms. Clients then train one at a time."""
    optimizer: str | None = None
    """Your own optimizer, package.module:NAME: optimizer(parameters, lr), called in each round; null: SGD. `momentum`
    and `weight_decay` belong to SGD. Clients then train one at a time."""

    def __post_init__(self) -> None:
        for name in ("objective", "optimizer"):
            value = getattr(self, name)
            if value is not None and not all(value.partition(":")):
                raise ValueError(f"training.{name} must be a function, package.module:NAME, got {value!r}")
        if self.optimizer is not None:
            for name in ("momentum", "weight_decay"):
                if getattr(self, name) not in (0, getattr(Training, name)):
                    raise ValueError(
                        f"training.{name} belongs to the built-in SGD, which training.optimizer replaces: set {name} "
                        f"to 0, and pass it to the optimizer in {self.optimizer}"
                    )

    @property
    def is_own(self) -> bool:
        """Whether clients train with a user's functions."""
        return self.objective is not None or self.optimizer is not None

    def optimizer_in(self, round: int) -> SGD | OwnOptimizer:
        """Return the optimizer that clients use in this round."""
        sgd = self.sgd(round)
        return sgd if self.optimizer is None else OwnOptimizer(sgd.lr, self.optimizer)

    def sgd(self, round: int) -> SGD:
        rate = self.lr * self.lr_decay**round / 10 ** sum(round >= step for step in self.lr_steps)
        return SGD(rate, self.momentum, self.weight_decay)
