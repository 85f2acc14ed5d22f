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
    """Local training, the same for every algorithm of a comparison. Defaults: FlexFL Sec. IV, and its code for weight
    decay, learning-rate decay and the dropped last batch. A run's `fraction`, `batch_size` and `lr` suit the bundled
    digits (FlexFL: 0.1, 50, 0.01)."""

    fraction: Fraction = 0.1
    """Share of all clients selected per round (f), above 0, at most 1."""
    epochs: Count = 5
    """Epochs that a client trains per round."""
    batch_size: Count = 50
    """Samples."""
    lr: Positive = 0.01
    """Learning rate of the clients' SGD in the first round."""
    momentum: NotNegative = 0.5
    """Of the clients' SGD."""
    weight_decay: NotNegative = 1e-4
    """Of the clients' SGD."""
    lr_decay: Positive = 0.998
    """The learning rate of round r, counted from 0, is lr * lr_decay^r."""
    lr_steps: tuple[Count, ...] = ()
    """Rounds, counted from 0, at which the learning rate is divided by ten (FedRolex Table 3.7)."""
    clip_norm: Positive | None = None
    """Largest norm of a step's gradient (HeteroFL's code: 1); null: no limit."""
    drop_last: bool = True
    """Leave out a last batch that is not full."""
    sampler: Sampling = Shuffle()
    """Which samples a client sees in an epoch. shuffle: each sample once; balanced: as many draws with replacement,
    each label equally likely, or with `smoothing` a sample's weight is 1 / (smoothing + its label's count)."""
    augment: tuple[Augmenting, ...] = ()
    """Random changes of images and maps while clients train, one after the other. flip: left to right, with probability
    `share`, and top to bottom, with probability `vertical`; crop: a window shifted by up to `padding` pixels;
    hsv, compress: of colours in 0..1; shear, scale: about the centre; mixup: another image over it, where
    targets are boxes. Boxes follow all but crop. E.g. [{name: crop}, {name: flip}]."""
    schedule: Scheduling = Constant()
    """The learning rate inside a client's work of one round. cosine: from lr down to `floor` * lr; with `restart` anew
    after so many epochs, each descent `factor` times as long as the one before."""
    objective: str | None = None
    """A function that returns the loss of a batch, package.module:NAME: objective(model, x, y, start), with the
    client's network, normalised samples, targets, and the weights that training began from; null: the loss of the
    data's task plus the algorithm's own terms. With an objective clients train one at a time."""
    optimizer: str | None = None
    """A function that returns the clients' optimizer, package.module:NAME: optimizer(parameters, lr), called in each
    round with that round's rate; null: SGD. `momentum` and `weight_decay` belong to SGD: with a function they keep
    their defaults or are 0. Clients then train one at a time."""

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
