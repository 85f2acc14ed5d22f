"""Generate traces with log-normal speeds, bandwidths and odds of being online, and with configurable correlations.

The paper on multi-branch networks with Oort (section 5.1) uses FedScale's traces with constant speed and varying
bandwidth and availability. This generator creates similar traces without a file. Correlations refer to logarithms. For
a correlation with the sample count, each client's count is replaced by the normal score of its rank among the clients.
Uncorrelated speeds would favour selection algorithms that prefer fast clients. Defaults for which no source is given
are assumptions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Options
from fl_engine.core.types import Device
from fl_engine.fleet.trace import MOST_ROWS, ROW, Flags, Floats, Rows, Trace, Varying

Correlation = Annotated[float, Field(ge=-1, le=1)]
Spread = Annotated[float, Field(ge=0, le=3)]
"""Standard deviation of a natural logarithm."""
Amount = Annotated[float, Field(ge=1e-6, le=1e9)]
Seconds = Annotated[float, Field(ge=1, le=1e9)]

SHORTEST_S = 1.0
"""Minimum length of a session in seconds, which limits the number of sessions."""


@dataclass(frozen=True)
class LogNormal(Options):
    name: Literal["lognormal"] = "lognormal"
    speed: Amount | None = None
    """Median speed in 10^9 multiply-adds per second; null: the speed of each device's tier."""
    speed_sigma: Spread = 0.6
    """Standard deviation of log(speed) between clients. FedScale also uses 0.6 (`get_completion_time_lognormal`)."""
    bandwidth: Amount | None = None
    """Median bandwidth in 10^6 bits per second; null: the bandwidth of each device's tier."""
    bandwidth_sigma: Spread = 1.0
    """Standard deviation of log(bandwidth) between clients."""
    bandwidth_varies: Spread = 0.5
    """Standard deviation over time of log(random factor of the bandwidth); 0: the bandwidth is constant."""
    bandwidth_s: Seconds = 300.0
    """Seconds between two changes of the random bandwidth factor."""
    speed_bandwidth: Correlation = 0.0
    """Correlation between speed and bandwidth."""
    speed_data: Correlation = 0.0
    """Correlation between speed and the number of training samples (as normal scores of the ranks)."""
    speed_online: Correlation = 0.0
    """Correlation between speed and the odds of being online."""
    data_online: Correlation = 0.0
    """Correlation between the number of samples and the odds of being online."""
    sessions: Literal["always", "exponential"] = "exponential"
    """exponential: clients alternate between random online and offline sessions; always: clients stay online."""
    online_s: Seconds = 3600.0
    """Mean length of an online session in seconds, for a client with median odds of being online."""
    offline_s: Seconds = 3600.0
    """Mean length of an offline session in seconds, for a client with median odds of being online."""
    online_sigma: Spread = 1.0
    """Standard deviation between clients of log(odds). The odds are the ratio of online time to offline time."""
    repeat_s: Seconds = 604_800.0
    """Seconds after which the trace repeats."""

    files: ClassVar[tuple[str, ...]] = ()

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        self._check(len(fleet))
        speed_z, bandwidth_z, online_z = self._scores(samples, seed)
        speed = _medians([d.speed for d in fleet], self.speed, 1e9) * np.exp(self.speed_sigma * speed_z)
        bandwidth = _medians([d.bandwidth for d in fleet], self.bandwidth, 1e6 / 8)
        bandwidth = bandwidth * np.exp(self.bandwidth_sigma * bandwidth_z)
        client, time, online = self._sessions(online_z, seed)
        columns = (client, time, online, _rounded(speed)[client], _rounded(bandwidth)[client])
        period = np.full(len(fleet), math.inf if self.sessions == "always" else self.repeat_s)
        return Trace.of(np.rec.fromarrays(columns, ROW), period, self._varying(len(fleet), seed))

    def _check(self, clients: int) -> None:
        a, b, c = self.speed_data, self.data_online, self.speed_online
        if 1 + 2 * a * b * c - a * a - b * b - c * c < -1e-12:
            message = f"speed_data = {a}, data_online = {b} and speed_online = {c} contradict each other. Reduce one"
            raise ConfigError(f"fleet.trace: {message}", code="config.conflict", path="fleet.trace.speed_online")
        rows = 2 * clients * self.repeat_s / (self.online_s + self.offline_s)
        if self.sessions != "always" and rows > MOST_ROWS:
            message = f"at most {MOST_ROWS} sessions can be stored, got about {rows:.3g}. Decrease repeat_s"
            raise ConfigError(f"fleet.trace: {message}", path="fleet.trace.repeat_s")

    def _scores(self, samples: Sequence[int], seed: int) -> tuple[Floats, Floats, Floats]:
        """Return correlated standard normal scores of the clients for speed, bandwidth and the odds of being online."""
        rng, clients = seeds.rng(seed, "trace clients"), len(samples)
        data = np.empty(clients)
        # Break ties at random, because the order of the clients must not affect the ranks.
        order = np.lexsort((rng.random(clients), np.asarray(samples)))
        normal = NormalDist()
        data[order] = [normal.inv_cdf((rank + 0.5) / clients) for rank in range(clients)]
        drawn = rng.standard_normal((3, clients))
        a, b, c, r = self.speed_data, self.data_online, self.speed_online, self.speed_bandwidth
        own = math.sqrt(1 - a * a)
        shared = (c - a * b) / own if own > 0 else 0.0
        speed = a * data + own * drawn[0]
        online = b * data + shared * drawn[0] + math.sqrt(max(0.0, 1 - b * b - shared * shared)) * drawn[1]
        return speed, r * speed + math.sqrt(1 - r * r) * drawn[2], online

    def _sessions(self, online_z: Floats, seed: int) -> tuple[Rows, Floats, Flags]:
        """Return the columns client, time and online of the trace. For a client with the odds o, the mean online time
        is multiplied by sqrt(o), and the mean offline time is divided by sqrt(o). A client is online at the start with
        a probability equal to its mean fraction of online time."""
        clients = len(online_z)
        if self.sessions == "always":
            return np.arange(clients), np.zeros(clients), np.ones(clients, dtype=np.bool_)
        rng = seeds.rng(seed, "trace sessions")
        root = np.exp(self.online_sigma / 2 * online_z)
        means = np.maximum(np.stack([self.offline_s / root, self.online_s * root]), SHORTEST_S)
        begins = rng.random(clients) < means[1] / means.sum(axis=0)
        who, times, states = [np.arange(clients)], [np.zeros(clients)], [begins]
        now, state = np.zeros(clients), begins
        left = np.arange(clients)
        while len(left):
            mean = means[state[left].astype(np.int64), left]
            drawn = np.maximum(mean * rng.standard_exponential(len(mean)), SHORTEST_S)
            now[left] += np.round(drawn, 3)  # Round, because the last bit of a logarithm differs between machines.
            left = left[now[left] < self.repeat_s]
            state = state.copy()
            state[left] = ~state[left]
            who, times, states = [*who, left], [*times, now[left]], [*states, state[left]]
        return np.concatenate(who), np.concatenate(times), np.concatenate(states)

    def _varying(self, clients: int, seed: int) -> Varying | None:
        if self.bandwidth_varies == 0:
            return None

        def draw(interval: int) -> Floats:
            rng = seeds.rng(seed, "trace bandwidth", interval)
            return _rounded(np.exp(self.bandwidth_varies * rng.standard_normal(clients)))

        return Varying(self.bandwidth_s, draw, clients, self.repeat_s)


def _medians(nominal: Sequence[float], median: float | None, unit: float) -> Floats:
    return np.asarray(nominal, dtype=np.float64) if median is None else np.full(len(nominal), median * unit)


def _rounded(values: Floats) -> Floats:
    """Round to 24 bits, because the last bit of an exponential or logarithm differs between machines."""
    return values.astype(np.float32).astype(np.float64)
