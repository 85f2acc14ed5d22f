"""What a client reports besides its weights: metrics with bounds, and the state that it keeps between rounds.

A client is a stranger, so each metric has bounds: the worst lie is a number at a bound (`exchange.updates`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from fl_engine.core.contracts import ClientMetric, KeepsClientState, MeasuresClients, ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.task import Task, misnamed
from fl_engine.core.types import Header, Params, Pool

LARGEST_LOSS = 1e6
"""A loss beyond it, on either side, means that training has diverged."""
FIGURES: dict[str, tuple[float, float]] = {
    "loss": (-LARGEST_LOSS, LARGEST_LOSS),
    "steps": (1, 1e9),
    "macs": (0, 1e18),
    "seconds": (0, 7 * 86400.0),
    "free": (0, 1e12),
}
"""The metrics of every update with their least and largest values. A pod lives for at most seven days."""
ENCODING = {"seconds_encode": FIGURES["seconds"]}
"""The additional metrics if the way up is coded."""
OF_A_LINE = (
    "round", "client", "sent", "trained", "examples", "counted", "level", "elapsed", "seconds_simulated",
    "seconds_compute", "seconds_communication", "staleness", "failure",
)  # fmt: skip
"""The other keys of a client's line in a run's history, which no metric may be named."""
MOST_METRICS = 32
"""Bounds the length of a manifest."""


# ---------------------------------------------------------------------------------------------------- metrics
def client_metrics(algorithm: object) -> tuple[ClientMetric, ...]:
    """Return the metrics of the algorithm and its `selection`. Raises ConfigError for a wrong declaration."""
    found: dict[str, ClientMetric] = {}
    for method in (algorithm, getattr(algorithm, "selection", None)):
        if isinstance(method, MeasuresClients):
            for metric in method.client_metrics():
                if wrong := _wrong(metric) or ("it is declared twice" if metric.name in found else ""):
                    raise ConfigError(f"{type(method).__name__} declares the client metric {metric.name!r}: {wrong}")
                found[metric.name] = metric
    if len(found) > MOST_METRICS:
        raise ConfigError(f"at most {MOST_METRICS} client metrics fit into an update, got {len(found)}")
    return tuple(found.values())


def _wrong(metric: ClientMetric) -> str:
    if wrong := misnamed(metric.name):
        return wrong
    if metric.name in FIGURES or metric.name in ENCODING or metric.name in OF_A_LINE:
        return "the engine has a metric of that name"
    if not (math.isfinite(metric.low) and math.isfinite(metric.high) and metric.low <= metric.high):
        return f"its bounds must be finite, low <= high, got {metric.low} and {metric.high}"
    return ""


def bounds_of(algorithm: object, coded: bool) -> dict[str, tuple[float, float]]:
    """Return the bounds of the metrics that an update must report. `coded`: the way up is."""
    declared = {metric.name: (metric.low, metric.high) for metric in client_metrics(algorithm)}
    return FIGURES | (ENCODING if coded else {}) | declared


def evaluation_bounds(task: Task) -> dict[str, tuple[float, float]]:
    """Return the bounds of the metrics of an evaluation: the task's first metric and the mean loss."""
    return {task.metric.name: (task.metric.low, task.metric.high), "loss": FIGURES["loss"]}


def out_of_bounds(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> str:
    """Return what is wrong with a client's metrics, or an empty text."""
    if metrics.keys() != bounds.keys():
        return f"expected {', '.join(bounds)}, got {', '.join(metrics) or 'none'}"
    for name, (low, high) in bounds.items():
        if not low <= metrics[name] <= high:
            return f"{name} must be from {low:g} to {high:g}, got {metrics[name]:g}"
    return ""


# ------------------------------------------------------------------------------------------------------ state
STATE = "state/"
"""The prefix of a state's names in an assignment's memory and in an update's file. No parameter's name begins so."""
NAME = re.compile(r"[A-Za-z0-9_./-]{1,256}")

Shapes = dict[str, tuple[int, ...]]
"""Shapes of float32 tensors by name."""


def kept_by_clients(algorithm: object, family: ModelFamily, pool: Pool) -> Shapes:
    """Return the state that the algorithm's clients keep, or an empty dict. Raises ConfigError for a wrong
    declaration."""
    whose = type(algorithm).__name__
    if not isinstance(algorithm, KeepsClientState):
        if hasattr(algorithm, "client_state"):
            raise ConfigError(f"{whose} has client_state, and must have begin and keep too")
        return {}
    found: Shapes = {}
    for name, shape in algorithm.client_state(family, pool).items():
        sizes = tuple(shape)
        if NAME.fullmatch(name) is None:
            raise ConfigError(f"{whose}.client_state: a name must match {NAME.pattern}, got {name!r}")
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ConfigError(f"{whose}.client_state: the shape of {name!r} must be positive integers, got {shape!r}")
        found[name] = sizes
    return found


def header(declared: Shapes) -> Header:
    """Return the types and shapes of the tensors of a state with these declared shapes."""
    return {name: (torch.float32, shape) for name, shape in declared.items()}


def travelling(state: Params) -> Params:
    """Return the state with the names that it has in messages."""
    return {STATE + name: tensor for name, tensor in state.items()}


def apart(tensors: Params) -> tuple[Params, Params]:
    """Split an assignment's memory or an update's file into (the other tensors, the state by its own names)."""
    if not tensors:
        return {}, {}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
    return others, {n.removeprefix(STATE): tensor for n, tensor in tensors.items() if n.startswith(STATE)}
