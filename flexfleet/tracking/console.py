"""The tracker that people watch: a line for each round, and the progress of the current round."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flexfleet.files.measure import measure_in
from flexfleet.files.progress import TERMINAL_S, Live, span

log = logging.getLogger("flexfleet")

MOST_LEVELS = 5
"""The most levels whose metrics are logged one by one."""


class Console:
    """A line per round on stderr: accuracy of each level, loss, clients, seconds, and remaining time. A terminal gets
    at most two lines a second, and below them how many clients of the round have answered."""

    def __init__(
        self, total: int, done: int = 0, live: Live | None = None, stop_simulated_s: float | None = None
    ) -> None:
        """Args:
        total: Number of all rounds.
        done: Number of rounds that an earlier start has logged.
        stop_simulated_s: Seconds on the simulated clock that end the run earlier.
        """
        self._total, self._done, self._seconds = total, done, stop_simulated_s
        self._clock, self._heard_of = 0.0, 0
        self._live = Live() if live is None else live
        self._recent: deque[float] = deque(maxlen=10)
        self._since = math.inf
        """Seconds that rounds took since the last line."""
        self._round, self._began = -1, 0.0

    def params(self, values: Mapping[str, Any]) -> None:
        pass

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            if step > self._heard_of:
                self._heard_of, self._clock = step, self._clock + values.get("seconds_simulated", 0.0)
            if step <= self._done:
                continue
            self._done = step
            self._recent.append(values["seconds_round"])
            self._since += values["seconds_round"]
            if self._live.terminal and self._since < TERMINAL_S and self._rounds_left(step):
                continue
            self._since = 0.0
            clock = "" if self._seconds is None else f"  {self._clock:,.0f} of {self._seconds:,.0f} simulated s"
            log.info("round %d/%d  %s%s%s", step, self._total, told(values), clock, self._left(step))

    def heard(self, round: int, answered: int, asked: int) -> None:
        """Called when a round begins (`answered` is 0) and with every answer. `round` counts from 0."""
        if round != self._round:
            self._round, self._began = round, time.monotonic()
        if self._live.due():
            took = span(time.monotonic() - self._began)
            text = f"round {round + 1}/{self._total}: {answered} of {asked} clients have answered after {took}"
            self._live.show(text + self._left(round))

    def finish(self, status: str) -> None:
        self._live.close()

    def _left(self, done: int) -> str:
        left = self._rounds_left(done)
        return f"  ETA {span(left * median(self._recent))}" if left and self._recent else ""

    def _rounds_left(self, done: int) -> int:
        """Number of remaining rounds, estimated from the mean simulated time of a round if the clock ends the run."""
        left = self._total - done
        if self._seconds is None or not self._clock:
            return left
        return min(left, max(0, math.ceil((self._seconds - self._clock) * self._heard_of / self._clock)))


def told(values: Mapping[str, float]) -> str:
    """A round's metrics in a few words, with each level's value of the deciding metric."""
    m, levels = measure_in(values), _levels(values)
    if len(levels) == 1:  # its avg is the same value
        return brief({key: value for key, value in values.items() if key != "avg"})
    if not 1 < len(levels) <= MOST_LEVELS:
        return brief(values)
    digits = 1 if m.unit else 3
    each = ", ".join(f"{name} {m.scale * value:.{digits}f}" for name, value in levels.items())
    scores = f"avg {m.scale * values['avg']:.{digits}f} {m.unit}".rstrip()
    return "  ".join([f"{scores} ({each})", *_work(values)])


def brief(values: Mapping[str, float]) -> str:
    """A round's metrics in a few words."""
    m = measure_in(values)
    digits = 1 if m.unit else 3
    scores = [f"{k} {m.scale * values[k]:.{digits}f} {m.unit}".rstrip() for k in ("avg", "full") if k in values]
    return "  ".join([*scores, *_work(values)])


def _work(values: Mapping[str, float]) -> list[str]:
    loss = f"loss {values['train_loss']:.3f}" if "train_loss" in values else "no client trained"
    counts = {kind: int(values[f"clients_{kind}"]) for kind in ("trained", "pruned", "failed")}
    # Log viewers color lines red that contain "failed".
    said = [f"{count} {kind}" for kind, count in counts.items() if count or kind == "trained"]
    return [loss, ", ".join(said), f"{values['seconds_round']:.1f} s"]


def _levels(values: Mapping[str, float]) -> dict[str, float]:
    """Map levels to the values of the metric whose last value is `full`; empty in a round without evaluation."""
    names = [key.removeprefix("loss/") for key in values if key.startswith("loss/")]
    if not names or "avg" not in values or "full" not in values:
        return {}
    metrics = (key.removesuffix(f"/{names[-1]}") for key in values if key.endswith(f"/{names[-1]}"))
    deciding = (each for each in metrics if each != "loss" and values[f"{each}/{names[-1]}"] == values["full"])
    metric = next(deciding, None)
    return (
        {} if metric is None else {name: values[f"{metric}/{name}"] for name in names if f"{metric}/{name}" in values}
    )
