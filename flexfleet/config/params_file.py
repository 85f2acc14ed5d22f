"""params.yaml with every parameter, its default and its meaning. `python -m components.describe` writes the file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from fl_engine.models.build import FROM_DATA, INIT, WARM_START
from flexfleet.config.parameters import SECTIONS, class_text, described, hints, in_yaml
from flexfleet.config.schema import Config

WIDTH = 120
HEAD = """\
All parameters with their defaults: FlexFL on scikit-learn's handwritten digits. `flexfleet run`, `dvc repro` and
`python -m flexfleet.pipeline.<step>` read this file, and `--set a.b=value` overrides a value.
`flexfleet params WORD` explains options, e.g. `flexfleet params augment`. `make generated` writes this file."""


def params_yaml() -> str:
    """Return the text of params.yaml."""
    return "\n".join([*(f"# {line}" for line in HEAD.splitlines()), *_section(Config(), "", "")]) + "\n"


def _section(value: Any, prefix: str, indent: str) -> Iterator[str]:
    """The lines of a section; `value` holds its defaults, `prefix` is its dotted name followed by a dot."""
    kind: Any = type(value)
    for name in hints(kind):
        path, default = f"{prefix}{name}", getattr(value, name)
        if path in ("model", "algorithm"):
            yield from ("", f"{name}:", *_named(path, default["name"]))
        elif isinstance(default, BaseModel) or name == "training":
            yield from ("", *_line(f"{name}:", class_text(type(default)), indent))
            yield from _section(default, f"{path}.", f"{indent}  ")
        elif path == "fleet.tiers":
            yield from _line(f"{name}:", described(kind, name, path), indent)
            for tier in default:
                told = {f.name: each for f in fields(tier) if (each := getattr(tier, f.name)) is not None}
                yield f"{indent}  - {in_yaml(told)}"
        else:
            # The key `on` in quotes: without them it is true for readers of YAML 1.1.
            yield from _line(f"{in_yaml(name)}: {in_yaml(default)}", described(kind, name, path), indent)


def _named(section: str, name: str) -> Iterator[str]:
    """The name of the default network or algorithm, and its options as comments."""
    yield from _line(f"name: {name}", described(Config, section, section), "  ")
    kind: Any = SECTIONS[section][name]
    if section == "model":
        yield from _line(f"{INIT}: null", WARM_START, "  # ")
    yield f"  # The options of {name}; `flexfleet params NAME` shows those of another."
    for field in fields(kind):
        if field.name not in ("training", *FROM_DATA):
            yield from _line(f"{field.name}: {in_yaml(field.default)}", described(kind, field.name), "  # ")


def _line(text: str, meaning: str, indent: str) -> list[str]:
    """`key: value # meaning`; a long meaning gets its own lines above it."""
    short = f"{indent}{text} # {meaning}" if meaning else f"{indent}{text}"
    if len(short) <= WIDTH:
        return [short]
    # The meaning of an option that is itself a comment is indented by two more blanks, so that its key stands out.
    lead = f"{indent}  " if indent.endswith("# ") else f"{indent}# "
    return [*textwrap.wrap(meaning, WIDTH, initial_indent=lead, subsequent_indent=lead), f"{indent}{text}"]
