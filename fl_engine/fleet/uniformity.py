"""Uniformity of training times: 0 if the clients of a round finish at the same moment, larger the longer the first ones
wait.

Source: Enhancing Communication Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch
Networks and the Oort Algorithm, Section 5.3.3, Equation (1). The paper prints about 532 without and 313 with branches,
without the unit and the average. Here times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NAMES = (
    "uniformity",
    "uniformity_answered",
    "uniformity_compute",
    "uniformity_communication",
    "uniformity_real",
    "time_variance",
)
"""The names of the metrics of `measured`."""
MEASURED = "uniformity_real"
"""The metric that differs when a run is repeated; the others use the simulated clock."""


class Times(NamedTuple):
    """Seconds of one client in one round: in all, to compute and to communicate on the simulated clock, and `real` ones
    of its training."""

    total: float
    compute: float
    communication: float
    real: float


def uniformity(seconds: Sequence[float]) -> float:
    """Return sqrt(mean_i (t_i - min t)^2) of one time or more (Equation (1))."""
    late = np.asarray(seconds, dtype=np.float64)
    late = late - late.min()
    longest = late.max()
    if not longest > 0:
        return 0.0
    return float(longest * np.sqrt(np.mean(np.square(late / longest))))  # scaled: the square of a large time overflows


def measured(asked: Sequence[Times], answered: Sequence[Times], alone: bool) -> dict[str, float]:
    """The metrics of a round.

    `asked`: the clients whose update arrived, whether it is merged or not; late ones count. A client that sent no
    update (it dropped out, had no room, failed, lost its pod, or was not waited for by the clock on the wall), or one
    that cannot be read or trusted, has no known time and is left out. `answered`: those whose update is merged.
    `alone`: each client trains by itself, so that its measured seconds are its own; clients that train side by side
    share their steps.

    - `uniformity`: of the time on the simulated clock
    - `uniformity_compute`, `uniformity_communication`: of the parts of it in which clients compute, and in which they
      receive and send
    - `uniformity_real`: of the seconds of training that clients measured, with `alone`
    - `uniformity_answered`: as `uniformity`, over those that answered
    - `time_variance`: the variance (over n) of the time on the simulated clock, in seconds squared

    Without clients a metric is left out.
    """
    found: dict[str, float] = {}
    if asked:
        total, compute, communication, real = zip(*asked, strict=True)
        found["uniformity"] = uniformity(total)
        found["uniformity_compute"] = uniformity(compute)
        found["uniformity_communication"] = uniformity(communication)
        if alone:
            found["uniformity_real"] = uniformity(real)
        found["time_variance"] = float(np.var(np.asarray(total, dtype=np.float64)))
    if answered:
        found["uniformity_answered"] = uniformity([times.total for times in answered])
    return found
