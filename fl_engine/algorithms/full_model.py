"""What algorithms share that know one model only, the full one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fl_engine.core import pool as pools
from fl_engine.core.errors import ConfigError
from fl_engine.core.types import FULL, Device, ModelFamily, Pool, Selector
from fl_engine.selection import Uniform
from fl_engine.selection.capacity import holds

Eligible = Literal["all", "capable"]


def full_pool(family: ModelFamily) -> Pool:
    return (pools.member(family, "full", FULL, dispatched=True, reported=True),)


def selector(chosen: Selector | None, eligible: Eligible) -> Selector:
    """The configured selection, or uniform among those that are eligible."""
    if chosen is not None:
        return chosen
    return Uniform(model="largest" if eligible == "all" else "capacity")


def check_eligible(eligible: Eligible, fleet: Sequence[Device]) -> None:
    if eligible == "capable" and not any(holds(d, 1.0) for d in fleet):
        raise ConfigError("algorithm.eligible is 'capable', but no device of the fleet can hold the full model")
