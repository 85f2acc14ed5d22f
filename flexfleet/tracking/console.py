"""Log the metrics of rounds to the terminal."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median

from fl_engine.core.contracts import Tracker
from flexfleet.files.measure import levels_in, measure_in
from flexfleet.files.progress import TERMINAL_S, Live, span

log = logging.getLogger("flexfleet")

MOST_LEVELS = 5
"""Maximum number of levels whose metrics are logged separately."""


class Console(Tracker):
    """Log a line for each round to stderr: scores, loss, clients, seconds and remaining time. In a terminal, at most
    two lines are written per second, and the number of results in the current round is shown."""

    def __init__(self, total: int, done: int = 0) -> None:
        """`total` is the number of rounds in the run. `done` is the number of rounds that are already logged."""
        self._total, self._done, self._live = total, done, Live()
        self._recent: deque[float] = deque(maxlen=10)
        self._since = math.inf
        """Total seconds of the rounds since the last log line."""
        self._round, self._began = -1, 0.0

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            if step <= self._done:
                continue
            self._done = step
            self._recent.append(values["seconds_round"])
            self._since += values["seconds_round"]
            if self._live.terminal and self._since < TERMINAL_S and step < self._total:
                continue
            self._since = 0.0
            log.info("round %d/%d  %s%s", step, self._total, summary(values), self._left(step))

    def heard(self, round: int, results: int, clients: int) -> None:
        """Show how many clients have returned a result in this round. `round` is counted from 0."""
        if round != self._round:
            self._round, self._began = round, time.monotonic()
        if self._live.due():
            took = span(time.monotonic() - self._began)
            text = f"round {round + 1}/{self._total}: {results} of {clients} results received after {took}"
            self._live.show(text + self._left(round))

    def finish(self, status: str) -> None:
        self._live.close()

    def _left(self, done: int) -> str:
        left = self._total - done
        return f"  ETA {span(left * median(self._recent))}" if left and self._recent else ""


def summary(values: Mapping[str, float]) -> str:
    """Format a round's metrics in one line, with the score of each level if there are at most MOST_LEVELS levels."""
    measure, levels = measure_in(values), levels_in(values)
    digits = 1 if measure.unit else 3

    def score(value: float) -> str:
        return f"{measure.scale * value:.{digits}f}"

    scores = [f"{key} {score(values[key])} {measure.unit}".rstrip() for key in ("avg", "full") if key in values]
    if len(levels) == 1:  # with a single level, avg and full are equal
        scores = scores[1:]
    elif 1 < len(levels) <= MOST_LEVELS:
        scores = [f"{scores[0]} ({', '.join(f'{name} {score(value)}' for name, value in levels.items())})"]
    loss = f"loss {values['train_loss']:.3f}" if "train_loss" in values else "no client trained"
    counts = {kind: int(values[f"clients_{kind}"]) for kind in ("trained", "pruned", "failed")}
    # Counts of zero are omitted, because log viewers show lines with "failed" in red.
    clients = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count or kind == "trained")
    return "  ".join([*scores, loss, clients, f"{values['seconds_round']:.1f} s"])
