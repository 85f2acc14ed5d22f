"""Rounds that are made up, for tests of Oort."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fl_engine.core import seeds
from fl_engine.core.types import FULL, ClientFailure, ClientUpdate, Device, Pool, RoundContext, Stage, Tables, WorkOrder
from fl_engine.selection import Oort
from fl_engine.selection.oort_state import CLIENT
from fl_engine.testing.tiny import SEED, paper_pool

_, POOL = paper_pool()
FULL_ONLY = (POOL[-1],)


def fleet_of(clients: int, speed: Sequence[float] = ()) -> tuple[Device, ...]:
    speeds = speed or (1e9,) * clients
    return tuple(Device(c, "any", 110.0, 0.0, speed=speeds[c]) for c in range(clients))


def context(
    round: int, fleet: tuple[Device, ...], samples: Sequence[int], pool: Pool = FULL_ONLY, **more: Any
) -> RoundContext:
    known: dict[str, Any] = {"available": fleet, "samples": tuple(samples), "draws": tuple(samples), **more}
    return RoundContext(round, SEED, fleet, pool=pool, **known)


def asked(oort: Oort, tables: Tables, now: RoundContext, count: int, draw: int = 0) -> list[int]:
    picks = oort.pick(tables, now, count, seeds.rng(draw, "test", now.round))
    return [client for client, _ in picks]


def answer(
    oort: Oort, tables: Tables, round: int, client: int, utility: float, seconds: float = 1.0, level: int = 0
) -> Tables:
    """One sample, whose loss is the utility."""
    update = ClientUpdate(round, client, FULL, {}, 1, {"rms_loss": utility})
    return oort.learn(tables, WorkOrder(round, client, FULL, {}, 0, level), update, seconds)


def failure(oort: Oort, tables: Tables, round: int, client: int, stage: Stage, seconds: float = 0.0) -> Tables:
    said = ClientFailure(round, client, stage, "made up", elapsed=seconds)
    return oort.learn(tables, WorkOrder(round, client, FULL, {}, 0, 0), said, seconds)


def after(oort: Oort, rounds: Sequence[dict[int, float]], clients: int) -> Tables:
    """The tables after rounds with these utilities."""
    tables = oort.init(fleet_of(clients), FULL_ONLY)
    for round, utilities in enumerate(rounds):
        for client, utility in sorted(utilities.items()):
            tables = answer(oort, tables, round, client, utility)
    return tables


def column(oort: Oort, tables: Tables, round: int, which: int) -> dict[int, float]:
    clients, _ = oort.known(tables, round)
    return {int(c): float(v) for c, v in zip(clients[CLIENT], clients[which], strict=True)}
