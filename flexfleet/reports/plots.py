"""Plot metrics of runs as SVG elements for HTML pages.

Every function returns an `<svg>` element in which all IDs start with `name`. Accuracies are plotted in percent, and
other metrics without scaling. 1 MB is 1e6 bytes, and rounds are counted from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np

from fl_engine.data import heat_map
from fl_engine.storage.checkpoints import Row
from flexfleet.files.artifacts import Apoz, PoolFile
from flexfleet.files.measure import ACCURACY, Measure
from flexfleet.reports.figure import (
    FEW,
    GREY,
    PALETTE,
    PLAIN,
    drawing,
    focus,
    inline,
    label_ends,
    line,
    line_width,
    looks_of,
    name_axes,
    put_legend,
    style,
    thinned,
    whole,
)

MOST_LABELS = 12
"""If a figure has more lines than this number, only the lines of interest have labels."""
MOST_BARS = 120


# ------------------------------------------------------------------------------------------- several runs
Points = Sequence[tuple[int, float, Sequence[float]]]
"""Points of a curve, each with the round, the MB sent so far (mean over the seeds) and the metric for each seed."""


def curve(runs: Sequence[Sequence[Row]], key: str) -> Points:
    """Return a point for each round in which all runs were evaluated. The curve ends with the shortest run."""
    totals = [list(accumulate(row.metrics["bytes_down"] + row.metrics["bytes_up"] for row in rows)) for rows in runs]
    return [
        (i + 1, fmean(total[i] for total in totals) / 1e6, [row.metrics[key] for row in rows])
        for i, rows in enumerate(zip(*runs, strict=False))
        if all(key in row.metrics for row in rows)
    ]


def comparison(
    curves: Sequence[tuple[str, Points, Points]],
    interest: Sequence[str],
    name: str = "comparison",
    measure: Measure = ACCURACY,
    reference: tuple[str, float] | None = None,
    clocks: Mapping[str, Sequence[float]] = MappingProxyType({}),
    names: tuple[str, str] = ("avg", "full"),
) -> str:
    """Plot four panels: avg and full over the rounds, and full over the MB sent and over the simulated time.

    For each variant, a line shows the mean over the seeds. Bands show the range over the seeds of the variants of
    interest.

    Args:
        curves: Tuple (label, points of avg, points of full) for each variant.
        interest: Labels of the variants that are coloured. All other variants are grey.
        reference: Name and value of a horizontal line, or None.
        clocks: Map each variant's label to the simulated seconds at the points of full. If empty, the last panel is
            omitted.
        names: Names under which the two metrics are shown.
    """
    timed, bands = any(clocks.values()), any(len(point[2]) > 1 for _, _, full in curves for point in full)
    looks = looks_of({label: len(full) for label, _, full in curves}, interest)
    labelled = [label for label, _, _ in curves if len(curves) <= MOST_LABELS or label in interest]

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        left, *others = figure.subplots(1, 3 if timed else 2, sharey=True)
        ends: dict[Any, list[tuple[float, float, str, str]]] = {axes: [] for axes in (left, *others)}
        means = []
        for label, avg, full in curves:
            look = looks[label]
            columns: tuple[Sequence[float], ...] = ([point[1] for point in full], clocks.get(label, ()))
            panels: list[tuple[Any, Points, Sequence[float], str]] = [
                (left, full, [point[0] for point in full], "--"),
                (left, avg, [point[0] for point in avg], "-"),
                *((axes, full, x, "--") for axes, x in zip(others, columns, strict=False)),
            ]
            for axes, points, x, dash in panels:
                if not points or not x:
                    continue
                seeds = measure.scale * np.array([point[2] for point in points])
                mean = seeds.mean(axis=1)
                means.append(mean)
                thin = {"linewidth": look["linewidth"] - (0.5 if dash == "--" else 0)}
                axes.plot(*thinned(x, mean), linestyle=dash, **look | thin)
                if seeds.shape[1] > 1 and label in interest:
                    low, high = seeds.min(axis=1), seeds.max(axis=1)
                    means.append(high)
                    axes.fill_between(*thinned(x, low, high), color=look["color"], alpha=0.13, linewidth=0)
                if label in labelled and (dash == "-" or axes is not left):
                    ends[axes].append((x[-1], mean[-1], label, look["color"]))
        kinds = dict(zip(names, (line(color=GREY), line(color=GREY, linestyle="--", linewidth=1.2)), strict=True))
        if reference is not None:
            means.append([measure.scale * reference[1]] * 3)
            for axes in (left, *others):
                axes.axhline(measure.scale * reference[1], color=GREY, linestyle=":", linewidth=1.2)
            kinds[reference[0]] = line(color=GREY, linestyle=":", linewidth=1.2)
        focus(left, means)
        name_axes(left, "round", measure.title, whole_x=True)
        for axes, title in zip(others, ("MB sent, down + up", "simulated seconds"), strict=False):
            name_axes(axes, title, "")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:.3g}")
        for axes, own in ends.items():
            label_ends(axes, own)
        if bands:
            kinds["range of seeds"] = Patch(color=GREY, alpha=0.25, linewidth=0)
        put_legend(figure, [*kinds.values()], [*kinds])

    clock = " and over the simulated time" if timed else ""
    alt = f"Test {measure.name} over the rounds, and against the megabytes sent{clock}: a line for each variant"
    return drawing(name, alt, 4.0, paint, width=14 if timed else 10.5)


def study(
    trials: Sequence[tuple[int, float, Mapping[str, Any]]],
    importances: Mapping[str, float],
    logarithmic: Sequence[str],
    labels: Mapping[str, str],
    measure: Measure = ACCURACY,
) -> dict[str, str]:
    """Plot the trials of a study (number, value, parameters), and return {title: figure}. The figures show the value of
    each trial, the importance of each parameter, and the value plotted against each parameter.

    Args:
        logarithmic: Names of the parameters that were searched on a logarithmic scale.
        labels: Map each parameter to its name for display.
    """
    names = sorted(importances, key=lambda path: -importances[path])
    value = f"value ({measure.unit})" if measure.unit else "value"

    def history(figure: Any) -> None:
        axes = figure.add_subplot()
        numbers, values = [t[0] for t in trials], [measure.scale * t[1] for t in trials]
        axes.plot(numbers, values, linestyle="", marker="o", color=PALETTE[0], alpha=0.7)
        axes.step(numbers, list(accumulate(values, max)), where="post", color=PALETTE[1])
        name_axes(axes, "trial", f"{value}; line: the best so far", whole_x=True)

    def shares(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.barh(range(len(names)), [importances[path] for path in names], color=PALETTE[2])
        axes.set_yticks(range(len(names)), [labels[path] for path in names])
        axes.set_xlim(0, 1)
        axes.invert_yaxis()
        name_axes(axes, "importance", "")

    def slice(path: str) -> Callable[[Any], None]:
        def paint(figure: Any) -> None:
            axes = figure.add_subplot()
            known = [(t[2][path], measure.scale * t[1]) for t in trials if path in t[2]]
            xs = [x if isinstance(x, int | float) else str(x) for x, _ in known]
            axes.plot(xs, [y for _, y in known], linestyle="", marker="o", color=PALETTE[0], alpha=0.7)
            if path in logarithmic:
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")  # By default, matplotlib writes powers of ten.
                axes.xaxis.set_minor_formatter(lambda x, _: "")
            name_axes(axes, labels[path], value)

        return paint

    paints = {
        "Values of the trials in the order in which they ran, and the best so far": history,
        **({"Importance of the parameters": shares} if any(importances.values()) else {}),
        **{f"Values of the trials over {labels[path]}": slice(path) for path in names},
    }
    return {
        title: drawing(f"study-{i}", title, 3.0, paint, width=5.0) for i, (title, paint) in enumerate(paints.items())
    }


# ------------------------------------------------------------------------------------------------ one run
def pool_widths(pool: PoolFile, apoz: Apoz | None = None, name: str = "pool") -> str:
    """Plot the width of each prunable layer in each level, in percent of the full width. If APoZ (average percentage of
    zeros) was measured, it is shown in a second panel. Dashed lines are levels that the server never sends."""
    groups, n = list(pool.groups), len(pool.groups)
    colours = level_colours([m.name for m in pool.levels])
    scores = {layer.group: 100 * layer.apoz for layer in apoz.layers} if apoz else {}
    reference = apoz.reference if apoz and scores else None

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(2, 1, height_ratios=(3, 1)) if scores else figure.add_gridspec(1, 1)
        top = figure.add_subplot(grid[0])
        edges, handles = np.arange(n + 1) - 0.5, []
        # Plot the largest level first, so that of two overlapping lines the smaller level's remains visible.
        for m in reversed(pool.levels):
            share = [100 * m.widths[g] / pool.groups[g] for g in groups]
            look = {"color": colours[m.name], "linewidth": 2, "linestyle": "-" if m.dispatched else (0, (4, 1.5))}
            top.stairs(share, edges, baseline=None, **look)
            handles.append(line(**look))
        name_axes(top, "", "width kept (%)")
        top.set_ylim(0, 105)
        axes = [top]
        if scores:
            below = figure.add_subplot(grid[1], sharex=top)
            below.bar(range(n), [scores.get(g, math.nan) for g in groups], color="#b9c2cc", width=0.7)
            if reference is not None and len(reference) == n:
                below.plot(range(n), [100 * a for a in reference], "x", color="#3c434b", markersize=5)
            name_axes(below, "", "APoZ (%)")
            below.set_ylim(0, 100)
            top.tick_params(labelbottom=False)
            axes.append(below)
        for one in axes:
            one.grid(axis="x", visible=False)
            one.set_xlim(-0.5, n - 0.5)
        some = range(0, n, math.ceil(n / 24))
        turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if n > 6 else {}
        axes[-1].set_xticks(list(some), [groups[i] for i in some], **turned)
        put_legend(figure, handles, [m.name for m in reversed(pool.levels)])

    alt = "Width kept in every prunable layer, a line for each level of the pool" + (", and APoZ" if scores else "")
    return drawing(name, alt, 4.6 if scores else 3.4, paint, width=6.4)


def of_levels(
    rows: Sequence[Row],
    levels: Sequence[str],
    name: str = "levels",
    measure: Measure = ACCURACY,
    along: str = "round",
    shared: int = 0,
) -> str:
    """Plot the metric of each level over the rounds. `levels` are all levels of the pool, from the smallest to the
    largest. `along` is the name of the x-axis. The first `shared` rounds, those of a fork's parent, have a grey
    background."""
    colours = level_colours(levels)
    having = {level: [r for r in rows if f"{measure.name}/{level}" in r.metrics] for level in reversed(levels)}

    def paint(figure: Any) -> None:
        axes, lines, ends = figure.add_subplot(), [], []
        for level, own in having.items():
            marker = "o" if len(own) < FEW else ""
            look = {"color": colours[level], "marker": marker, "linewidth": line_width(len(own))}
            values = [measure.scale * r.metrics[f"{measure.name}/{level}"] for r in own]
            if own:
                axes.plot(*thinned([r.round + 1 for r in own], values), **look)
                ends.append((own[-1].round + 1, values[-1], level, colours[level]))
            lines.append(values)
        if shared:
            axes.axvspan(0.5, shared + 0.5, color="0.9", zorder=0)
        focus(axes, lines)
        name_axes(axes, along, measure.title, whole_x=True)
        label_ends(axes, ends)

    return drawing(name, f"Test {measure.name} over the {along}s, a line for each level", 3.0, paint)


def local_accuracy(
    levels: Mapping[str, Mapping[int, float]], colours: Mapping[str, str], name: str = "local-accuracy"
) -> str:
    """Plot the distribution of local accuracy over the clients for each level, as in FedRolex, Figure 3.5. `levels`
    maps each level to {accuracy in percent: number of clients}."""
    edges = list(range(0, 101, 5))

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        for level, clients in levels.items():
            axes.stairs(np.histogram([*clients], edges, weights=[*clients.values()])[0], edges, color=colours[level])
        name_axes(axes, "local accuracy (%)", "clients")
        put_legend(figure, [line(color=colours[level]) for level in levels], list(levels))

    return drawing(name, "Number of clients by local accuracy, a line for each level", 3.0, paint)


def clients_per_round(rows: Sequence[Row], name: str = "clients") -> str:
    """Plot how many clients trained the received model, pruned the model before training, or failed. If a run has many
    rounds, each bar shows the mean over several rounds."""
    bars = min(len(rows), MOST_BARS)

    def means(values: Sequence[float]) -> Any:
        return np.array([part.mean() for part in np.array_split(np.array(values), bars)])

    trained, pruned, failed = (
        means([row.metrics[f"clients_{kind}"] for row in rows]) for kind in ("trained", "pruned", "failed")
    )
    parts = {
        "trained as sent": (trained - pruned, "#56b4e9"),
        "pruned, then trained": (pruned, "#0072b2"),
        "failed": (failed, "#d55e00"),
    }

    def paint(figure: Any) -> None:
        axes, base, handles = figure.add_subplot(), np.zeros(bars), []
        x = means(list(range(1, len(rows) + 1)))
        for counts, colour in parts.values():
            handles.append(axes.bar(x, counts, len(rows) / bars, base, color=colour))
            base = base + counts
        name_axes(axes, "round", "clients", whole_x=True)
        axes.yaxis.set_major_locator(whole())
        axes.margins(x=0)
        axes.grid(axis="x", visible=False)
        put_legend(figure, handles, list(parts))

    return drawing(name, "Clients that trained, pruned or failed in each round", 3.0, paint)


def partition_map(counts: Sequence[Sequence[int]], name: str = "partition", label: str = "class") -> str:
    """Plot a heat map of `counts`, which has a row for each class label and a column for each client."""
    with style(PLAIN):
        figure = heat_map.heat_map(np.array(counts, dtype=np.int64), label)
        return inline(figure, name, f"Number of samples of each {label} at each client")


# ---------------------------------------------------------------------------------------- shared functions
def level_colours(levels: Sequence[str]) -> dict[str, str]:
    """Map levels to colours from light to dark. The colours can also be distinguished in grayscale."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    places = np.linspace(0.65, 0, max(len(levels), 2))[-len(levels) :]
    return dict(zip(levels, map(to_hex, colormaps["viridis"](places)), strict=True))
