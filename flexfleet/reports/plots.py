"""Drawings of runs as SVG elements for HTML pages.

Every function returns one `<svg>` element whose ids start with the given `name`. Accuracies are drawn in %, other
metrics unscaled; a MB is 1e6 bytes, rounds count from 1. Raises EnvironmentFailure without matplotlib.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from fl_engine.data import heat_map
from fl_engine.rounds.at_clients import PREFIX
from fl_engine.storage.checkpoints import Row
from flexfleet.files.artifacts import Apoz, PoolFile
from flexfleet.files.measure import ACCURACY, Measure
from flexfleet.reports.figure import (
    MOST_POINTS,
    PLAIN,
    band,
    drawing,
    inline,
    line,
    name_axes,
    put_legend,
    style,
    thinned,
    whole,
)

Series = tuple[str, Sequence[Row]]
"""A run's label and its rounds."""

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
"""Okabe and Ito's colours without yellow, which is too faint on white. The eighth run has the first colour and another
mark."""
MARKS = ("", "o", "s", "^", "D", "v", "P", "X")
FEW = 8
"""A curve of fewer points has a mark at each."""
GREY = "#7a828c"
MOST_BANDS = 6
"""The most runs that are drawn with bands: with more the bands hide each other."""
MOST_BARS = 120


# ------------------------------------------------------------------------------------------- several runs
def learning_curves(runs: Sequence[Series], name: str = "learning-curves", measure: Measure = ACCURACY) -> str:
    """Draw avg as a line in a band from the lowest to the highest level, and full as a dashed line. A run of one level
    has no avg."""

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        looks = _looks([len(_scored(rows)) for _, rows in runs])
        for look, (_, rows) in zip(looks, runs, strict=True):
            scored = _scored(rows)
            x = [r.round + 1 for r in scored]
            full = thinned(x, _values(scored, "full", measure))
            axes.plot(*full, linestyle="--", **look | {"linewidth": _thin(len(x)) - 0.5})
            if not single(scored, measure):
                axes.plot(*thinned(x, _values(scored, "avg", measure)), **look)
                if len(runs) <= MOST_BANDS:
                    levels = [_levels(r, measure).values() for r in scored]
                    low, high = ([measure.scale * f(v) for v in levels] for f in (min, max))
                    axes.fill_between(*band(x, low, high), color=look["color"], alpha=0.14, linewidth=0)
        name_axes(axes, "round", measure.title, whole_x=True)
        several = not all(single(_scored(rows), measure) for _, rows in runs)
        _legend(figure, runs, looks, avg=several, full=True, band=several and len(runs) <= MOST_BANDS)

    return drawing(name, f"Test {measure.name} over the rounds, a line for each run", 3.8, paint)


def bytes_to_accuracy(runs: Sequence[Series], name: str = "bytes-to-metric", measure: Measure = ACCURACY) -> str:
    """Draw avg against all MB sent down and up so far; for a run of one level full, dashed."""

    def paint(figure: Any) -> None:
        axes = figure.add_subplot()
        looks = _looks([len(_scored(rows)) for _, rows in runs])
        for look, (_, rows) in zip(looks, runs, strict=True):
            sent = accumulate(r.metrics["bytes_down"] + r.metrics["bytes_up"] for r in rows)
            points = [(total / 1e6, r) for total, r in zip(sent, rows, strict=True) if "avg" in r.metrics]
            scored = [r for _, r in points]
            dash = "--" if single(scored, measure) else "-"
            curve = thinned([mb for mb, _ in points], _values(scored, "avg", measure))
            axes.plot(*curve, linestyle=dash, **look)
        name_axes(axes, "MB sent, down + up", measure.title)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(_mb)
        alone = [single(_scored(rows), measure) for _, rows in runs]
        _legend(figure, runs, looks, avg=not all(alone), full=any(alone), band=False)

    return drawing(name, f"Test {measure.name} against the megabytes sent, a line for each run", 3.8, paint)


Points = Sequence[tuple[int, float, Sequence[float]]]
"""A round from 1, the mean MB sent so far, and every seed's value of the metric."""


def comparison(
    curves: Sequence[tuple[str, Points, Points]],
    name: str = "comparison",
    measure: Measure = ACCURACY,
    reference: tuple[str, float] | None = None,
    clocks: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> str:
    """Draw avg and full of each algorithm over the rounds, full against the MB sent, and full over the simulated time.

    Lines are means over the seeds; up to MOST_BANDS algorithms have a band from the lowest to the highest seed.

    Args:
        curves: For each algorithm its label, the points of avg (may be empty), and the points of full.
        reference: Name and value of a horizontal line.
        clocks: Map labels to the simulated seconds of each point of full; without any the last drawing is left out.
    """
    timed = any(clocks.values())
    bands = len(curves) <= MOST_BANDS and any(len(point[2]) > 1 for _, _, full in curves for point in full)

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        left, right, *last = figure.subplots(1, 3 if timed else 2, sharey=True)
        looks = _looks([len(full) for _, _, full in curves])
        for look, (label, avg, full) in zip(looks, curves, strict=True):
            panels = [(left, avg, _nth(avg, 0), "-"), (left, full, _nth(full, 0), "--")]
            panels += [(right, full, _nth(full, 1), "--")]
            panels += [(axes, full, list(clocks.get(label, ())), "--") for axes in last]
            for axes, points, x, dash in panels:
                if not points or not x:
                    continue
                seeds = measure.scale * np.array([point[2] for point in points])
                thin = {"linewidth": look["linewidth"] - (0.5 if dash == "--" else 0)}
                axes.plot(*thinned(x, seeds.mean(axis=1)), linestyle=dash, **look | thin)
                if bands and seeds.shape[1] > 1:
                    low, high = seeds.min(axis=1), seeds.max(axis=1)
                    axes.fill_between(*band(x, low, high), color=look["color"], alpha=0.13, linewidth=0)
        name_axes(left, "round", measure.title, whole_x=True)
        name_axes(right, "MB sent, down + up", "")
        right.set_xlim(left=0)
        right.xaxis.set_major_formatter(_mb)
        for axes in last:
            name_axes(axes, "simulated seconds", "")
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(_mb)
        handles = [*(line(**look) for look in looks), line(color=GREY)]
        handles += [line(color=GREY, linestyle="--", linewidth=1.2)]
        names = [*(label for label, _, _ in curves), "avg", "full"]
        if reference is not None:
            for axes in (left, right, *last):
                axes.axhline(measure.scale * reference[1], color=GREY, linestyle=":", linewidth=1.2)
            handles, names = [*handles, line(color=GREY, linestyle=":", linewidth=1.2)], [*names, reference[0]]
        if bands:
            handles, names = [*handles, Patch(color=GREY, alpha=0.25, linewidth=0)], [*names, "range of seeds"]
        put_legend(figure, handles, names)

    over = "over the rounds, against the megabytes sent and" if timed else "over the rounds and"
    against = "over the simulated time" if timed else "against the megabytes sent"
    alt = f"Test {measure.name} {over} {against}, a line for each algorithm"
    return drawing(name, alt, 4.0, paint, width=14 if timed else 10.5)


def _nth(points: Points, n: Literal[0, 1]) -> list[float]:
    return [point[n] for point in points]


def study(
    trials: Sequence[tuple[int, float, Mapping[str, Any]]],
    importances: Mapping[str, float],
    logarithmic: Sequence[str],
    labels: Mapping[str, str],
    name: str = "study",
    measure: Measure = ACCURACY,
) -> list[str]:
    """Draw the complete trials (number, value, parameters): in their order with the best so far, the importance of the
    parameters (shares that add up to 1), and the values over each parameter, the most important first. `labels`: the
    parameters' names for people."""
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
                axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")  # its own writes formulas
                axes.xaxis.set_minor_formatter(lambda x, _: "")
            name_axes(axes, labels[path], value)

        return paint

    paints = {
        "Values of the trials in the order in which they ran, and the best so far": history,
        "What each parameter mattered": shares,
        **{f"Values of the trials over {labels[path]}": slice(path) for path in names},
    }
    return [drawing(f"{name}-{i}", alt, 3.0, paint, width=5.0) for i, (alt, paint) in enumerate(paints.items())]


# ------------------------------------------------------------------------------------------------ one run
def pool_widths(pool: PoolFile, apoz: Apoz | None = None, name: str = "pool") -> str:
    """Draw each level's width in every prunable layer, in % of the full width, and below it APoZ if it was measured.
    Levels that only devices make are dashed."""
    groups, n = list(pool.groups), len(pool.groups)
    colours = level_colours([m.name for m in pool.levels])
    scores = {layer.group: 100 * layer.apoz for layer in apoz.layers} if apoz else {}
    reference = apoz.reference if apoz and scores else None

    def paint(figure: Any) -> None:
        grid = figure.add_gridspec(2, 1, height_ratios=(3, 1)) if scores else figure.add_gridspec(1, 1)
        top = figure.add_subplot(grid[0])
        edges, handles = np.arange(n + 1) - 0.5, []
        # The largest first, so that the smaller of two equal levels is visible on top.
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
    return drawing(name, alt, 4.6 if scores else 3.4, paint)


def of_levels(
    rows: Sequence[Row],
    levels: Sequence[str],
    name: str = "levels",
    measure: Measure = ACCURACY,
    along: str = "round",
) -> str:
    """Draw each level's metric over the rounds, or over what else a row is `along`. `levels`: the whole pool, smallest
    first, coloured as in its drawing."""
    colours = level_colours(levels)
    curves = {level: (f"{measure.name}/{level}", {"color": colours[level]}) for level in reversed(levels)}
    alt = f"Test {measure.name} over the {along}s, a line for each level"
    return _lines(rows, curves, name, alt, 3.2, (along, measure.title), measure.scale)


def on_clients(rows: Sequence[Row], name: str = "on-clients", measure: Measure = ACCURACY) -> str:
    """Draw mean, 10th percentile and worst of all clients over the rounds in which they evaluated."""
    dashes = {"mean": ("mean", "-"), "10th percentile": ("p10", "--"), "worst": ("worst", ":")}
    curves = {
        label: (f"{PREFIX}{of}", {"color": PALETTE[0], "linestyle": dash}) for label, (of, dash) in dashes.items()
    }
    title = f"{measure.name} ({measure.unit})" if measure.unit else measure.name
    alt = f"The clients' {measure.name} on samples of their own over the rounds"
    return _lines(rows, curves, name, alt, 2.8, ("round", f"clients' {title}"), measure.scale)


def evenness(rows: Sequence[Row], name: str = "uniformity") -> str:
    """Draw the uniformity of the simulated time in each round, and of its two parts; lower is more even."""
    curves = {
        "in all": ("uniformity", {"color": "#4d4d4d"}),
        "compute": ("uniformity_compute", {"color": "#0072b2"}),
        "communication": ("uniformity_communication", {"color": "#d55e00"}),
    }
    alt = "How evenly the clients finish in each round, by the simulated clock"
    return _lines(rows, curves, name, alt, 2.4, ("round", "uniformity (s)"), 1, bottom=0)


def _lines(
    rows: Sequence[Row],
    curves: Mapping[str, tuple[str, Mapping[str, Any]]],
    name: str,
    alt: str,
    height: float,
    titles: tuple[str, str],
    scale: float,
    bottom: float | None = None,
) -> str:
    """Draw a line for each of the `curves` that rows have: by label, the metric's key and the line's look."""
    having = {label: [r for r in rows if key in r.metrics] for label, (key, _) in curves.items()}

    def paint(figure: Any) -> None:
        axes, handles = figure.add_subplot(), []
        shown = [label for label, own in having.items() if own]
        for label in shown:
            key, style = curves[label]
            own = having[label]
            look = {**style, "marker": "o" if len(own) < FEW else "", "linewidth": _thin(len(own))}
            axes.plot(*thinned([r.round + 1 for r in own], [scale * r.metrics[key] for r in own]), **look)
            handles.append(line(**look))
        name_axes(axes, *titles, whole_x=True)
        if bottom is not None:
            axes.set_ylim(bottom=bottom)
        put_legend(figure, handles, shown)

    return drawing(name, alt, height, paint)


def clients_per_round(rows: Sequence[Row], name: str = "clients") -> str:
    """Draw how many clients trained the model as sent, pruned it first, or failed; long runs as means of rounds."""
    step = math.ceil(len(rows) / MOST_BARS)
    trained, pruned, failed = (
        np.array([r.metrics[f"clients_{kind}"] for r in rows]) for kind in ("trained", "pruned", "failed")
    )
    parts = {
        "trained as sent": (trained - pruned, "#56b4e9"),
        "pruned, then trained": (pruned, "#0072b2"),
        "failed": (failed, "#d55e00"),
    }

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        axes = figure.add_subplot()
        starts = np.arange(0, len(rows), step)
        edges = np.append(starts, len(rows)) + 0.5
        base = np.zeros(len(starts))
        for counts, colour in parts.values():
            top = base + np.add.reduceat(counts, starts) / np.diff(np.append(starts, len(rows)))
            axes.stairs(top, edges, baseline=base, fill=True, color=colour, linewidth=0)
            base = top
        name_axes(axes, "round", "clients" if step == 1 else f"clients\n(means of {step} rounds)", whole_x=True)
        axes.set_ylim(0, 1.08 * max(1, *base))
        axes.yaxis.set_major_locator(whole())
        axes.margins(x=0)
        axes.grid(axis="x", visible=False)
        put_legend(figure, [Patch(color=colour) for _, colour in parts.values()], list(parts))

    return drawing(name, "Clients that trained, pruned or failed in each round", 2.4, paint)


def partition_map(counts: Sequence[Sequence[int]], name: str = "partition", label: str = "class") -> str:
    """Draw a label x client heat map; `counts` has a row for each label and a column for each client."""
    with style(PLAIN):
        out = io.StringIO()
        heat_map.save_figure(heat_map.heat_map(np.array(counts, dtype=np.int64), label), out, "svg")
        return inline(out.getvalue(), name, f"How many samples of each {label} each client holds")


# ---------------------------------------------------------------------------------------- what they share
def single(rows: Sequence[Row], measure: Measure) -> bool:
    """Return whether only one level is evaluated, so that avg is meaningless."""
    return all(len(_levels(r, measure)) <= 1 for r in rows)


def level_colours(levels: Sequence[str]) -> dict[str, str]:
    """Map levels to colours from light to dark, which can be distinguished without hues."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    places = np.linspace(0.82, 0, max(len(levels), 2))[-len(levels) :]
    return dict(zip(levels, map(to_hex, colormaps["viridis"](places)), strict=True))


def _levels(row: Row, measure: Measure) -> Mapping[str, float]:
    prefix = f"{measure.name}/"
    return {k.removeprefix(prefix): v for k, v in row.metrics.items() if k.startswith(prefix)}


def _scored(rows: Sequence[Row]) -> list[Row]:
    return [r for r in rows if "avg" in r.metrics]


def _values(rows: Sequence[Row], key: str, measure: Measure) -> list[float]:
    return [measure.scale * r.metrics[key] for r in rows]


def _looks(points: Sequence[int]) -> list[dict[str, Any]]:
    """Return the look of each run's line, by its number of points. The first 49 differ: seven colours with seven marks
    each, of which "no mark" is one unless a run has few points."""
    marks = MARKS[1:] if any(0 < n < FEW for n in points) else MARKS[:-1]
    return [
        {
            "color": PALETTE[i % len(PALETTE)],
            "linewidth": _thin(n),
            "marker": marks[i // len(PALETTE) % len(marks)],
            "markevery": max(1, min(n, MOST_POINTS) // 10),
        }
        for i, n in enumerate(points)
    ]


def _thin(points: int) -> float:
    return 1.8 if points <= 100 else 1.3


def _mb(x: float, _: int) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.3g}"


def _legend(
    figure: Any, runs: Sequence[Series], looks: Sequence[Mapping[str, Any]], *, avg: bool, full: bool, band: bool
) -> None:
    """Put a legend with a line per run, and the meaning of the kinds of lines."""
    from matplotlib.patches import Patch

    handles = [line(**look) for look in looks]
    key: dict[str, Any] = {"avg": line(color=GREY)} if avg else {}
    if full:
        key["full"] = line(color=GREY, linestyle="--", linewidth=1.2)
    if band:
        key["range of levels"] = Patch(color=GREY, alpha=0.25, linewidth=0)
    put_legend(figure, [*handles, *key.values()], [*(label for label, _ in runs), *key])
