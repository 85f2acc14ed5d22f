"""How the learning rate goes from step to step of one client's work. A new schedule is a class and a line in SCHEDULES.

What it begins with, `lr`, is the rate of the round, decay between rounds included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

from pydantic import Field

from fl_engine.core.fields import STRICT, Count
from fl_engine.core.registry import Contract


class Schedule(Protocol):
    """A frozen dataclass of options."""

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        """The learning rate of a step, counted from 0, of `epochs` epochs with `per_epoch` steps each."""


@dataclass(frozen=True)
class Constant:
    """The same rate in all steps."""

    __pydantic_config__ = STRICT
    name: Literal["constant"] = "constant"

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        return lr


@dataclass(frozen=True)
class Cosine:
    """SGDR: Stochastic Gradient Descent with Warm Restarts (Loshchilov and Hutter, ICLR 2017), Eq. 5, step by step.

    rate = lr * (floor + (1 - floor) * (1 + cos(pi * t / T)) / 2), with t steps since the last restart and T steps
    between two. The first step has lr. The last one before a restart is one step short of the floor, so that no step
    has the rate 0.
    """

    __pydantic_config__ = STRICT
    name: Literal["cosine"] = "cosine"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of lr that it goes down to."""
    restart: Count | None = None
    """Epochs after which it begins at lr again; null: all epochs of the work are one descent."""
    factor: Count = 1
    """Each descent is so many times as long as the one before (the paper's T_mult)."""

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        period = per_epoch * (epochs if self.restart is None else self.restart)
        while self.factor > 1 and step >= period:
            step, period = step - period, period * self.factor
        return lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * (step % period) / period)) / 2)


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine}

Scheduling = Annotated[Schedule, Contract("schedule", SCHEDULES, Schedule)]
"""For a field: chosen by name in a configuration, or one's own as `package.module:NAME`."""
