"""Count merged and failed updates, and derive the status of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import Diverged, FlexfleetError, NothingMerged
from fl_engine.storage.checkpoints import Row
from flexfleet.files.artifacts import History, Status

REASONS = {
    "clients_dropped": "did not answer",
    "clients_late": "came too late",
    "clients_without_memory": "not enough memory",
    "clients_not_trained": "could not train",
    "clients_lost": "the worker was lost",
    "rejected/finite": "diverged",
    "rejected/dropped": "dropped by the aggregation",
    "rejected/norm": "moved too far",
    "rejected/statistics": "moved too far",
}
"""Map metrics that count failed updates (`rounds.recorder`) to reasons for failures."""
EXPLODED = ("diverged", "moved too far")
"""Reasons for failures of updates whose values are too large or not finite."""
QUORUM = "too few updates for the quorum"


@dataclass(frozen=True)
class Tally:
    """Counts of merged and failed updates over all rounds of a run."""

    merged: int
    failures: Mapping[str, int]
    """Number of failed updates by reason, the most frequent reason first."""
    finite: bool
    """True unless the model has diverged after the last round."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def status(self) -> Status:
        """Status of the run. A run is `diverged` if its model diverged, or if no update was merged and most updates
        failed because their values exploded."""
        if self.merged and self.finite:
            return "finished"
        exploded = sum(self.failures.get(reason, 0) for reason in EXPLODED)
        return "diverged" if self.merged or 2 * exploded > self.failed else "nothing_merged"

    def __str__(self) -> str:
        most = f" (most: {next(iter(self.failures))})" if self.failures else ""
        return f"{self.failed} of {self.merged + self.failed} updates failed{most}"

    def check(self) -> None:
        """Raise Diverged or NothingMerged unless the status is `finished`."""
        kind: type[FlexfleetError] = Diverged if self.status == "diverged" else NothingMerged
        if self.status != "finished":
            raise kind(self.problem())

    def problem(self) -> str:
        """Return the reason why the run does not have a usable model, and a remedy."""
        if self.merged:
            what = "the model has diverged: its scores after the last round are not finite"
        else:
            what = f"no update was merged, so the model is untrained: {self}"
        if self.status == "diverged":
            return f"{what}. Lower the learning rate: training.lr, or lr of algorithm.server"
        return f"{what}. The log contains the reason for each failed client"


def tally_of(rounds: Iterable[Mapping[str, float | None]]) -> Tally:
    """Count the updates in the metrics of all rounds of a run."""
    merged, finite, failures = 0, True, Counter[str]()
    for metrics in rounds:
        merged += int(metrics["clients_trained"] or 0)
        failed = int(metrics["clients_failed"] or 0)
        finite = "diverged" not in metrics
        for name in metrics:
            if name in REASONS or name.startswith("rejected/"):
                count = int(metrics[name] or 0)
                failures[REASONS.get(name) or f"refused: {name.removeprefix('rejected/')}"] += count
                failed -= count
        failures[QUORUM] += failed
    return Tally(merged, {reason: count for reason, count in failures.most_common() if count}, finite)


def tally_in(folder: Path) -> Tally:
    """Count the updates in the history.json of a folder."""
    return tally_of(row.metrics for row in History.read(folder / "history.json").rounds)


def first_failures(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the first failure of each kind, with the number of such failures. Reasons that differ only in numbers are
    of the same kind. `details` are the fields of `core.failure_details.FailureDetails`; {} if none were recorded."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for line in row.clients:
            if "failure" in line:
                new = {"round": row.round + 1, "client": line["client"], "code": line["code"], "count": 0}
                kind = re.sub(r"[0-9.]+", "", line["failure"])
                first = found.setdefault(kind, new | {"reason": line["failure"], "details": line.get("details", {})})
                first["count"] += 1
    return list(found.values())


def lines_of(failure: Mapping[str, Any]) -> list[str]:
    """Describe an element of `first_failures` in one or more lines."""
    found = [f"{failure['reason']} (round {failure['round']}, client {failure['client']})"]
    if details := failure["details"]:
        found.append(f"after {details['seconds']:.1f} s; peak memory of the process: {details['peak_mb']:.0f} MB")
        found += [*details["log"], *details["traceback"]]
    return found
