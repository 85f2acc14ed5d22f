"""Made-up pools, traces, picks and results of clients, for tests of selections, algorithms and the simulated clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fl_engine.core.contracts import Selector
from fl_engine.core.types import (
    FULL,
    Assignment,
    Axis,
    ClientUpdate,
    Device,
    ParamLayout,
    Pick,
    Pool,
    PoolModel,
    RoundContext,
    Slot,
    SubmodelSpec,
    Tables,
)
from fl_engine.fleet.trace import ROW, Trace
from fl_engine.testing.tiny import SEED


def paper_pool(shares: Sequence[float] = (0.25, 0.4, 0.5, 0.9, 1.0)) -> tuple[ParamLayout, Pool]:
    """Return a layout with 100 channels and 100 parameters, and a pool with the exact sizes of FlexFL's five models."""
    layout = ParamLayout({"g": 100}, {"w": Slot("b", (Axis("g"),))})
    pool = tuple(
        PoolModel(
            name=name,
            spec=SubmodelSpec.of({"g": round(100 * share)}) if share < 1 else FULL,
            params=round(100 * share),
            share=share,
            macs=round(100 * share),
            dispatched="'" not in name,
            reported="'" not in name,
        )
        for name, share in zip(("M1", "M2'", "M2", "M3'", "M3"), shares, strict=True)
    )
    return layout, pool


def without_fine_tuning(algorithm: Any) -> Any:
    """Return the algorithm without fine-tuning on the server, because the server of a tiny site has no data."""
    return replace(algorithm, fine_tuning=None) if hasattr(algorithm, "fine_tuning") else algorithm


def picked(selector: Selector, tables: Tables, fleet: Sequence[Device], pool: Pool, rng: Any, count: int) -> list[Pick]:
    """Return the clients and levels that the selector picks if all devices are available."""
    return selector.pick(tables, RoundContext(0, SEED, tuple(fleet), tuple(fleet), pool), count, rng)


def learned(selector: Selector, tables: Tables, sent: int, back: int, client: int) -> Tables:
    """Return the selector's tables after a client received the level `sent` and returned the level `back`."""
    update = ClientUpdate(0, client, FULL, {}, 1, {}, level=back)
    return selector.learn(tables, Assignment(0, client, FULL, {}, 0, sent), update, 0.0)


def trace_of(
    rows: Sequence[Sequence[tuple[float, bool, float, float]]], period: Sequence[float] | float = math.inf
) -> Trace:
    """Create a trace from each client's rows (time, online, speed, bandwidth)."""
    table = np.array([(client, *row) for client, own in enumerate(rows) for row in own], ROW)
    return Trace.of(table, np.broadcast_to(np.asarray(period, dtype=np.float64), len(rows)))
