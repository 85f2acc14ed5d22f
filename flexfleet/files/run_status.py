"""How a run ended: how many updates were merged, how many failed, and why most of them failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import Diverged, FlexfleetError, NothingMerged
from flexfleet.files.artifacts import BareHistory, Status

REASONS = {
    "clients_dropped": "did not answer",
    "clients_late": "came too late",
    "clients_without_memory": "not enough memory",
    "clients_not_trained": "could not train",
    "clients_lost": "the worker was lost",
    "rejected/finite": "diverged",
    "rejected/norm": "moved too far",
    "rejected/statistics": "moved too far",
}
"""Why updates failed, by the metric of a round that counts them (`rounds.recorder`)."""
EXPLODED = ("diverged", "moved too far")
"""The reasons of updates whose values are not finite, or too large."""
QUORUM = "too few updates for the quorum"


@dataclass(frozen=True)
class Tally:
    """The updates of a run's rounds."""

    merged: int
    failures: Mapping[str, int]
    """Number of failed updates by reason, the most frequent reason first."""
    finite: bool
    """Whether all scores of the last round are finite."""

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    @property
    def status(self) -> Status:
        """`diverged` if the model has, or if no update was merged because most had exploding values."""
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
        """What is wrong with a run that has not finished, and what to do."""
        if self.merged:
            what = "the model has diverged: its scores after the last round are not finite"
        else:
            what = f"no update was merged, so the model is untrained: {self}"
        if self.status == "diverged":
            return f"{what}. Lower the learning rate: training.lr, or lr of algorithm.server"
        return f"{what}. The log says why each client failed"


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
    """Count the updates in a folder's history.json."""
    return tally_of(row["metrics"] for row in BareHistory.read(folder / "history.json").rounds)
