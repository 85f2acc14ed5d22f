"""What every drawing shares: its style, its legend, and how it becomes one `<svg>` element of a page.

Its ids start with the `name` given, so that several drawings share a page without clashing; the same measurements give
the same bytes. Texts stay texts: they take the page's font, and can be searched and read aloud.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.data import heat_map
from fl_engine.data.partition_rules import Ints

LABEL_CHARS = 48
LINE_CHARS = 78 / 6.4
"""Characters of a legend's line per inch."""
LEGEND_ROW = 0.2
"""The height of a legend's row in inches."""

PLAIN = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollars
    "savefig.facecolor": "none",
    "font.size": 10,
}
STYLE = PLAIN | {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1a9",
    "axes.labelcolor": "#3c434b",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7ea",
    "xtick.color": "#9aa1a9",
    "ytick.color": "#9aa1a9",
    "xtick.labelcolor": "#3c434b",
    "ytick.labelcolor": "#3c434b",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.handlelength": 2.2,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}


def drawing(name: str, alt: str, height: float, paint: Callable[[Any], None], width: float = 6.4) -> str:
    """An SVG of `width` x `height` inches, higher where a legend has several rows. `alt` says what it shows to those
    who do not see it."""
    with style(STYLE):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure)
        out = io.StringIO()
        heat_map.save_figure(figure, out, "svg")
    return inline(out.getvalue(), name, alt)


def style(values: Mapping[str, Any]) -> AbstractContextManager[None]:
    """matplotlib's defaults with `values`, whatever the user's own matplotlibrc says."""
    use_font_cache()
    try:
        from matplotlib import style as styles
    except ImportError as error:
        raise EnvironmentFailure("drawing needs matplotlib: pip install 'flexfleet[tracking]'") from error
    context: AbstractContextManager[None] = styles.context(dict(values), after_reset=True)
    return context


def use_font_cache() -> None:
    """Set MPLCONFIGDIR to a temporary copy of its folder if that folder is read-only, as the image's is in pods.
    matplotlib ignores a font cache in a folder that it cannot write, and searches the fonts again."""
    folder = os.environ.get("MPLCONFIGDIR", "")
    if os.path.isdir(folder) and not os.access(folder, os.W_OK):
        copy = tempfile.mkdtemp(prefix="matplotlib-")
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        os.environ["MPLCONFIGDIR"] = copy


def inline(document: str, name: str, alt: str) -> str:
    """The `<svg>` element of an SVG document: as wide as there is room, ids and style rules for this drawing alone."""
    body = re.sub(r"<metadata>.*?</metadata>", "", document[document.index("<svg") :], flags=re.DOTALL)
    # Inside tags only: a label may say anything.
    body = re.sub(r"<[^>]+>", lambda tag: re.sub(r'(\sid="|href="#|url\(#)', rf"\g<1>{name}-", tag[0]), body)
    body = body.replace("*{stroke", f"#{name} *{{stroke", 1)
    _, _, rest = body.partition(">")
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', body)
    assert box is not None, "matplotlib always writes a viewBox"
    size = f"width:100%;max-width:{1.5 * float(box[1]):.0f}px"  # points: texts never get larger than 15 px
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    start = f'<svg {names} id="{name}" {box[0]} style="{size}" role="img" aria-label="{html.escape(alt)}">'
    return start + rest.strip()


def name_axes(axes: Any, x: str, y: str, whole_x: bool = False) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if whole_x:
        axes.xaxis.set_major_locator(whole())


def whole(most: int = 10) -> Any:
    """Ticks at whole numbers, about so many at most."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def line(**look: Any) -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], **look)


def put_legend(figure: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Above the axes, in as many columns as fit the figure's width. The figure has room for one row, and grows by the
    others."""
    short = [shortened(label) for label in labels]
    room = round(LINE_CHARS * figure.get_figwidth())
    columns = max(1, min(len(short), room // (max(map(len, short)) + 7)))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW * (math.ceil(len(short) / columns) - 1))
    write(figure.legend(handles, ["x"] * len(short), loc="outside upper left", ncols=columns), short)


def write(legend: Any, labels: Sequence[str]) -> None:
    """Sets a legend's texts once it is made: matplotlib leaves out labels that start with "_"."""
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)


def shortened(label: str) -> str:
    """Without what is too much in its middle: labels that begin alike, as run ids often do, differ at their ends."""
    half = LABEL_CHARS // 2
    return label if len(label) <= LABEL_CHARS else f"{label[: half - 1]}…{label[-half:]}"


MOST_POINTS = 1000
"""The most points that are drawn of a curve. A longer one is cut into half as many parts, and the lowest and the
highest point of each part are drawn: on a page nobody sees the difference."""


def _parts(points: int) -> Ints:
    """Where each of MOST_POINTS / 2 parts of a curve begins."""
    return np.unique(np.linspace(0, points, MOST_POINTS // 2, endpoint=False).astype(np.int64))


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """A curve for drawing: itself, or of more than MOST_POINTS points the lowest and the highest of each part, in their
    order."""
    if len(x) <= MOST_POINTS:
        return x, y
    starts, values = _parts(len(x)), np.asarray(y, dtype=np.float64)
    ends = [*starts[1:], len(x)]
    parts = [(a, values[a:b]) for a, b in zip(starts, ends, strict=True)]
    kept = sorted({int(a + found) for a, part in parts for found in (part.argmin(), part.argmax())})
    return [x[i] for i in kept], [y[i] for i in kept]


def band(
    x: Sequence[float], low: Sequence[float], high: Sequence[float]
) -> tuple[Sequence[float], Sequence[float], Sequence[float]]:
    """A band for drawing: itself, or of more than MOST_POINTS points the lowest low and the highest high of each
    part."""
    if len(x) <= MOST_POINTS:
        return x, low, high
    starts = _parts(len(x))
    return [x[i] for i in starts], list(np.minimum.reduceat(low, starts)), list(np.maximum.reduceat(high, starts))
