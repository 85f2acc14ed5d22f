"""Draws local accuracies (`fl_engine.training.local_accuracy`) as FedRolex' Figure 3.5 does: a histogram over the
clients. Above it stands what Table 3.3 prints, the mean and the standard deviation.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexfleet.reports.figure import drawing, shortened, whole, write

WIDTHS = (1, 2, 5, 10)
"""The widths that bars may have, in %."""
NARROWEST = 20
"""The axis of the accuracy has at least so many %."""
STRIP = 0.16
"""The height of a mean above the bars, as a share of the highest bar."""
LEGEND_ROW = 0.22
"""The height of a row of the legend or of a title, in inches."""
TITLE = 50
"""Characters in a line of a panel's title."""
MOST_OVER = 3
"""The most histograms over each other: with more nobody can follow one."""


@dataclass(frozen=True)
class Shown:
    """A level's, or a method's, local accuracy: `mean` and standard deviation `sd` over the clients, in [0, 1], and by
    accuracy, in whole % and rounded down, how many clients have it; empty where the run is of an older version."""

    colour: str
    mean: float
    sd: float
    histogram: Mapping[int, float]


Panel = Mapping[str, Shown]
"""Histograms that are drawn over each other, by label."""


def over_each_other(panels: Sequence[tuple[str, Panel]]) -> list[tuple[str, Panel]]:
    """The panels, or a panel for each label where one has more than MOST_OVER, or two of one colour."""
    colours = [[shown.colour for shown in panel.values()] for _, panel in panels]
    if all(len(set(own)) == len(own) <= MOST_OVER for own in colours):
        return list(panels)
    return [("", {label: shown}) for _, panel in panels for label, shown in panel.items()]


def local_accuracy(panels: Sequence[tuple[str, Panel]], name: str = "local", columns: int = 1) -> str:
    """Every panel with its title ("": none), in at most so many columns and with the same axes: bars count clients,
    points are means, lines beside them standard deviations. At least one panel, and none of them empty."""
    every = [shown for _, panel in panels for shown in panel.values()]
    counted = [shown.histogram for shown in every if shown.histogram]
    columns = min(columns, len(panels))
    rows, over = math.ceil(len(panels) / columns), max(len(panel) for _, panel in panels)
    edges = bars(counted) if counted else []
    top = max((heights(each, edges).max() for each in counted), default=1)

    def paint(figure: Any) -> None:
        from matplotlib.patches import Patch

        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for i, (axes, (title, panel)) in enumerate(zip(grid.flat, panels, strict=False)):
            for k, shown in enumerate(panel.values()):
                look = {"color": shown.colour, "zorder": 3}
                if shown.histogram:
                    counts = heights(shown.histogram, edges)
                    axes.stairs(counts, edges, fill=True, color=shown.colour, alpha=0.35, linewidth=0)
                    axes.stairs(counts, edges, **look, linewidth=1.2)
                y = top * (1 + STRIP * (over - k - 0.3))
                axes.errorbar(100 * shown.mean, y, xerr=100 * shown.sd, fmt="o", capsize=3, **look)
            handles = [Patch(color=shown.colour) for shown in panel.values()]
            above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "borderpad": 0}
            look = {"alignment": "left", "handlelength": 0.9}
            legend = axes.legend(
                handles, ["x"] * len(panel), title=textwrap.fill(title, TITLE) or None, **above, **look
            )
            write(legend, [shortened(label) for label in panel])
            last = i + columns >= len(panels)
            axes.tick_params(labelbottom=last)
            axes.set_xlabel("local accuracy (%)" if last else "")
            axes.set_ylabel("clients" if counted and i % columns == 0 else "")
        axes.set_xlim(*_range(every, edges))
        axes.set_ylim(0 if counted else top, top * (1 + STRIP * (over + 0.3)))
        axes.xaxis.set_major_locator(whole())
        axes.yaxis.set_major_locator(whole(4))
        if not counted:
            axes.set_yticks([])

    labels = ", ".join(dict.fromkeys(label for _, panel in panels for label in panel))
    alt = f"Local accuracy over the clients: histogram, mean and standard deviation of {labels}"
    above = LEGEND_ROW * (over + max(len(textwrap.wrap(title, TITLE)) for title, _ in panels))
    height = 0.35 + rows * (above + (1.0 if counted else 0.1) + 0.12 * over)
    return drawing(name, alt, height, paint, width=6.4 if columns == 1 else 10.5)


def bars(histograms: Sequence[Mapping[int, float]]) -> list[int]:
    """The edges of the bars, in %, from the lowest to the highest accuracy that occurs. The more clients, the narrower;
    and not more bars than accuracies that occur: of clients with ten test samples each they are 10 % apart, and
    narrower bars would have gaps."""
    seen = sorted({min(percent, 99) for histogram in histograms for percent in histogram})
    clients = max(sum(histogram.values()) for histogram in histograms)
    most = min(len(seen), 2 * math.sqrt(clients))
    width = next((w for w in WIDTHS if (seen[-1] + 1 - seen[0]) / w <= most), WIDTHS[-1])
    return list(range(seen[0] // width * width, (seen[-1] // width + 1) * width + 1, width))


def heights(histogram: Mapping[int, float], edges: Sequence[int]) -> Any:
    """Clients in each bar, of which the last holds 100 % too."""
    return np.histogram([*histogram], edges, weights=[*histogram.values()])[0]


def _range(every: Sequence[Shown], edges: Sequence[int]) -> tuple[float, float]:
    """Where the accuracy's axis begins and ends, in %: with room for the bars and the means, and for standard
    deviations up to 0 and 100 %."""
    low = min([100 * (shown.mean - shown.sd) - 1 for shown in every] + [*edges])
    high = max([100 * (shown.mean + shown.sd) + 1 for shown in every] + [*edges])
    return max(-1, min(low, high - NARROWEST)), min(101, max(high, low + NARROWEST))
