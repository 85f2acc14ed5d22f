"""Options of the section `training`, which are the same for all algorithms of a comparison."""

from __future__ import annotations

from dataclasses import dataclass

from fl_engine.core.augmentation import Augmenting
from fl_engine.core.fields import Count, Fraction, NotNegative, Positive
from fl_engine.core.steps import Constant, Sampling, Scheduling, Shuffle
from fl_engine.core.types import SGD, OwnOptimizer


@dataclass(frozen=True)
class Training:
    """Options of local training, which are the same for all algorithms of a comparison. Defaults are from FlexFL's
    paper and code. A run has other defaults for `fraction`, `batch_size` and `lr`, tuned for the bundled digits."""

    fraction: Fraction = 0.1
    """Fraction of all clients that is selected in each round."""
    epochs: Count = 5
    """Epochs that a client trains per round."""
    batch_size: Count = 50
    """Number of samples per step."""
    lr: Positive = 0.01
    """Learning rate of SGD in the first round."""
    momentum: NotNegative = 0.5
    """Momentum of SGD."""
    weight_decay: NotNegative = 1e-4
    """Weight decay of SGD."""
    lr_decay: Positive = 0.998
    """Factor by which the learning rate is multiplied after each round."""
    lr_steps: tuple[Count, ...] = ()
    """Rounds, counted from 1, after which the learning rate is divided by ten (FedRolex Table 3.7)."""
    clip_norm: Positive | None = None
    """Maximum norm of the gradient in each step; null: no limit. HeteroFL's code uses 1."""
    drop_last: bool = True
    """Skip the last batch of an epoch if it is incomplete."""
    sampler: Sampling = Shuffle()
    """shuffle: each sample once per epoch. balanced: draw equally many samples with replacement, so that all labels are
    equally likely. With `smoothing`, a sample's weight is 1 / (smoothing + its label's count)."""
    augment: tuple[Augmenting, ...] = ()
    """Augmentations of training images and maps, in this order, e.g. [{name: crop}, {name: flip}]. All augmentations
    except crop also transform bounding boxes."""
    schedule: Scheduling = Constant()
    """Learning rate schedule within a round. cosine: from lr to `floor` * lr. With `restart: n`, the schedule restarts
    after n epochs, and each period is `factor` times as long as the previous period."""
    objective: str | None = None
    """Loss function `package.module:NAME`, called as objective(model, x, y, start) with the weights before training as
    `start`; null: the task's loss plus the algorithm's terms. With a custom loss, clients train sequentially."""
    optimizer: str | None = None
    """Function `package.module:NAME`, called as optimizer(parameters, lr) in each round; null uses SGD. `momentum` and
    `weight_decay` apply only to SGD. With a custom optimizer, clients train sequentially."""

    def __post_init__(self) -> None:
        for name in ("objective", "optimizer"):
            value = getattr(self, name)
            if value is not None and not all(value.partition(":")):
                raise ValueError(f"training.{name} must name a function as package.module:NAME, got {value!r}")
        if self.optimizer is not None:
            for name in ("momentum", "weight_decay"):
                if getattr(self, name) not in (0, getattr(Training, name)):
                    raise ValueError(f"training.{name} must be 0 with training.optimizer. Set it in {self.optimizer}")

    @property
    def is_own(self) -> bool:
        """True if clients train with a custom loss or optimizer."""
        return self.objective is not None or self.optimizer is not None

    def optimizer_in(self, round: int) -> SGD | OwnOptimizer:
        """Return the clients' optimizer for this round."""
        rate = self.lr * self.lr_decay**round / 10 ** sum(round >= step for step in self.lr_steps)
        if self.optimizer is not None:
            return OwnOptimizer(rate, self.optimizer)
        return SGD(rate, self.momentum, self.weight_decay)
