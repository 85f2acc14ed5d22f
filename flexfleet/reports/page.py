"""Format tables as text, Markdown or HTML pages. A page is a single file that does not load other files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


class Drawing(str):
    """An SVG element. Templates insert SVG elements unchanged and escape all other strings."""

    def __html__(self) -> str:
        return self


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def text(self, left: int = 1) -> str:
        """Return the table as text with aligned columns. The first `left` columns are left-aligned."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = []
        for row in (self.head, *self.rows):
            cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def markdown(self) -> str:
        rule = ("---", *("--:" for _ in self.head[1:]))
        lines = [map(escaped, self.head), rule, *(map(escaped, row) for row in self.rows)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class PageSection:
    """Section of a page. A section consists of a table, a row of figures and sentences, in this order."""

    title: str
    table: Table | None = None
    drawings: Mapping[str, str] = field(default_factory=dict)
    """Map the caption of each figure to its SVG element."""
    lines: Sequence[str] = ()


def escaped(words: str) -> str:
    """Escape the special characters of Markdown, and join all lines into one."""
    return re.sub(r"([\\|_*`])", r"\\\1", " ".join(words.splitlines())).replace("<", "&lt;")


def page(
    kind: str,
    title: str,
    sections: Iterable[PageSection],
    lines: Sequence[str] = (),
    colours: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the HTML page of a comparison, a study or a nightly regression run (`kind`).

    Args:
        lines: Sentences that are shown below the title.
        colours: Map the first cell of a table row to the colour of the row's marker.
    """
    return render("page.html", kind=kind, title=title, sections=list(sections), lines=lines, colours=colours)


def render(name: str, filters: Mapping[str, Callable[..., Any]] = MappingProxyType({}), **values: Any) -> str:
    """Render a template from this package. `filters` maps names in the template to functions."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("flexfleet.reports", "")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"drawing": Drawing, **filters}
    return str(templates.get_template(name).render(**values))
