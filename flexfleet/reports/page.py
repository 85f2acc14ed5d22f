"""Format tables as text, Markdown or HTML pages. A page is a single file that does not load other files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flexfleet.reports.answer import Answer
from flexfleet.reports.figure import GREY, SQUARES

NONE = "\N{EN DASH}"
"""Cell without a value."""


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    equal: str = ""
    """Columns that are omitted because they are equal in all rows, with their values."""

    @property
    def heading(self) -> str:
        """Title, and the omitted columns with their values."""
        return "; ".join(filter(None, [self.title, f"equal in all rows: {self.equal}" if self.equal else ""]))

    def text(self, left: int = 1) -> str:
        """Return the table as text with aligned columns. The first `left` columns are left-aligned."""
        widths = [max(map(len, column)) for column in zip(self.head, *self.rows, strict=True)]
        lines = []
        for row in (self.head, *self.rows):
            cells = (c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    def varying(self) -> Table:
        """Omit columns without values. If there are several rows, also omit columns that are equal in all rows."""
        kinds, one = [set(column) for column in zip(*self.rows, strict=True)], len(self.rows) == 1
        kept = [i for i, values in enumerate(kinds) if not i or len(values) > 1 or (one and values != {NONE})]
        if len(kept) < 2:
            return self
        omitted = [(self.head[i], *values) for i, values in enumerate(kinds) if i not in kept and values != {NONE}]
        head, *rows = (tuple(row[i] for i in kept) for row in (self.head, *self.rows))
        return Table(self.title, head, rows, ", ".join(map(" ".join, omitted)))

    def markdown(self, colours: Mapping[str, str] = MappingProxyType({})) -> str:
        """Return the table in Markdown. `colours` maps the first cells of rows to colours. If SQUARES contains a row's
        colour, its first cell is bold and begins with the square."""
        rule = ("---", *("--:" for _ in self.head[1:]))
        lines = [list(map(escaped, row)) for row in (self.head, rule, *self.rows)]
        for line, row in zip(lines[2:], self.rows, strict=True):
            if square := SQUARES.get(colours.get(row[0], "")):
                line[0] = f"{square} **{line[0]}**"
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class PageSection:
    """Section of a page. A section consists of a table, a row of figures and sentences, in this order."""

    title: str
    table: Table | None = None
    drawings: Mapping[str, str] = field(default_factory=dict)
    """Map the caption of each figure to its SVG element."""
    lines: Sequence[str] = ()
    folded: bool = False
    """True if the page shows only the title until a reader opens the section."""


def unbroken(words: str) -> str:
    """Replace the spaces before percent signs and around equals signs with spaces at which lines do not break."""
    return re.sub(r" (?=[%=])|(?<==) ", "\N{NO-BREAK SPACE}", words)


def escaped(words: str) -> str:
    """Escape the special characters of Markdown, and join all lines into one."""
    return re.sub(r"([\\|_*`])", r"\\\1", " ".join(words.splitlines())).replace("<", "&lt;")


def page(
    kind: str,
    answer: Answer,
    sections: Iterable[PageSection],
    lines: Sequence[str] = (),
    colours: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Return the HTML page of a comparison, a study or a nightly regression run (`kind`).

    Args:
        lines: Sentences that are shown below the answer.
        colours: Map the first cell of a table row to the colour of the row's marker. Names of grey rows are not bold.
    """
    shown = list(sections)
    return render("page.html", kind=kind, answer=answer, sections=shown, lines=lines, colours=colours, grey=GREY)


def render(name: str, filters: Mapping[str, Callable[..., Any]] = MappingProxyType({}), **values: Any) -> str:
    """Render a template from this package. `filters` maps names in the template to functions."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("flexfleet.reports", "")
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {"unbroken": unbroken, **filters}
    return str(templates.get_template(name).render(**values))
