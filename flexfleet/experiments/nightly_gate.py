"""Compute the metrics of a nightly regression run, and check whether a metric is significantly worse.

A nightly regression run uses a subset of the reference's seeds. Only values of the same seed are compared, so that the
large differences between seeds cancel out. Each metric is compared with the reference. The reference is fixed, so many
small losses cannot accumulate unnoticed. Each metric is also compared with its mean over the earlier runs that passed
with this reference.

A metric fails if its mean is worse than the earlier mean by more than `max(threshold, Z * s * sqrt(1/n + 1/m))`. Here n
is the number of new values, and m is the number of earlier values. s is the standard deviation between earlier values
of one seed, pooled over the seeds.
"""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
from pydantic import Field, model_validator

from fl_engine.core.records import Strict
from fl_engine.core.system import cpu_values
from flexfleet.experiments import summarise
from flexfleet.experiments.comparison_file import MB
from flexfleet.experiments.nightly_suite import METRICS, NightlyRun
from flexfleet.experiments.nightly_verdict import HIGHER, PASSED, REFERENCE, Check, Verdict, table
from flexfleet.files.artifacts import Artifact
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.finished_run import FinishedRun, load
from flexfleet.reports.page import PageSection, page
from flexfleet.tracking import record as track

OF_MACHINE = ("peak_mb_rounds", "pace")
"""Metrics that depend on the machine. These metrics are compared only between runs on identical machines."""
Z = 4.0
"""Number of standard errors by which a metric may be worse. Without a regression, about 1 of 30,000 comparisons exceeds
the limit. With 30 comparisons per run, about 1 of 1,000 nightly regression runs fails by chance."""

PROCESSES, TASKS = "processes of their own", "tasks of a graph"
MEMORY = ("peak_mb", "peak_mb_rounds")
"""Names of two metrics: the peak memory of the process, and the growth of this peak after the start of the first round.
Only the growth is checked, because the memory of imported packages could hide a leak."""

Folders = Mapping[tuple[str, str], Path]
"""Map (case, run ID) to the folder of each finished run."""


class LabelFigures(Strict):
    """Metrics of one variant."""

    task: str
    """Digest of the variant's settings without hyper-parameters. Metrics with different digests are not compared."""
    values: dict[str, Annotated[tuple[float, ...], Field(min_length=2)]]
    """Map each metric to a tuple with one value for each seed."""
    curve: tuple[tuple[int, float, tuple[float, ...], tuple[float, ...]], ...]
    """Points of the curve, each with the round, the MB sent so far (mean over the seeds), and avg and full per seed."""
    mlflow_runs: tuple[str, ...] = ()
    metric: str = "accuracy"
    """Main metric of the task, from which avg and full are computed."""


class NightlyFigures(Artifact):
    """Metrics of a nightly regression run (figures.json) or of a reference."""

    suite: str
    id: str
    when: str
    commit: str | None
    machine: dict[str, str]
    """Machine, kind of process and backend. Memory and pace are only compared between runs that agree in all three."""
    seeds: tuple[int, ...]
    labels: dict[str, LabelFigures]
    """Map `<case>/<label>` to metrics."""

    @model_validator(mode="after")
    def _a_value_for_each_seed(self) -> NightlyFigures:
        for label, figures in self.labels.items():
            for metric, values in figures.values.items():
                if len(values) != len(self.seeds):
                    raise ValueError(f"{metric} of {label} must have {len(self.seeds)} values, one for each seed")
        return self


def measure(nightly: NightlyRun, folders: Folders, runs_in: str = PROCESSES) -> NightlyFigures:
    """Compute the metrics of a nightly regression run from its finished runs.

    Args:
        runs_in: PROCESSES or TASKS, the kind of process that executed the runs. It affects their memory.
    """
    labels = {}
    for case, entries in nightly.runs.items():
        for label in dict.fromkeys(entry.label for entry in entries):
            own = [entry for entry in entries if entry.label == label]
            runs = [load(folders[case, entry.name]) for entry in own]
            labels[f"{case}/{label}"] = LabelFigures(
                task=nightly.tasks[f"{case}/{label}"],
                values=_values(runs, nightly.suite.cases[case].to),
                curve=_curve(runs),
                mlflow_runs=tuple(run.file.mlflow_run_id for run in runs if run.file.mlflow_run_id),
                metric=runs[0].evaluation.metric,
            )
    backends = sorted({entry.config.run.backend for entries in nightly.runs.values() for entry in entries})
    return NightlyFigures(
        suite=nightly.name,
        id=nightly.id,
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=track.commit(),
        machine={**machine(), "runs in": runs_in, "backend": ", ".join(backends)},
        seeds=nightly.seeds,
        labels=labels,
    )


def _values(runs: Sequence[FinishedRun], to: float) -> dict[str, tuple[float, ...]]:
    """Map each metric to a tuple with one value for each run. If a run does not reach the accuracy `to`, its number of
    rounds is the length of the longest run plus one."""
    longest = 1 + max(len(run.rows) for run in runs)
    until = [summarise.first(run.rows, to) for run in runs]
    sent = [[row.metrics["bytes_down"] + row.metrics["bytes_up"] for row in run.rows] for run in runs]
    return {
        "avg": tuple(run.evaluation.avg for run in runs),
        "full": tuple(run.evaluation.full for run in runs),
        "pace": tuple(median(row.metrics["seconds_round"] for row in run.rows) for run in runs),
        "rounds": tuple(float(n + 1 if n >= 0 else longest) for n in until),
        "mb": tuple(
            (sum(each[: n + 1]) if n >= 0 else sum(each) * longest / len(each)) / MB
            for n, each in zip(until, sent, strict=True)
        ),
        **{name: tuple(max(row.metrics[name] for row in run.rows) for run in runs) for name in MEMORY},
    }


def _curve(runs: Sequence[FinishedRun]) -> tuple[tuple[int, float, tuple[float, ...], tuple[float, ...]], ...]:
    rows = [run.rows for run in runs]
    avg, full = plots.curve(rows, "avg"), plots.curve(rows, "full")
    return tuple((round, mb, tuple(a), tuple(f)) for (round, mb, a), (_, _, f) in zip(avg, full, strict=True))


def machine() -> dict[str, str]:
    """Return the properties of this machine that affect memory and pace."""
    return {
        "cpu": next(iter(cpu_values("model name")), "unknown"),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
    }


def judge(
    now: NightlyFigures, reference: NightlyFigures, passed: Sequence[NightlyFigures], thresholds: Mapping[str, float]
) -> list[Check]:
    """Compare all metrics of all variants with earlier values; memory and pace only between identical machines."""
    checks = []
    for label, figures in now.labels.items():
        for metric in METRICS:
            values = partial(_by_seed, label, metric, now.machine)
            tonight, spread = values([now]), pooled_spread(values([reference, *passed]).values())
            for against, before in ((REFERENCE, values([reference])), (PASSED, values(passed))):
                if seeds := tonight.keys() & before.keys():
                    pair = [tonight[seed] for seed in seeds], [before[seed] for seed in seeds]
                    compared = _compared(metric, *pair, thresholds[metric], spread)
                    checks.append(
                        Check(label=label, metric=metric, measured=figures.metric, against=against, **compared)
                    )
    return checks


def _compared(
    metric: str, now: Sequence[Sequence[float]], before: Sequence[Sequence[float]], threshold: float, spread: float
) -> dict[str, Any]:
    means = {"now": fmean(map(fmean, now)), "before": fmean(map(fmean, before))}
    sign = -1 if metric in HIGHER else 1
    worse = sign * (means["now"] - means["before"])
    least = threshold if metric in HIGHER else threshold * abs(means["before"])
    allowed = max(least, Z * spread * math.sqrt(1 / sum(map(len, now)) + 1 / sum(map(len, before))))
    limit = means["before"] + sign * allowed
    return {**means, "worse_by": worse, "allowed": allowed, "limit": limit, "failed": worse > allowed}


def pooled_spread(groups: Iterable[Sequence[float]]) -> float:
    """Return the standard deviation within groups, pooled over all groups. Return 0 if no group has two values."""
    many = [values for values in groups if len(values) > 1]
    squares = sum((value - fmean(values)) ** 2 for values in many for value in values)
    return math.sqrt(squares / sum(len(values) - 1 for values in many)) if many else 0.0


def _by_seed(
    label: str, metric: str, machine: Mapping[str, str], runs: Sequence[NightlyFigures]
) -> dict[int, list[float]]:
    """Map each seed to the values of a metric. If the metric depends on the machine, omit runs on other machines."""
    found: dict[int, list[float]] = {}
    for run in runs:
        if metric in OF_MACHINE and run.machine != machine:
            continue
        values = run.labels[label].values.get(metric, ()) if label in run.labels else ()
        for seed, value in zip(run.seeds, values, strict=False):
            found.setdefault(seed, []).append(value)
    return found


def notes(figures: NightlyFigures, checks: Sequence[Check], passed: int) -> tuple[str, ...]:
    """Return sentences that state which runs were compared, and which metrics could not be compared. `passed` is the
    number of earlier runs that passed."""
    judged = {(check.label, check.metric) for check in checks}
    missing = [
        f"{label} {METRICS[metric]}"
        for label, each in figures.labels.items()
        for metric in METRICS
        if metric in each.values and (label, metric) not in judged
    ]
    lines = [f"compared with the reference and {passed} nightly regression runs that passed with this reference"]
    if missing:
        lines.append(
            f"not checked, because no earlier values are comparable: {', '.join(missing)}. Memory and pace are only "
            "compared with values from the same machine, kind of process and run.backend"
        )
    return tuple(lines)


def html(verdict: Verdict, now: NightlyFigures, others: Mapping[str, NightlyFigures]) -> str:
    """Return the contents of regression.html. `others` maps names to earlier metrics, which are also plotted."""
    drawings: dict[str, str] = {}
    for label, figures in now.labels.items():
        known = {
            name: each.labels[label].curve for name, each in {"tonight": now, **others}.items() if label in each.labels
        }
        curves = [
            (name, [(n, mb, avg) for n, mb, avg, _ in curve], [(n, mb, full) for n, mb, _, full in curve])
            for name, curve in known.items()
        ]
        name = f"curve-{len(drawings)}"
        drawings[label] = plots.comparison(curves, ("tonight", "reference"), name, Measure(figures.metric))
    explained = (
        "Values are means over the seeds. A metric fails if its value is worse than its limit. A run that does not "
        "reach the accuracy counts with one round more than the longest run, and with proportionally more MB."
    )
    sections = [PageSection("What is worse", table(verdict.failed))] if verdict.failed else []
    sections += [
        PageSection("Curves", drawings=drawings),
        PageSection("Commits since then", lines=[f"The {verdict.since}", *verdict.commits], folded=not verdict.failed),
        PageSection("All figures", table(verdict.checks), lines=[explained, *verdict.notes], folded=True),
        PageSection("Machine", lines=[f"{key}: {value}" for key, value in now.machine.items()], folded=True),
    ]
    about = f"{now.when}, commit {now.commit or 'unknown'}, seeds {', '.join(map(str, now.seeds))}"
    return page("nightly regression run", verdict.answer, sections, [about])
