"""What a client reports besides its weights: figures with bounds, and the state that it keeps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from fl_engine.core.contracts import (
    ClientMetric,
    ModelFamily,
    keeps_client_state,
    measures_clients,
)
from fl_engine.core.errors import ConfigError
from fl_engine.core.task import Task, misnamed
from fl_engine.core.types import Header, Params, Pool

LARGEST_LOSS = 1e6
"""Beyond it, on either side, training has diverged."""
FIGURES: dict[str, tuple[float, float]] = {
    "loss": (-LARGEST_LOSS, LARGEST_LOSS),
    "steps": (1, 1e9),
    "macs": (0, 1e18),
    "seconds": (0, 7 * 86400.0),
    "free": (0, 1e12),
}
"""What every update reports: (least, most), where nothing closer is known. A pod lives for seven days at most."""
ENCODING = {"seconds_encode": FIGURES["seconds"]}
"""What an update reports besides where the way up is coded: the client's seconds of encoding."""
OF_A_LINE = (
    "round", "client", "sent", "trained", "examples", "counted", "level", "elapsed", "seconds_simulated",
    "seconds_compute", "seconds_communication", "staleness", "failure",
)  # fmt: skip
"""The other keys of a client's line in a run's history: no metric may have one of these names."""
MOST_METRICS = 32
"""A method's metrics have to fit into a manifest of bounded length."""


def client_metrics(algorithm: object) -> tuple[ClientMetric, ...]:
    """What the algorithm and its `selection` want measured. Raises ConfigError where a declaration is wrong."""
    found: dict[str, ClientMetric] = {}
    for method in (algorithm, getattr(algorithm, "selection", None)):
        if measures_clients(method):
            whose = type(method).__name__
            for metric in method.client_metrics():
                if wrong := _wrong(metric) or ("it is declared twice" if metric.name in found else ""):
                    raise ConfigError(f"{whose} declares the client metric {metric.name!r}: {wrong}")
                found[metric.name] = metric
    if len(found) > MOST_METRICS:
        raise ConfigError(f"{len(found)} client metrics are declared, an update has room for {MOST_METRICS}")
    return tuple(found.values())


def bounds_of(algorithm: object, coded: bool) -> dict[str, tuple[float, float]]:
    """The figures that an update has to report, with the least and the most of each. `coded`: its way up is."""
    declared = {metric.name: (metric.low, metric.high) for metric in client_metrics(algorithm)}
    return FIGURES | (ENCODING if coded else {}) | declared


def evaluation_bounds(task: Task) -> dict[str, tuple[float, float]]:
    """The figures of an answer to an order that evaluates: the metric that decides, and the mean loss, with the least
    and the most of each."""
    return {task.metric.name: (task.metric.low, task.metric.high), "loss": FIGURES["loss"]}


def out_of_bounds(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> str:
    """What is wrong with the figures of a client; empty: they are those of `bounds`, and within them."""
    if metrics.keys() != bounds.keys():
        return f"{', '.join(bounds)} are expected, got {', '.join(metrics) or 'none'}"
    for name, (low, high) in bounds.items():
        if not low <= metrics[name] <= high:
            return f"{name} is {metrics[name]:g}, from {low:g} to {high:g} is expected"
    return ""


def _wrong(metric: ClientMetric) -> str:
    """Why a declaration is wrong; empty: it is right."""
    if wrong := misnamed(metric.name):
        return wrong
    if metric.name in FIGURES or metric.name in ENCODING or metric.name in OF_A_LINE:
        return "the engine has a figure of that name: take another"
    if not (math.isfinite(metric.low) and math.isfinite(metric.high) and metric.low <= metric.high):
        return f"its bounds are two finite numbers, low <= high, got {metric.low} and {metric.high}"
    return ""


STATE = "state/"
"""The prefix of its names in an order's memory and in an update's file. No parameter's name begins like this."""
NAME = re.compile(r"[A-Za-z0-9_./-]{1,256}")

Shapes = dict[str, tuple[int, ...]]
"""By name; numbers are float32."""


def kept_by_clients(algorithm: object, family: ModelFamily, pool: Pool) -> Shapes:
    """What the algorithm declares that each client keeps; empty where it keeps nothing. Raises ConfigError where the
    declaration is wrong."""
    if not keeps_client_state(algorithm):
        if hasattr(algorithm, "client_state"):
            raise ConfigError(
                f"{type(algorithm).__name__} declares what clients keep (client_state), and lacks begin or keep: it "
                "needs all three"
            )
        return {}
    found: Shapes = {}
    for name, shape in algorithm.client_state(family, pool).items():
        sizes = tuple(shape)
        if NAME.fullmatch(name) is None:
            wrong = "a name is 1 to 256 letters, digits and _ . / -"
        elif not all(isinstance(size, int) and size > 0 for size in sizes):
            wrong = f"a shape is a tuple of positive integers, got {shape!r}"
        else:
            found[name] = sizes
            continue
        raise ConfigError(f"{type(algorithm).__name__} declares {name!r} as state of a client: {wrong}")
    return found


def header(declared: Shapes) -> Header:
    """Return the types and shapes of the tensors of a state with these declared shapes."""
    return {name: (torch.float32, shape) for name, shape in declared.items()}


def travelling(state: Params) -> Params:
    """The state with the names that it has on the way."""
    return {STATE + name: tensor for name, tensor in state.items()}


def apart(tensors: Params) -> tuple[Params, Params]:
    """(all but the state, the state by its own names) of an order's memory or an update's file."""
    if not tensors:
        return {}, {}
    others = {name: tensor for name, tensor in tensors.items() if not name.startswith(STATE)}
    return others, {n.removeprefix(STATE): tensor for n, tensor in tensors.items() if n.startswith(STATE)}
