"""Create an HTML report and a text table that describe finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from flexfleet.files.artifacts import ConfusionFile
from flexfleet.files.measure import Measure, decimals
from flexfleet.reports import failures, plots, precisions
from flexfleet.reports.finished_run import NONE, FinishedRun, differences, labels, measure_of, plain
from flexfleet.reports.page import Drawing, Table, render

CLASSES = 26
"""Maximum number of classes for which a confusion matrix is shown. Larger matrices would not be readable."""


def table(runs: Sequence[FinishedRun]) -> str:
    """Return a text table with one row for each run."""
    unit = f" {runs[0].measure.unit}".rstrip()
    scored = (f"avg{unit}", f"full{unit}", f"best avg/full{unit} (round)")
    timed = any(r.uniformity is not None for r in runs)
    head = ("run", "algorithm", "rounds", *scored, "MB", "waste %", *(("uniformity s",) if timed else ()), "seconds")
    rows = []
    for r in runs:
        scores = (r.measure.number(r.evaluation.avg), r.measure.number(r.evaluation.full), _best(r))
        even = (short_seconds(r.uniformity),) if timed else ()
        costs = (mb(r.total("bytes_down") + r.total("bytes_up")), percent(r.waste), *even, f"{r.history.seconds:,.1f}")
        rows.append((r.file.run_id, r.pool.algorithm, str(len(r.rows)), *scores, *costs))
    lines = [Table("Runs", head, rows).text(left=2)]
    lines += [f"{r.file.run_id}: {r.tally.problem()}" for r in runs if r.tally.status != "finished"]
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.2f}"


def mb(count: float) -> str:
    """Format bytes as MB (1e6 bytes), with more decimals for small values."""
    return f"{count / 1e6:,.{0 if count >= 1e9 else decimals(count / 1e6, 2)}f}"


def short_seconds(value: float | None) -> str:
    """Format seconds, with more decimals for small values. Simulated seconds of small networks can be very small."""
    return NONE if value is None else f"{value:,.{0 if value >= 1000 else 1 if value >= 10 else decimals(value, 3)}f}"


def _best(run: FinishedRun) -> str:
    m = run.best.metrics
    return f"{run.measure.number(m['avg'])}/{run.measure.number(m['full'])} ({run.best.round + 1})"


def report(runs: Sequence[FinishedRun], out: Path) -> Path:
    """Write the HTML report to `out` atomically. The same runs result in a bit-identical report. Raises ConfigError."""
    if out.suffix not in (".html", ".htm") or out.is_dir():
        raise ConfigError(f"the report must be an .html file, got {str(out)!r}")
    FolderStore(out.parent).put(out.name, _page(runs).encode())
    return out


FILTERS = {"percent": percent, "mb": mb, "plain": plain, "short_seconds": short_seconds}
"""Map the names of the filters in report.html to functions."""


def _page(runs: Sequence[FinishedRun]) -> str:
    names, measure = labels(runs), measure_of(runs)
    curves = [
        (name, plots.curve([run.rows], "avg"), plots.curve([run.rows], "full"))
        for name, run in zip(names, runs, strict=True)
    ]
    titles = dict.fromkeys(f"{run.dataset} · {run.pool.model}" for run in runs)
    return render(
        "report.html",
        FILTERS,
        title=", ".join(titles),
        measure=measure,
        further=[Measure(name) for name in dict.fromkeys(name for run in runs for name in run.evaluation.further)],
        parts=[_part(i, names, runs) for i in range(len(runs))],
        differences=differences(runs),
        curves=Drawing(plots.comparison(curves, measure=measure)),
        by_algorithm=names == [run.pool.algorithm for run in runs],
        any_timed=any(run.uniformity is not None for run in runs),
        dash=NONE,
    )


def _part(i: int, names: Sequence[str], runs: Sequence[FinishedRun]) -> dict[str, Any]:
    """Return the values that the template shows for run `i`."""
    run, levels = runs[i], [level.name for level in runs[i].pool.levels]
    colours, counts = plots.level_colours(levels), run.partition.class_counts
    # If runs have the same partition, plot it only for the first of them.
    owner = next(n for n, r in zip(names, runs, strict=True) if r.file.partition_sha256 == run.file.partition_sha256)
    counted = any(run.partition.client_samples)  # With partition.rule=local, all counts are 0.
    histograms = run.evaluation.local_histogram
    alone = len(levels) == 1 and run.pool.levels[0].share == 1
    drawings = {
        "pool": None if alone else plots.pool_widths(run.pool, run.apoz, f"pool-{i}"),
        "levels": plots.of_levels(run.rows, levels, f"levels-{i}", run.measure),
        "local": plots.local_accuracy(histograms, colours, f"local-{i}") if histograms else None,
        "clients": plots.clients_per_round(run.rows, f"clients-{i}"),
        "partition": plots.partition_map(counts, f"partition-{i}", run.partition.label)
        if owner == names[i] and counted
        else None,
    }
    return {
        "label": names[i],
        "run": run,
        "colour": plots.PALETTE[i % len(plots.PALETTE)],
        "best": _best(run),
        "level_colours": colours,
        "best_of_level": {level: _best_of(run.rows, f"{run.measure.name}/{level}") for level in run.evaluation.levels},
        "confusion": _confusion(run),
        "precisions": precisions.as_table(run.precisions, NONE) if run.precisions else None,
        "refusals": precisions.refusals(run.precisions),
        "failures": failures.as_table(run),
        "codes": failures.meanings(run),
        "apoz": {layer.group: layer for layer in run.apoz.layers},
        "partition_of": None if owner == names[i] else owner,
        "draw": {name: Drawing(svg) if svg else None for name, svg in drawings.items()},
    }


def _confusion(run: FinishedRun) -> list[tuple[str, Sequence[Any], list[list[tuple[int, float]]]]]:
    """Return the confusion matrix and the class names of each level, from the largest to the smallest level. Each cell
    contains a count, and this count as a fraction of the row's sum."""
    found = ConfusionFile(levels={}) if run.confusion is None or run.pool.classes > CLASSES else run.confusion
    names, levels = found.names, found.levels
    whole = {level.name for level in run.pool.levels if level.share == 1}
    return [
        (
            f"{level}, the full model" if level in whole else level,
            names or range(len(rows)),
            [[(count, count / max(1, sum(row))) for count in row] for row in rows],
        )
        for level, rows in reversed(levels.items())
    ]


def _best_of(rows: Sequence[Row], key: str) -> Row | None:
    """Return the first round in which the metric `key` is highest. Return None if the metric was never measured."""
    return max((r for r in rows if key in r.metrics), key=lambda r: r.metrics[key], default=None)
