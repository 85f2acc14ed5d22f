"""Check the metrics that clients report, and the states that clients keep between rounds.

A client can report false metrics, so the server rejects an update if a metric is out of bounds (`exchange.updates`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from fl_engine.core.contracts import ClientMetric, HasPersonalModels, KeepsClientState, MeasuresClients, ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import under
from fl_engine.core.task import Task, find_name_error
from fl_engine.core.types import Header, Params, Pool

LARGEST_LOSS = 1e6
"""Maximum absolute value of the loss. A larger loss means that training has diverged."""
ENGINE_BOUNDS: dict[str, tuple[float, float]] = {
    "loss": (-LARGEST_LOSS, LARGEST_LOSS),
    "steps": (1, 1e9),
    "macs": (0, 1e18),
    "seconds": (0, 7 * 86400.0),
    "free": (0, 1e12),
}
"""Minimum and maximum of each metric that all updates contain. The maximum of `seconds` is a pod's lifetime."""
ENCODING = {"seconds_encode": ENGINE_BOUNDS["seconds"]}
"""Bounds of the additional metric that an update contains if a codec has encoded the update."""
LEASE_S = "seconds_lease"
"""Name of the time from the lease of an assignment to the result, as measured by the coordinator."""
LINE_KEYS = (
    "round", "client", "sent", "trained", "examples", "counted", "level", "elapsed", "seconds_simulated",
    "seconds_compute", "seconds_communication", "staleness", "failure", "code",
    LEASE_S,
)  # fmt: skip
"""Keys of a client's line in the run's history that are not metrics. Metrics must not have these names."""
MOST_METRICS = 32
"""Maximum number of metrics per algorithm, to limit the length of a manifest."""


def client_metrics(algorithm: object) -> tuple[ClientMetric, ...]:
    """Return the metrics of the algorithm and of its selection. Raises ConfigError if a declared metric is invalid."""
    found: dict[str, ClientMetric] = {}
    for method in (algorithm, getattr(algorithm, "selection", None)):
        if isinstance(method, MeasuresClients):
            for metric in method.client_metrics():
                if wrong := _wrong(metric) or ("it is declared twice" if metric.name in found else ""):
                    raise ConfigError(f"client metric {metric.name!r} of {type(method).__name__} is invalid: {wrong}")
                found[metric.name] = metric
    if len(found) > MOST_METRICS:
        raise ConfigError(f"an update can contain at most {MOST_METRICS} client metrics, got {len(found)}. Remove some")
    return tuple(found.values())


def _wrong(metric: ClientMetric) -> str:
    if wrong := find_name_error(metric.name):
        return wrong
    if metric.name in ENGINE_BOUNDS or metric.name in ENCODING or metric.name in LINE_KEYS:
        return "the engine uses this name"
    if not (math.isfinite(metric.low) and math.isfinite(metric.high) and metric.low <= metric.high):
        return f"its bounds must be finite, low <= high, got {metric.low} and {metric.high}"
    return ""


def bounds_of(algorithm: object, coded: bool) -> dict[str, tuple[float, float]]:
    """Return the bounds of the metrics that an update must report. `coded` is true if a codec encodes updates."""
    declared = {metric.name: (metric.low, metric.high) for metric in client_metrics(algorithm)}
    return ENGINE_BOUNDS | (ENCODING if coded else {}) | declared


def evaluation_bounds(task: Task) -> dict[str, tuple[float, float]]:
    """Return the bounds of the metrics that an evaluation reports: the task's first metric and the mean loss."""
    return {task.metric.name: (task.metric.low, task.metric.high), "loss": ENGINE_BOUNDS["loss"]}


def out_of_bounds(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> str:
    """Return an error message if the metrics of a client are invalid, otherwise an empty string."""
    if metrics.keys() != bounds.keys():
        return f"expected {', '.join(bounds)}, got {', '.join(metrics) or 'none'}"
    for name, (low, high) in bounds.items():
        if not low <= metrics[name] <= high:
            return f"{name} must be from {low:g} to {high:g}, got {metrics[name]:g}"
    return ""


STATE = "state/"
"""Name prefix of the tensors of a client's state in assignments and updates. No parameter's name has this prefix."""
NAME = re.compile(r"[A-Za-z0-9_./-]{1,256}")

Shapes = dict[str, tuple[int, ...]]
"""Map the names of float32 tensors to their shapes."""


def kept_by_clients(algorithm: object, family: ModelFamily, pool: Pool) -> Shapes:
    """Return the shape of each tensor in a client's state. The dict is empty if clients of this algorithm do not keep a
    state. Raises ConfigError if `client_state` returns invalid names or shapes."""
    whose = type(algorithm).__name__
    if not isinstance(algorithm, KeepsClientState):
        if hasattr(algorithm, "client_state"):
            raise ConfigError(f"{whose} defines client_state, so it must also define the methods begin and keep")
        return {}
    found = {name: tuple(shape) for name, shape in algorithm.client_state(family, pool).items()}
    for name, shape in found.items():
        if NAME.fullmatch(name) is None or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(
                f"{whose}.client_state must map names that match {NAME.pattern} to shapes with positive sizes, got "
                f"{name!r}: {shape}"
            )
    return found


def kept_parameters(algorithm: object, family: ModelFamily, pool: Pool) -> list[str]:
    """Return the names of the clients' private parameters; the global model contains only their initial values."""
    return sorted(kept_by_clients(algorithm, family, pool).keys() & family.layout().slots.keys())


def personal_weights(algorithm: object, state: Params, params: Params) -> Params:
    """Return the weights of a client's personal model. By default, copy the global weights `params` and replace those
    that the client's `state` contains. If `state` is empty, return the weights of `params`."""
    if state and isinstance(algorithm, HasPersonalModels):
        return algorithm.personal(state, params)
    return {name: state.get(name, tensor) for name, tensor in params.items()}


def header(declared: Shapes) -> Header:
    return {name: (torch.float32, shape) for name, shape in declared.items()}


def with_prefix(state: Params) -> Params:
    """Add the prefix `STATE` to the names of a client's state."""
    return {STATE + name: tensor for name, tensor in state.items()}


def split_state(tensors: Params) -> tuple[Params, Params]:
    """Separate a client's state, whose names begin with `STATE`, from the other tensors. Return a tuple (other tensors,
    state without the prefix)."""
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
    return others, under(tensors, STATE)
