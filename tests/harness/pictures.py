"""Figures without drawing them: setting text for an SVG takes most of the time of a run of a few clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest

from fl_engine.data import heat_map
from flexfleet.pipeline import run as run_module


def titles_alone(figure: Any, to: Path | IO[str], dpi: float | str = "figure") -> None:
    """Writes an SVG of the figure's size with the titles, labels and legends that it has, but nothing drawn."""
    width, height = 72 * figure.get_size_inches()
    said = "".join(f"<text>{escape(text.get_text())}</text>" for text in _texts(figure) if text.get_text())
    drawn = f'<?xml version="1.0"?>\n<svg viewBox="0 0 {width:g} {height:g}">{said}</svg>\n'
    if isinstance(to, Path):
        to.write_text(drawn, "utf-8")
    else:
        to.write(drawn)


def _texts(figure: Any) -> Iterator[Any]:
    """Titles, labels, legends and what is written into axes. (`figure.findobj` would make the ticks of all axes, which
    takes half the time of a run of a few clients.)"""
    from matplotlib.text import Text

    yield from figure.texts
    for legend in figure.legends:
        yield from legend.findobj(Text)
    for axes in figure.axes:
        yield from (axes.title, axes._left_title, axes._right_title, axes.xaxis.label, axes.yaxis.label, *axes.texts)
        if legend := axes.get_legend():
            yield from legend.findobj(Text)


def title_of_heat_map(counts: Any, word: str = "class") -> Any:
    """Return a figure with the title of a heat map, whose cells take a third of the time of a run of a few clients."""
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle(f"Samples of each {word} at each client")
    return figure


@contextmanager
def not_drawn() -> Iterator[None]:
    """Write the figures of this process by `titles_alone`."""
    with mock.patch.multiple(heat_map, save_figure=titles_alone, heat_map=title_of_heat_map):
        yield


def skip_pages(patch: pytest.MonkeyPatch) -> None:
    """Skip the pages of runs, which take most of a quick run's time and have their own tests."""

    def page(runs: Sequence[Path], out: Path) -> Path:
        out.write_text("<html></html>")
        return out

    patch.setattr(run_module, "report", page)
