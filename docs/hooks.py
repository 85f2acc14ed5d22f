"""Add the help of all commands, all parameters and the algorithms' docstrings to the site, and draw its drawings."""

from __future__ import annotations

import argparse
import html
import os
import re
from pathlib import Path
from typing import Any

DRAWING = re.compile(r'<img alt="[^"]*" src="[./]*(drawings/\w+\.svg)" ?/?>')


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri.startswith("evidence/"):  # generated tables
        page.meta["search"] = {"exclude": True}
    elif page.file.src_uri.startswith("reference/"):
        page.meta.setdefault("search", {"boost": 0.5})
    for make in (commands, parameters, aggregations, algorithms):
        mark = f"<!-- {make.__name__} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def on_page_content(html: str, **_: Any) -> str:
    """Insert each drawing into its page, because an `img` cannot follow the page's dark mode."""
    docs = Path(__file__).parent
    return DRAWING.sub(lambda found: f'<span class="drawing">{(docs / found[1]).read_text("utf-8")}</span>', html)


def commands() -> str:
    from flexfleet.cli.main import parser

    os.environ["COLUMNS"] = "100"
    (chosen,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {name: each.format_help() for name, each in chosen.choices.items()}
    return "\n\n".join(f"## flexfleet {name}\n\n```text\n{text}```" for name, text in helps.items())


def parameters() -> str:
    """Return a table for each section, followed by tables for parts with their own options. Every row has an anchor:
    the dotted name, for an option followed by the part (`#algorithm.mu.fedprox`)."""
    from flexfleet.config.parameters import everything

    rows = everything()
    plain = [row for row in rows if not row.of]
    out = []
    for section in dict.fromkeys(row.section for row in plain):
        out += [f"## {section or 'seed'}", *table([row for row in plain if row.section == section])]
        options = [row for row in rows if row.of and row.section == section]
        for parent, of in dict.fromkeys((row.name.rpartition(".")[0], row.of) for row in options):
            mine = [row for row in options if row.of == of and row.name.rpartition(".")[0] == parent]
            out += [f"### {parent}: {of}", *table(mine)]
    return "\n".join(out)


def table(rows: Any) -> list[str]:
    lines = ["", "| parameter | type | default | meaning |", "|---|---|---|---|"]
    for row in rows:
        anchor = f"{row.name}.{row.of}" if row.of else row.name
        text = row.meaning
        if row.choices and not all(choice in text for choice in row.choices):
            text = f"One of {', '.join(row.choices)}. {text}"
        cells = (f'<a id="{anchor}"></a>`{row.name}`', row.type, f"`{row.default}`", html.escape(text, quote=False))
        lines.append(f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |")
    return [*lines, ""]


OPTIONS = "    options:\n      show_root_heading: false\n      heading_level: 3\n"


def aggregations() -> str:
    """Return the docstrings of the aggregations that have a file of their own, except `private`, which has a guide."""
    from fl_engine.aggregation import AGGREGATIONS, privacy, rules

    kinds = [kind for kind in AGGREGATIONS.values() if kind.__module__ not in (rules.__name__, privacy.__name__)]
    return "\n".join(f"::: {kind.__module__}\n{OPTIONS}      members: [{kind.__name__}]\n" for kind in kinds)


def algorithms() -> str:
    from fl_engine.algorithms import ALGORITHMS, PRESETS

    parts = [f"## `{name}`\n\n::: {kind.__module__}\n{OPTIONS}" for name, kind in sorted(ALGORITHMS.items())]
    presets = "".join(f"- `{name}`: {preset.meaning}\n" for name, preset in sorted(PRESETS.items()))
    return "\n".join([*parts, "## Presets\n", presets])
