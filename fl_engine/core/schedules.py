"""Schedules: the learning rate over the steps of one client's training. A new one is a class and a line in SCHEDULES.
`lr` is the rate of the round, including decay between rounds."""

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
        """Return the learning rate of a step, counted from 0, of `epochs` epochs with `per_epoch` steps each."""


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
    between two restarts. The first step has lr. The last one is one step short of the floor, so no step has rate 0.
    """

    __pydantic_config__ = STRICT
    name: Literal["cosine"] = "cosine"
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of lr at the end of a descent."""
    restart: Count | None = None
    """Epochs after which it restarts at lr; null: all epochs are one descent."""
    factor: Count = 1
    """Each descent is this factor longer than the one before (the paper's T_mult)."""

    def rate(self, lr: float, step: int, per_epoch: int, epochs: int) -> float:
        period = per_epoch * (epochs if self.restart is None else self.restart)
        while self.factor > 1 and step >= period:
            step, period = step - period, period * self.factor
        return lr * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * (step % period) / period)) / 2)


SCHEDULES: dict[str, type[Schedule]] = {"constant": Constant, "cosine": Cosine}

Scheduling = Annotated[Schedule, Contract("schedule", SCHEDULES, Schedule)]
"""The annotation of a field."""
