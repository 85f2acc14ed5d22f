"""What the rounds of runs say on the way: accuracies reached and what that took, and curves over what was sent."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import fmean

from fl_engine.storage.checkpoints import Row
from flexfleet.experiments.comparison_file import MB, Reached, spread
from flexfleet.experiments.ranking import RankedCase
from flexfleet.reports.local_accuracy import Shown, local_accuracy, over_each_other
from flexfleet.reports.report import FinishedRun

Runs = Mapping[str, Sequence[FinishedRun]]
"""The runs of each label, in the order of the seeds."""
STEPS = 20
"""The accuracies to reach, where none are given, are multiples of 1 / STEPS."""
MOST_TARGETS = 4
"""The most accuracies to reach where none are given."""


def default_targets(runs: Runs) -> tuple[float, ...]:
    """The highest multiples of 5 % that the full model of at least one run exceeds."""
    scored = [row.metrics["full"] for of_label in runs.values() for run in of_label for row in _scored(run.rows)]
    return tuple(k / STEPS for k in range(1, STEPS) if k / STEPS < max(scored))[-MOST_TARGETS:]


def reached(seeds: Sequence[int], runs: Sequence[Sequence[Row]], accuracy: float, of: str = "full") -> Reached:
    """Means over the runs (one for each seed) in which `of`, full or avg, reaches the accuracy."""
    pairs = zip(seeds, runs, strict=True)
    until = {seed: rows[: n + 1] for seed, rows in pairs if (n := first(rows, accuracy, of)) >= 0}
    spent = list(until.values())
    return Reached(
        accuracy=accuracy,
        seeds=tuple(until),
        rounds=spread([len(rows) for rows in spent]),
        mb=spread([sum(sent(rows)) / MB for rows in spent]),
        mb_down=spread([sum(row.metrics["bytes_down"] for row in rows) / MB for rows in spent]),
        mb_up=spread([sum(row.metrics["bytes_up"] for row in rows) / MB for rows in spent]),
        seconds=spread([sum(row.metrics["seconds_round"] for row in rows) for rows in spent]),
        seconds_simulated=spread([simulated(rows) for rows in spent]),
    )


def first(rows: Sequence[Row], accuracy: float, of: str = "full") -> int:
    """Index of the first evaluated round in which `of`, full or avg, has that accuracy; -1 if there is none."""
    return next((row.round for row in rows if of in row.metrics and row.metrics[of] >= accuracy), -1)


def sent(rows: Sequence[Row]) -> list[float]:
    """Bytes down and up in each round."""
    return [row.metrics["bytes_down"] + row.metrics["bytes_up"] for row in rows]


def simulated(rows: Sequence[Row]) -> float | None:
    """Seconds of the rounds on the fleet's devices; None if a round has no simulated time. A round in which no client
    trained takes no time."""
    totals = _clock(rows)
    return None if len(totals) < len(rows) else totals[-1] if totals else 0.0


def _clock(rows: Sequence[Row]) -> list[float]:
    """The simulated seconds until the end of each round, up to the first that has no simulated time."""
    totals, total = [], 0.0
    for row in rows:
        seconds = row.metrics.get("seconds_simulated", None if row.metrics["clients_trained"] else 0.0)
        if seconds is None:
            break
        total += seconds
        totals.append(total)
    return totals


def curve(runs: Sequence[FinishedRun], key: str) -> list[tuple[int, float, list[float]]]:
    """For every round in which all runs were scored: its number from 1, mean MB sent so far, and each run's
    accuracy. Where the simulated clock ended some runs before others, up to the shortest run's last round."""
    totals = [list(accumulate(sent(run.rows))) for run in runs]
    points = []
    for i, rows in enumerate(zip(*(run.rows for run in runs), strict=False)):
        if all(key in row.metrics for row in rows):
            mb = statistics.fmean(total[i] for total in totals) / MB
            points.append((i + 1, mb, [row.metrics[key] for row in rows]))
    return points


def clock(runs: Sequence[FinishedRun], key: str) -> list[float]:
    """Beside each point of `curve`: the mean seconds on the simulated clock so far; empty if a run has no such
    clock."""
    totals = [_clock(run.rows) for run in runs]
    if any(len(total) < len(run.rows) for total, run in zip(totals, runs, strict=True)):
        return []
    return [statistics.fmean(total[number - 1] for total in totals) for number, _, _ in curve(runs, key)]


def _scored(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if "full" in row.metrics)


MOST = 24
"""Panels in a page: each takes a tenth of a second and 10 kB."""


def draw_histograms(runs: Runs, cases: Sequence[RankedCase], colours: Mapping[str, str]) -> str | None:
    """The full models', since labels have other levels: a panel for each case (without cases: one), or for each label
    where they could not be told apart. `colours`: by label. None where no label has a histogram."""
    shown = {label: each for label, own in runs.items() if (each := of_full(own, colours[label])) is not None}
    if not any(each.histogram for each in shown.values()):
        return None
    groups = [(str(case), case.labels) for case in cases] or [("", tuple(runs))]
    panels = [(title, {label: shown[label] for label in labels if label in shown}) for title, labels in groups]
    apart = over_each_other([(title, panel) for title, panel in panels if panel])
    told = f"<p>The first {MOST} of {len(apart)} panels; the reports of the runs have the others.</p>"
    return local_accuracy(apart[:MOST], columns=2) + (told if len(apart) > MOST else "")


def of_full(runs: Sequence[FinishedRun], colour: str) -> Shown | None:
    """Means over the seeds; None where a run has no local accuracies, and without a histogram where one has none."""
    full = [(run.pool.levels[-1].name, run.evaluation) for run in runs]
    scores = [evaluation.local[name] for name, evaluation in full if evaluation.local]
    histograms = [evaluation.local_histogram[name] for name, evaluation in full if evaluation.local_histogram]
    if len(scores) < len(runs):
        return None
    counted: Counter[int] = Counter()
    for each in histograms if len(histograms) == len(runs) else ():
        counted.update(each)
    mean, sd = fmean(score.mean for score in scores), fmean(score.sd for score in scores)
    return Shown(colour, mean, sd, {percent: clients / len(runs) for percent, clients in counted.items()})
