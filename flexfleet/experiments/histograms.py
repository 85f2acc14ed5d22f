"""A comparison's local accuracies as histograms over the clients, the labels over each other (FedRolex, Figure 3.5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from flexfleet.experiments.curves import Runs
from flexfleet.experiments.first import Case
from flexfleet.reports.local_accuracy import Shown, local_accuracy, over_each_other
from flexfleet.reports.report import Run

MOST = 24
"""Panels in a page: each takes a tenth of a second and 10 kB."""


def draw(runs: Runs, cases: Sequence[Case], colours: Mapping[str, str]) -> str | None:
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


def of_full(runs: Sequence[Run], colour: str) -> Shown | None:
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
