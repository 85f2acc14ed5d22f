"""Add the help of all commands, all parameters and the algorithms' docstrings to the site, and draw its drawings."""

from __future__ import annotations

import argparse
import html
import re
from pathlib import Path
from typing import Any

DRAWING = re.compile(r'<img alt="[^"]*" src="[./]*(drawings/\w+\.svg)" ?/?>')
TASKS = {
    "Data and clients": ("dataset", "partition", "noise"),
    "Devices": ("fleet",),
    "Network": ("model",),
    "Algorithm": ("algorithm", "pretrain"),
    "Training and communication": ("", "rounds", "training", "codec", "evaluate"),
    "Execution: processes, pods, enrolled devices": ("run", "kubernetes", "agents"),
    "MLflow and publication": ("tracking", "publish"),
    "Central training and tuning": ("central", "tune"),
}
"""Map the headings of the page of parameters to sections of params.yaml."""


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


def on_post_page(output: str, **_: Any) -> str:
    """Remove the mark that lets the theme's script ask api.github.com for the repository's stars."""
    return output.replace(' data-md-component="source"', "")


def commands() -> str:
    from flexfleet.cli.main import parser

    (chosen,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(command(name, each) for name, each in chosen.choices.items())


def command(name: str, parser: argparse.ArgumentParser) -> str:
    """Return the help of a command: the description, and a table for each group of options."""
    formatter = parser._get_formatter()
    parts = [f"## flexfleet {name}"]
    for text in (parser.description or "").split("\n\n"):
        parts.append(f"```text\n{text}\n```" if text.startswith(" ") else escaped(f"{text[:1].upper()}{text[1:]}"))
    for group in parser._action_groups:
        actions = [each for each in group._group_actions if each.dest != "help" and each.help != argparse.SUPPRESS]
        names = [code(formatter._format_action_invocation(each)) for each in actions]
        meanings = [escaped(formatter._expand_help(each)) if each.help else "" for each in actions]
        if actions:
            rows = zip(names, meanings, strict=True)
            parts += [escaped(group.description or ""), "\n".join(table((group.title or "", "meaning"), rows))]
    return "\n\n".join(parts)


def parameters() -> str:
    """Return a table for each section, and folded tables for parts with their own options. Every row has an anchor:
    the dotted name, for an option followed by the part (`#algorithm.mu.fedprox`)."""
    from flexfleet.config.parameters import everything

    rows = everything()
    sections = dict.fromkeys(row.section for row in rows)
    assert sections.keys() == {section for each in TASKS.values() for section in each}
    out = []
    for task, names in TASKS.items():
        out.append(f"## {task}")
        for section in names:
            mine = [row for row in rows if row.section == section]
            out += [f"### {section or 'seed'}", *options([row for row in mine if not row.of])]
            for parent, of in dict.fromkeys((row.name.rpartition(".")[0], row.of) for row in mine if row.of):
                folded = options([row for row in mine if row.of == of and row.name.rpartition(".")[0] == parent])
                out += [f'<details markdown="1"><summary><code>{parent}: {of}</code></summary>', *folded, "</details>"]
    return "\n".join(out)


def options(rows: Any) -> list[str]:
    cells = []
    for row in rows:
        anchor = f"{row.name}.{row.of}" if row.of else row.name
        text = row.meaning
        if row.choices and not all(choice in text for choice in row.choices):
            text = f"One of {', '.join(row.choices)}. {text}"
        name = f'<a id="{anchor}"></a>{code(row.name)}<br>{row.type}'
        cells.append((name, f"{escaped(text)} Default: `{row.default}`"))
    return table(("parameter, type", "meaning"), cells)


def table(head: tuple[str, str], rows: Any) -> list[str]:
    lines = [head, ("---", "---"), *rows]
    return ["", *(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines), ""]


def code(name: str) -> str:
    return f'<code class="name">{html.escape(name, quote=False)}</code>'


def escaped(text: str) -> str:
    """Escape HTML, and let long lists such as drop=0.2,slow=0.1x5 break after a comma. Text in backticks is kept."""
    prose = text.split("`")
    prose[::2] = [re.sub(r",(?=\S)", ",<wbr>", html.escape(part, quote=False)) for part in prose[::2]]
    return "`".join(prose)


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
