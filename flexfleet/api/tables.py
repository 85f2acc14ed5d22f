"""Tables of a result: DataFrames where pandas is installed, else lists of rows."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 20
"""Rows that a notebook shows of a table without pandas."""


@dataclass(frozen=True)
class Rows:
    """A table where pandas is not installed."""

    rows: tuple[dict[str, Any], ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return self.rows[place]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def _repr_html_(self) -> str:
        names = self.columns
        return to_html(names, [[row.get(name) for name in names] for row in self.rows[:SHOWN]])


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A DataFrame, or `Rows`. A value that a row lacks is NaN, or missing there."""
    listed = [dict(row) for row in rows]
    try:
        import pandas
    except ImportError:
        return Rows(tuple(listed))
    return pandas.DataFrame(listed)


def to_html(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table as HTML; what it says is escaped."""

    def cells(tag: str, values: Sequence[Any]) -> str:
        return "".join(f"<{tag}>{html.escape(_said(value))}</{tag}>" for value in values)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', names)}</tr></thead><tbody>{body}</tbody></table>"


def _said(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
