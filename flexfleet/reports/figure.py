"""Define the style and the legend of figures, and convert figures to `<svg>` elements.

All IDs in an element start with the figure's name, so that a page can contain several figures. The same data always
produce a byte-identical file. Words in figures are stored as text, so that they can be searched and read aloud.
"""

from __future__ import annotations

import atexit
import html
import io
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from fl_engine.data import heat_map

PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#4d4d4d")
"""Colours of Okabe and Ito's palette. Yellow is omitted, because it has too little contrast on white."""
SQUARES = dict(zip(PALETTE, "🟦🟧", strict=False))
"""Map the colours of the rows of interest to characters for Markdown."""
MARKS = ("s", "^", "D", "v", "P", "X")
FEW = 8
"""Curves with fewer points than this number always have markers."""
GREY = "#7a828c"
MOST_POINTS = 1000
"""Maximum number of plotted points of a curve. If a curve has more points, only every k-th point is plotted."""
LABEL_CHARS = 48
LABEL_SPACE = 0.17
"""Height of a label at the end of a line, in inches."""
LINE_CHARS = 78 / 6.4
"""Number of characters per inch in a legend."""
LEGEND_ROW = 0.2
"""Height of a legend row in inches."""

PLAIN = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # Names can contain dollar signs.
    "savefig.facecolor": "none",
    "font.size": 10,
}
STYLE = PLAIN | {
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), "#9aa1a9"),
    **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), "#3c434b"),
    "axes.facecolor": "none",
    "grid.color": "#e4e7ea",
    "legend.fontsize": 9,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


def drawing(name: str, alt: str, height: float, paint: Callable[[Any], None], width: float = 4.5) -> str:
    """Draw a figure of `width` x `height` inches, and return it as an SVG element. If the legend has several rows, the
    height is increased. `alt` describes the figure for screen readers."""
    with style(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        return inline(figure, name, alt)


def style(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return a context in which matplotlib uses its defaults and `values` instead of the user's matplotlibrc."""
    use_font_cache()
    from matplotlib import style as styles

    context: AbstractContextManager[None] = styles.context(dict(values), after_reset=True)
    return context


def use_font_cache() -> None:
    """If matplotlib's folder is read-only, as in pods, set MPLCONFIGDIR to a writable copy, because matplotlib does not
    use the font cache in a read-only folder."""
    folder = os.environ.get("MPLCONFIGDIR", "")
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        copy = tempfile.mkdtemp(prefix="matplotlib-")
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        os.environ["MPLCONFIGDIR"] = copy


def inline(figure: Any, name: str, alt: str) -> str:
    """Convert a figure to an `<svg>` element. The element's IDs and style rules do not affect other figures."""
    out = io.StringIO()
    heat_map.save_figure(figure, out)
    document = out.getvalue()
    body = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    # Change only the tags, because a label may contain text like `id="`.
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", tag[0]), body)
    body = body.replace("*{stroke", f"#{name} *{{stroke", 1)
    _, _, rest = body.partition(">")
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', body)
    assert box is not None, "matplotlib always writes a viewBox"
    width = float(box[1])  # A font of size 10 is shown with 6.5 to 15 px. Narrow screens scroll wide figures.
    size = f"width:100%;min-width:{0.65 * width:.0f}px;max-width:{1.5 * width:.0f}px"
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    start = f'<svg {names} id="{name}" {box[0]} style="{size}" role="img" aria-label="{html.escape(alt)}">'
    return start + rest.strip()


def name_axes(axes: Any, x: str, y: str, whole_x: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if whole_x:
        axes.xaxis.set_major_locator(whole())


def whole(most: int = 10) -> Any:
    """Return a locator that places up to about `most` ticks at integers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write labels at the ends of lines, given as (x, y, label, colour). Labels that would overlap are moved apart.
    Call this function after setting the limits of the y-axis."""
    (low, high), ends = axes.get_ylim(), sorted(ends, key=lambda end: end[1])
    scale = 0.75 * 72 * axes.figure.get_figheight() / (high - low)  # points per unit of y
    space, places = LABEL_SPACE * 72 / scale, [y for _, y, _, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + space)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], places[i + 1] - space if i + 1 < len(places) else high)
    for (x, y, label, colour), place in zip(ends, places, strict=True):
        offset = (6, scale * (place - y))
        axes.annotate(shortened(label), (x, y), offset, textcoords="offset points", color=colour, va="center", size=9)


def focus(axes: Any, lines: Sequence[Sequence[float]]) -> None:
    """Limit the y-axis to the values in the last two thirds of each line, in which the lines differ. The steep first
    third may leave the axes."""
    late = [value for line in lines for value in line[len(line) // 3 :] if math.isfinite(value)]
    if late and (height := max(late) - min(late)):
        axes.set_ylim(min(late) - 0.06 * height, max(late) + 0.06 * height)


def line(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def put_legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put a legend above the axes, in as many columns as possible. More rows increase the figure's height."""
    short = [shortened(label) for label in labels]
    room = round(LINE_CHARS * figure.get_figwidth())
    columns = max(1, min(len(short), room // (max(map(len, short)) + 7)))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (math.ceil(len(short) / columns) - 1))
    legend = figure.legend(handles, ["x"] * len(short), loc="outside upper left", ncols=columns)
    for text, label in zip(legend.get_texts(), short, strict=True):
        text.set_text(label)  # legend() omits labels that start with "_", so set the text later.


def shortened(label: str) -> str:
    """Shorten a long label in its middle, because run IDs often begin with the same characters."""
    half = LABEL_CHARS // 2
    return label if len(label) <= LABEL_CHARS else f"{label[: half - 1]}…{label[-half:]}"


def colours_of(labels: Iterable[str], interest: Sequence[str]) -> dict[str, str]:
    """Map each label to its colour. Labels that are not of interest are grey."""
    return {label: PALETTE[interest.index(label)] if label in interest else GREY for label in labels}


def looks_of(points: Mapping[str, int], interest: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return a line style for each label. `points` contains the number of points of each line. Grey lines differ in
    their markers, and the lines of interest have markers only if a line has fewer than FEW points."""
    colours, short = colours_of(points, interest), any(0 < n < FEW for n in points.values())
    grey = [label for label in points if label not in interest]
    return {
        label: {
            "color": colours[label],
            "linewidth": line_width(n) if label in interest else 1.2,
            "marker": MARKS[grey.index(label) % len(MARKS)] if label in grey else "o" if short else "",
            "markevery": max(1, min(n, MOST_POINTS) // 10),
            "zorder": 3 - 0.1 * interest.index(label) if label in interest else 2,
        }
        for label, n in points.items()
    }


def thinned(*columns: Sequence[float]) -> list[Sequence[float]]:
    """Select at most MOST_POINTS points from the columns (x, y, ...) of a curve."""
    step = math.ceil(len(columns[0]) / MOST_POINTS) or 1
    return [column[::step] for column in columns]


def line_width(points: int) -> float:
    """Return the width of a line with this number of points."""
    return 1.8 if points <= 100 else 1.3
