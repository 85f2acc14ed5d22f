"""The figures of a night's finished runs: what is compared with those before."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from flexfleet.experiments import curves
from flexfleet.experiments.comparison import MB
from flexfleet.experiments.night import Night
from flexfleet.experiments.pace import machine, pace
from flexfleet.experiments.suite import Figures, OfLabel
from flexfleet.reports.report import Run, load
from flexfleet.tracking import record as track

PROCESSES, TASKS = "processes of their own", "tasks of a graph"
BACKEND = "backend"
"""Where clients lived, in `Figures.machine`: the memory that is measured is the coordinator's, which clients of other
processes are no part of."""
MEMORY = ("peak_mb", "peak_mb_rounds")
"""Peak memory of the whole process, which is reported, and above what the process held before its first round, which
is judged: so the memory that importing torch takes cannot hide a leak."""

Folders = Mapping[tuple[str, str], Path]
"""Finished runs' folders by case and run id."""

log = logging.getLogger("flexfleet")


def measure(night: Night, folders: Folders, turns: int, runs_in: str = PROCESSES) -> Figures:
    """`runs_in`: where the runs were made. A task of a graph has more in memory than a separate process."""
    labels = {}
    for case, entries in night.runs.items():
        for label in dict.fromkeys(entry.label for entry in entries):
            own = [entry for entry in entries if entry.label == label]
            first = folders[case, own[0].name]
            log.info("pace of %s/%s, %d turns", case, label, turns)
            runs = [load(folders[case, entry.name]) for entry in own]
            values = {**_values(runs, night.suite.cases[case].to), "pace": tuple(pace(own[0].config, first, turns))}
            labels[f"{case}/{label}"] = OfLabel(
                task=night.tasks[f"{case}/{label}"],
                values=values,
                curve=_curve(runs),
                mlflow_runs=tuple(run.file.mlflow_run_id for run in runs if run.file.mlflow_run_id),
                metric=runs[0].evaluation.metric,
            )
    return Figures(
        suite=night.name,
        id=night.id,
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=track.commit(),
        machine=_machine(night, runs_in),
        seeds=night.seeds,
        labels=labels,
    )


def _machine(night: Night, runs_in: str) -> dict[str, str]:
    backends = sorted({entry.config.run.backend for entries in night.runs.values() for entry in entries})
    return {**machine(), "runs in": runs_in, BACKEND: ", ".join(backends)}


def _values(runs: Sequence[Run], to: float) -> dict[str, tuple[float, ...]]:
    """A run that does not reach the accuracy counts as one round more than the longest had."""
    longest = 1 + max(len(run.rows) for run in runs)
    until = [curves.first(run.rows, to) for run in runs]
    sent = [curves.sent(run.rows) for run in runs]
    out = {
        "full": tuple(run.evaluation.full for run in runs),
        "rounds": tuple(float(n + 1 if n >= 0 else longest) for n in until),
        "mb": tuple(
            (sum(each[: n + 1]) if n >= 0 else sum(each) * longest / len(each)) / MB
            for n, each in zip(until, sent, strict=True)
        ),
        **{name: tuple(max(row.metrics[name] for row in run.rows) for run in runs) for name in MEMORY},
    }
    return out if runs[0].single else {"avg": tuple(run.evaluation.avg for run in runs), **out}


def _curve(runs: Sequence[Run]) -> tuple[tuple[int, float, tuple[float, ...], tuple[float, ...]], ...]:
    avg = [] if runs[0].single else curves.curve(runs, "avg")
    full = curves.curve(runs, "full")
    means = {round: tuple(each) for round, _, each in avg}
    return tuple((round, mb, means.get(round, ()), tuple(each)) for round, mb, each in full)
