"""Measures the times of a round: phases on the server's real clock, simulated times, and uniformity of client times.

On the server's real clock, these phases add up to `seconds_round`:

- `seconds_plan`: Time for planning the round, until all assignments are determined.
- `seconds_encode`: Time for encoding the weights to send; 0 without a codec.
- `seconds_train`: Time spent waiting for results.
- `seconds_merge`: Time for merging the updates and computing the metrics.
- `seconds_evaluate`: Time for the evaluation; only in rounds with an evaluation.

During `seconds_train`, the server decodes updates (`seconds_decode`) and the clients encode updates.
`seconds_encode_clients` is the encoding time that the clients of the merged updates measured.

On the simulated clock, `simulated_compute` and `simulated_communication` are the times of the slowest merged client.
`simulated_wait` is the time until a client is online. The three times add up to `seconds_simulated`, unless a deadline
ends the round or no update is merged. In asynchronous rounds, compute and communication times are undefined.

Uniformity is 0 if all clients finish at the same time, and grows with the waiting time of the fastest clients
(Enhancing Communication Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch Networks and
the Oort Algorithm, Section 5.3.3, Equation (1)). The unit is seconds, because the paper does not define a unit.

- `uniformity`: Uniformity of the clients' simulated times, including updates that are not merged.
- `uniformity_compute`, `uniformity_communication`: Uniformity of the simulated computing and communication times.
- `uniformity_real`: Uniformity of the seconds that clients measure; only if clients do not train in parallel.
- `uniformity_answered`: Uniformity of the simulated times of merged updates.
- `time_variance`: Population variance of the simulated times, in seconds squared.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

import numpy as np

ON_THE_SERVER = ("seconds_plan", "seconds_encode", "seconds_train", "seconds_merge", "seconds_evaluate")
SIMULATED = ("simulated_compute", "simulated_communication")
BITS = ("bits_down", "bits_up")
NAMES = (*ON_THE_SERVER, "seconds_decode", "seconds_encode_clients", *SIMULATED, *BITS)
REPEATED = (*SIMULATED, *BITS)
"""Metrics that do not depend on a real clock, so their values are identical in repeated runs."""
MEASURED = "uniformity_real"
"""The only uniformity metric that depends on a real clock."""
UNIFORMITY = (
    "uniformity", "uniformity_answered", "uniformity_compute", "uniformity_communication", MEASURED, "time_variance",
)  # fmt: skip


class Times(NamedTuple):
    """Times of a client in a round, in seconds. `real` is a measured time; the other times are simulated."""

    total: float
    compute: float
    communication: float
    real: float


@dataclass
class Stopwatch:
    """Measures the seconds of consecutive phases."""

    began: float = field(default_factory=time.monotonic)
    seconds: dict[str, float] = field(default_factory=dict)

    def ends(self, phase: str) -> None:
        """Add the time since the last call to the total of `phase`."""
        now = time.monotonic()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.began
        self.began = now


def uniformity(seconds: Sequence[float]) -> float:
    """Return sqrt(mean_i (t_i - min t)^2) (Equation (1)) for the times t. At least one time is required."""
    late = np.asarray(seconds, dtype=np.float64)
    late = late - late.min()
    longest = late.max()
    if not longest > 0:
        return 0.0
    return float(longest * np.sqrt(np.mean(np.square(late / longest))))  # Scaling avoids overflow.


def of_clients(times: Sequence[Times], merged: Sequence[Times], alone: bool) -> dict[str, float]:
    """Return the simulated phases and the uniformity metrics of a round. A metric is omitted if no client has a value.
    `times` contains the times of all valid updates. `alone` must be True if clients do not train in parallel."""
    found: dict[str, float] = {}
    if times:
        total, compute, communication, real = zip(*times, strict=True)
        found["uniformity"] = uniformity(total)
        found["uniformity_compute"] = uniformity(compute)
        found["uniformity_communication"] = uniformity(communication)
        if alone:
            found[MEASURED] = uniformity(real)
        found["time_variance"] = float(np.var(np.asarray(total, dtype=np.float64)))
    if merged:
        last = max(merged, key=lambda each: each.total)
        found |= {"simulated_compute": last.compute, "simulated_communication": last.communication}
        found["uniformity_answered"] = uniformity([each.total for each in merged])
    return found


def waste(rounds: Sequence[Mapping[str, float]]) -> float:
    """Return the fraction of the sent weights that was not returned: 1 - sum size(returned) / sum size(sent)
    (AdaptiveFL Sec. 4.1). Sizes are measured before encoding, because bytes saved by an upload codec are not waste."""
    down, up = (sum(m.get(f"model_bytes_{way}", m[f"bytes_{way}"]) for m in rounds) for way in ("down", "up"))
    return 1 - up / down if down else 0.0


def means(rounds: Sequence[Mapping[str, float]], names: Iterable[str]) -> dict[str, float]:
    """Return the mean of each metric over the rounds that contain the metric. Omit metrics that no round contains."""
    by_name = {name: [metrics[name] for metrics in rounds if metrics.get(name) is not None] for name in names}
    return {name: fmean(values) for name, values in by_name.items() if values}
