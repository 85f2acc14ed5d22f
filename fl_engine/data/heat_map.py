"""Draws how many samples of each label each client holds, and writes figures with equal bytes for equal contents."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from fl_engine.core.errors import PartitionError
from fl_engine.data.partition_rules import Ints

MOST_BARS = 2000
"""With more clients, the totals are drawn as means over neighbours, because one bar each would take minutes."""


def save_figure(
    figure: Any, to: Path | IO[str] | IO[bytes], kind: Literal["svg", "png"], dpi: float | Literal["figure"] = "figure"
) -> None:
    """Write a `matplotlib.figure.Figure`, with a fixed salt and without a date, so that equal figures have equal
    bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "flexfleet"}):
        figure.savefig(to, format=kind, dpi=dpi, metadata={"Date": None} if kind == "svg" else {"Software": None})


def draw(counts: Ints, path: Path, word: str = "class") -> None:
    """Write a heat map of `counts` (labels, clients), with each client's total above it, as .svg or .png. `word` is
    the word for a label. Raises PartitionError for another file ending, OSError if the file cannot be written."""
    kinds: dict[str, Literal["svg", "png"]] = {".svg": "svg", ".png": "png"}
    if path.suffix not in kinds:
        raise PartitionError(f"a heat map must be .svg or .png, got {path.name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_figure(heat_map(counts, word), path, kinds[path.suffix], dpi=150)
    except OSError as error:
        path.unlink(missing_ok=True)  # the disk may be full
        raise OSError(error.errno, error.strerror, str(path)) from error  # an error of a write has no file name


def heat_map(counts: Ints, word: str = "class") -> Any:
    """Return the `matplotlib.figure.Figure` that `draw` writes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes, clients = counts.shape
    # A Figure without pyplot needs no global state and no window.
    figure = Figure(figsize=(min(5 + 0.3 * clients, 16), min(2.6 + 0.32 * classes, 12)), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(40, 1), height_ratios=(1, max(classes / 5, 1.5)))
    cells = figure.add_subplot(grid[1, 0])
    image = cells.imshow(counts, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    cells.set_xlabel("client")
    cells.set_ylabel(word)
    for axis in (cells.xaxis, cells.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    if classes * clients <= 400:
        for (label, client), count in np.ndenumerate(counts):
            dark = count > 0.6 * counts.max()
            cells.text(client, label, f"{count}", ha="center", va="center", fontsize=7, color="w" if dark else "k")
    totals = figure.add_subplot(grid[0, 0], sharex=cells)
    if clients <= MOST_BARS:
        totals.bar(np.arange(clients), counts.sum(axis=0), color="tab:blue", width=0.9)
        totals.set_ylabel("total")
    else:
        step = -(-clients // MOST_BARS)
        starts = np.arange(0, clients, step)
        edges = np.append(starts, clients)
        means = np.add.reduceat(counts.sum(axis=0), starts) / np.diff(edges)
        totals.stairs(means, edges - 0.5, fill=True, color="tab:blue")
        totals.set_ylabel(f"total\n(means of {step})")
    totals.set_title(f"Samples of each {word} at each client ({counts.sum()} samples, {clients} clients)")
    totals.tick_params(labelbottom=False)
    totals.margins(x=0)
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="samples")
    return figure
