"""Oort's pacer: how long a round should preferably take (Lai et al., OSDI 2021, Sec. 4.3, Alg. 1 lines 7-8)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Pacer:
    """T, the time that a round should preferably take, is a percentile of the clients' times. Every `step` rounds, what
    the preferred clients brought in utility is compared with the `step` rounds before. Where it has become flat, T
    rises, to reach slower clients with other data; where it has changed sharply, T falls."""

    rounds: int
    """So many are over."""
    percentile: float
    """From 100 on there is no T."""
    history: tuple[float, ...] = ()
    """The mean utility of each of the last 2 * `step` rounds."""

    def after(
        self, rounds: int, brought: Mapping[int, float], *, step: int, delta: float, flat: float, sharp: float
    ) -> Pacer:
        """The pacer when `rounds` rounds are over. `brought`: by round, counted from 0, the mean utility of those that
        were preferred; 0 for a round that is not there.

        As in the code, a change of exactly `flat` is flat, one of exactly `sharp` is sharp, 0 after 0 is flat, and the
        percentile stays between `delta` and 100.
        """
        percentile, history = self.percentile, list(self.history)
        for over in range(self.rounds + 1, rounds + 1):
            history = [*history[1 - 2 * step :], brought.get(over - 1, 0.0)]
            if over >= 2 * step and over % step == 0:
                before, now = sum(history[:step]), sum(history[step:])
                if abs(now - before) <= flat * before:
                    percentile = min(100.0, percentile + delta)
                elif abs(now - before) >= sharp * before:
                    percentile = max(delta, percentile - delta)
        return Pacer(max(rounds, self.rounds), percentile, tuple(history))

    def preferred(self, seconds: np.ndarray) -> float:
        """T for clients that need so long, (N,) with N >= 1."""
        if self.percentile >= 100:
            return math.inf
        place = min(int(len(seconds) * self.percentile / 100), len(seconds) - 1)
        return float(np.partition(seconds, place)[place])

    @property
    def rows(self) -> Rows:
        """As a table."""
        return (float(self.rounds), self.percentile), self.history

    @staticmethod
    def of(rows: Rows) -> Pacer:
        (rounds, percentile), history = rows
        return Pacer(int(rounds), percentile, history)
