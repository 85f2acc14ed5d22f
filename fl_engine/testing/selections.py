"""The law of every selection: a client that never answers is not asked more often than one that does."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import get_args

from fl_engine.core import seeds
from fl_engine.core.contracts import Selector, measures_clients
from fl_engine.core.types import (
    FULL,
    ClientFailure,
    ClientUpdate,
    Device,
    Outcome,
    Pool,
    RoundContext,
    Stage,
    WorkOrder,
)
from fl_engine.selection.capacity import dispatched, holds

ROUNDS = 500
CAPACITIES = [35.0, 60.0, 110.0] * 8
"""Of 24 devices, in % of the full model."""
SILENT = range(6)
"""Two clients for each capacity."""
ASKED = 6


def check_silent(selector: Selector, pool: Pool) -> None:
    """Fail if the clients that never answer are asked more often than others with the same device. Three standard
    deviations of a uniform draw are allowed. Every device can hold the smallest model."""
    least = 100 * pool[dispatched(pool)[0]].share + 0.1
    fleet = tuple(Device(client, f"{most:g}", max(most, least), 8.0) for client, most in enumerate(CAPACITIES))
    asked = times_asked(selector, pool, fleet, SILENT)
    for most in {device.most for device in fleet}:
        alike = [device.client for device in fleet if device.most == most]
        silent = [asked[client] for client in alike if client in SILENT]
        honest = fmean(asked[client] for client in alike if client not in SILENT)
        slack = 3 * math.sqrt(honest / len(silent))
        assert fmean(silent) <= honest + slack, f"{most:g} % free: silent {silent} times, others {honest:g} times"


def times_asked(selector: Selector, pool: Pool, fleet: Sequence[Device], silent: Collection[int]) -> Counter[int]:
    """Count how often each client is asked if the clients in `silent` never answer, and the others train the largest
    model that they hold of what they were sent."""
    tables, asked, stages = selector.init(fleet, pool), Counter[int](), get_args(Stage)
    metrics = {"loss": 1.0, "steps": 1.0}
    if measures_clients(selector):
        metrics |= {metric.name: min(max(1.0, metric.low), metric.high) for metric in selector.client_metrics()}
    known = (10,) * len(fleet)
    for round in range(ROUNDS):
        context = RoundContext(round, 0, tuple(fleet), tuple(fleet), pool, samples=known, draws=known)
        for client, level in selector.pick(tables, context, ASKED, seeds.rng(0, "silent", round)):
            order = WorkOrder(round, client, FULL, {}, 0, level)
            answer: Outcome = ClientFailure(round, client, stages[round % len(stages)], "never answers")
            if client not in silent:
                fits = [i for i in range(level + 1) if holds(fleet[client], pool[i].share)]
                answer = ClientUpdate(round, client, FULL, {}, 10, metrics, level=max(fits, default=0))
            asked[client] += 1
            tables = selector.learn(tables, order, answer, float(client not in silent))
    return asked
