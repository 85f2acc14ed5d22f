"""Checks of a search space and of a selection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from fl_engine.core import seeds
from fl_engine.core.contracts import (
    Algorithm,
    ChoosesNetwork,
    Interval,
    MeasuresClients,
    ModelFamily,
    Searched,
    Selector,
)
from fl_engine.core.errors import BadInput
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
from fl_engine.testing.tiny import tiny_pool

VALUES = (None, 0, 0.001, 1000)
"""What else a searched parameter may be: switched off, very small or very large."""


def check_search(algorithm: Algorithm, family: ModelFamily) -> None:
    """A study begins with the algorithm as it is configured: a parameter that is searched has a value in its range, or
    the algorithm says where the search starts. So it is for every one of VALUES that the algorithm takes, in the place
    of a searched parameter or of the section that it is in."""
    if not isinstance(algorithm, Searched):
        return
    for setting in (algorithm, *_others(algorithm, family)):
        for path, interval in setting.search_space(_pool(setting, family)).items():
            value = _at(_values(setting), path.split("."))
            start = interval.start if value is None else value
            assert _holds(interval, start), f"{path} is {value}, and is searched in {interval}: {setting}"


def _others(algorithm: Any, family: ModelFamily) -> Iterator[Any]:
    kind = TypeAdapter(type(algorithm))
    searched = [path.split(".") for path in algorithm.search_space(_pool(algorithm, family))]
    for path in sorted({tuple(parts[: i + 1]) for parts in searched for i in range(len(parts))}):
        for value in VALUES:
            values = _values(algorithm)
            section = _at(values, path[:-1])
            if not isinstance(section, dict):  # an entry of a list, which is searched as a whole
                continue
            section[path[-1]] = value
            try:
                other = kind.validate_json(TypeAdapter(dict).dump_json(values))
                _pool(other, family)
            except (ValidationError, BadInput):
                continue
            yield other


def _pool(algorithm: Any, family: ModelFamily) -> Pool:
    return tiny_pool(algorithm, algorithm.network(family) if isinstance(algorithm, ChoosesNetwork) else family)


def _values(algorithm: Any) -> dict[str, Any]:
    """The fields, as a configuration has them."""
    values: dict[str, Any] = TypeAdapter(type(algorithm)).dump_python(algorithm, mode="json")
    return values


def _at(values: Any, path: Sequence[str]) -> Any:
    for part in path:
        if isinstance(values, Mapping):
            values = values[part]
        elif isinstance(values, Sequence) and int(part) < len(values):
            values = values[int(part)]
        else:
            return None
    return values


def _holds(interval: Interval, value: Any) -> bool:
    if interval.choices:
        return value in interval.choices
    ends = interval.low, interval.high
    return None not in (value, *ends) and bool(ends[0] <= value <= ends[1])


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
    if isinstance(selector, MeasuresClients):
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
