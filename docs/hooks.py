"""What the site takes from the code when it is built: every command's help, the schema of params.yaml, and the
algorithms' files."""

from __future__ import annotations

import argparse
import os
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    for make in (commands, parameters, algorithms):
        mark = f"<!-- {make.__name__} -->"
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def commands() -> str:
    from flexfleet.cli import parser

    os.environ["COLUMNS"] = "100"
    (chosen,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {name: each.format_help() for name, each in chosen.choices.items()}
    return "\n\n".join(f"## flexfleet {name}\n\n```text\n{text}```" for name, text in helps.items())


def parameters() -> str:
    from flexfleet.config.document import params_yaml

    return f"```yaml\n{params_yaml()}```"


def algorithms() -> str:
    from fl_engine.algorithms import ALGORITHMS

    options = "    options:\n      show_root_heading: false\n      heading_level: 3\n"
    return "\n".join(f"## `{name}`\n\n::: {kind.__module__}\n{options}" for name, kind in sorted(ALGORITHMS.items()))
