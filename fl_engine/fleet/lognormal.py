"""A fleet with log-normal speeds, bandwidths and odds of being online, with given correlations.

The paper on multi-branch networks with Oort (section 5.1) uses FedScale's traces, in which computation is fixed, and
bandwidth and the online status vary. This generator has the same parts and needs no file. Correlations are between the
logarithms, or for data the normal scores of the ranks. They matter because independent speeds favour a selection that
prefers fast clients. Defaults without a source are assumed, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import STRICT
from fl_engine.core.types import Device
from fl_engine.fleet.trace import Flags, Floats, Rows, Trace, Varying

Correlation = Annotated[float, Field(ge=-1, le=1)]
Spread = Annotated[float, Field(ge=0, le=3)]
"""Standard deviation of a natural logarithm."""
Amount = Annotated[float, Field(ge=1e-6, le=1e9)]
Seconds = Annotated[float, Field(ge=1, le=1e9)]

MOST_ROWS = 50_000_000
SHORTEST_S = 1.0
"""The shortest session in seconds, which bounds their number."""


@dataclass(frozen=True)
class LogNormal:
    __pydantic_config__ = STRICT
    name: Literal["lognormal"] = "lognormal"
    speed: Amount | None = None
    """10^9 multiply-adds per second: the median; null: that of each device's tier."""
    speed_sigma: Spread = 0.6
    """Spread of its natural logarithm. 0.6 as in FedScale (`get_completion_time_lognormal`)."""
    bandwidth: Amount | None = None
    """10^6 bits per second: the median; null: that of each device's tier. With rate=shannon 10^6 Hz."""
    bandwidth_sigma: Spread = 1.0
    """Spread of its natural logarithm between clients."""
    bandwidth_varies: Spread = 0.5
    """Spread of the natural logarithm of a factor on each client's bandwidth, around 1; 0: it stays as it is."""
    bandwidth_s: Seconds = 300.0
    """Seconds after which each client's factor is drawn anew."""
    speed_bandwidth: Correlation = 0.0
    """Correlation of speed and bandwidth."""
    speed_data: Correlation = 0.0
    """Correlation of speed and the number of training samples, as the normal score of its rank."""
    speed_online: Correlation = 0.0
    """Correlation of speed and the odds of being online."""
    data_online: Correlation = 0.0
    """Correlation of the number of samples and the odds of being online."""
    sessions: Literal["always", "exponential", "lognormal"] = "exponential"
    """How long clients are online and offline in turn; always: they stay online."""
    online_s: Seconds = 3600.0
    """Seconds: how long a client in the middle of the fleet is online, on average."""
    offline_s: Seconds = 3600.0
    """Seconds: likewise offline."""
    online_sigma: Spread = 1.0
    """Spread of the natural logarithm of the odds of being online (online over offline seconds) between clients."""
    session_sigma: Spread = 1.0
    """Spread of the natural logarithm of a session's seconds, with sessions=lognormal."""
    rate: Literal["bandwidth", "shannon"] = "bandwidth"
    """shannon: what a channel can carry at most, bandwidth * log2(1 + SNR), instead of its bandwidth alone (Shannon
    1948). The paper (section 6) names the achievable data rate as a better measure that it has no data for."""
    snr_db: Annotated[float, Field(ge=-30, le=60)] = 10.0
    """dB: the mean signal-to-noise ratio, with rate=shannon."""
    snr_sigma_db: Annotated[float, Field(ge=0, le=20)] = 6.0
    """dB: the spread of the ratio, drawn for each client every `bandwidth_s` seconds. 6 dB as log-normal shadowing in
    cities (3GPP TR 38.901 Table 7.4.1-1, UMa NLOS)."""
    repeat_s: Seconds = 604_800.0
    """Seconds after which everything begins anew."""

    @property
    def files(self) -> tuple[str, ...]:
        return ()

    def trace(self, fleet: Sequence[Device], samples: Sequence[int], seed: int) -> Trace:
        self._check(len(fleet))
        speed_z, bandwidth_z, online_z = self._scores(samples, seed)
        speed = _medians([d.speed for d in fleet], self.speed, 1e9) * np.exp(self.speed_sigma * speed_z)
        bandwidth = _medians([d.bandwidth for d in fleet], self.bandwidth, 1e6 / 8)
        bandwidth = bandwidth * np.exp(self.bandwidth_sigma * bandwidth_z)
        first, time, online = self._sessions(online_z, seed)
        count = np.diff(first)
        period = np.full(len(fleet), math.inf if self.sessions == "always" else self.repeat_s)
        return Trace(
            first,
            time,
            online,
            np.repeat(_rounded(speed), count),
            np.repeat(_rounded(bandwidth), count),
            period,
            self._varying(len(fleet), seed),
        )

    def _check(self, clients: int) -> None:
        a, b, c = self.speed_data, self.data_online, self.speed_online
        if 1 + 2 * a * b * c - a * a - b * b - c * c < -1e-12:
            raise ConfigError(
                f"fleet.trace: speed_data = {a}, data_online = {b} and speed_online = {c} cannot all hold. Move one of "
                "them towards 0"
            )
        rows = 2 * clients * self.repeat_s / (self.online_s + self.offline_s)
        if self.sessions != "always" and rows > MOST_ROWS:
            raise ConfigError(
                f"fleet.trace: at most {MOST_ROWS} sessions can be stored, got about {rows:.3g}. Lower repeat_s"
            )

    def _scores(self, samples: Sequence[int], seed: int) -> tuple[Floats, Floats, Floats]:
        """Return the standard normal scores of speed, bandwidth and the odds of being online, by client."""
        rng, clients = seeds.rng(seed, "trace clients"), len(samples)
        data = np.empty(clients)
        # Clients with as many samples are ranked at random, or the first ones would count as those with the least.
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

    # ------------------------------------------------------------------------------------------------ sessions
    def _sessions(self, online_z: Floats, seed: int) -> tuple[Rows, Floats, Flags]:
        """Return (first, time, online) of the rows. A client's odds o multiply the ratio of its mean seconds online and
        offline: sqrt(o) the one, 1 / sqrt(o) the other. It begins online with its share of online time."""
        clients = len(online_z)
        if self.sessions == "always":
            return np.arange(clients + 1), np.zeros(clients), np.ones(clients, dtype=np.bool_)
        rng = seeds.rng(seed, "trace sessions")
        root = np.exp(self.online_sigma / 2 * online_z)
        means = np.maximum(np.stack([self.offline_s / root, self.online_s * root]), SHORTEST_S)
        begins = rng.random(clients) < means[1] / means.sum(axis=0)
        who, times, states = [np.arange(clients)], [np.zeros(clients)], [begins]
        now, state = np.zeros(clients), begins
        left = np.arange(clients)
        while len(left):
            mean = means[state[left].astype(np.int64), left]
            now[left] += self._durations(mean, rng, under_way=len(times) == 1)
            left = left[now[left] < self.repeat_s]
            state = state.copy()
            state[left] = ~state[left]
            who, times, states = [*who, left], [*times, now[left]], [*states, state[left]]
        client = np.concatenate(who)
        order = np.argsort(client, kind="stable")
        first = np.concatenate([[0], np.cumsum(np.bincount(client, minlength=clients))])
        return first, np.concatenate(times)[order], np.concatenate(states)[order]

    def _durations(self, mean: Floats, rng: np.random.Generator, under_way: bool) -> Floats:
        """Return the seconds of one session each. `under_way`: the rest of the session at a given moment; an
        exponential one has no memory, a log-normal one is longer in proportion to its length."""
        if self.sessions == "exponential":
            drawn = mean * rng.standard_exponential(len(mean))
        else:
            s = self.session_sigma
            drawn = mean * np.exp(s * rng.standard_normal(len(mean)) + (s * s / 2 if under_way else -s * s / 2))
            drawn = drawn * rng.random(len(mean)) if under_way else drawn
        # To the millisecond, so that machines whose logarithms differ in the last bit agree.
        return np.asarray(np.round(np.maximum(drawn, SHORTEST_S), 3), dtype=np.float64)

    # ----------------------------------------------------------------------------------------------- bandwidth
    def _varying(self, clients: int, seed: int) -> Varying | None:
        if self.bandwidth_varies == 0 and self.rate == "bandwidth":
            return None

        def draw(interval: int) -> Floats:
            rng = seeds.rng(seed, "trace bandwidth", interval)
            factor = np.exp(self.bandwidth_varies * rng.standard_normal(clients))
            if self.rate == "shannon":
                factor = factor * efficiency(self.snr_db + self.snr_sigma_db * rng.standard_normal(clients))
            return _rounded(factor)

        return Varying(self.bandwidth_s, draw, clients, self.repeat_s)


def efficiency(snr_db: Floats) -> Floats:
    """Return log2(1 + SNR), in bits per second and Hz (Shannon, A Mathematical Theory of Communication, 1948)."""
    return np.log1p(10 ** (snr_db / 10)) / math.log(2)


def _medians(own: Sequence[float], given: float | None, unit: float) -> Floats:
    return np.asarray(own, dtype=np.float64) if given is None else np.full(len(own), given * unit)


def _rounded(values: Floats) -> Floats:
    """Round to 24 bits, so that machines whose logarithms differ in the last of 53 agree."""
    return values.astype(np.float32).astype(np.float64)
