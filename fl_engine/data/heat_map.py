"""Draws heat maps of sample counts per label and client, and writes figures reproducibly."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from fl_engine.data.partition_rules import Ints


def save_figure(figure: Any, to: Path | IO[str], dpi: float | Literal["figure"] = "figure") -> None:
    """Write a Matplotlib figure as SVG. A fixed hash salt and no date make the output reproducible."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "flexfleet"}):
        figure.savefig(to, format="svg", dpi=dpi, metadata={"Date": None})


def draw(counts: Ints, path: Path, word: str = "class") -> None:
    """Write a heat map of `counts` (labels, clients) as SVG, with the total of each client at the top. `word` is the
    noun for a label, such as class or cluster. Raises OSError if the file cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(heat_map(counts, word), path, dpi=150)


def heat_map(counts: Ints, word: str = "class") -> Any:
    """Return the `matplotlib.figure.Figure` that `draw` writes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    classes, clients = counts.shape
    # Create the Figure without pyplot, which would use global state and may open a window.
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
    totals.stairs(counts.sum(axis=0), np.arange(clients + 1) - 0.5, fill=True, color="tab:blue")
    totals.set_ylabel("total")
    totals.set_title(f"Samples of each {word} at each client ({counts.sum()} samples, {clients} clients)")
    totals.tick_params(labelbottom=False)
    totals.margins(x=0)
    figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]), label="samples")
    return figure
