"""Which names runs, comparisons, studies and nights may have: a name becomes a folder, the prefix of a bucket's keys,
and a line of a log."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

from fl_engine.core.errors import ConfigError

if TYPE_CHECKING:
    from flexfleet.config.schema import Config

LONGEST = 150
"""Bytes in UTF-8: file systems take 255, and files beside a folder have longer names than the folder."""


def plain(name: str, what: str) -> str:
    """Return the name if it is plain. `what`: the option or parameter that gives it. Raises ConfigError for an empty
    name, a slash, a control character, a dot or dash in front, a blank at an end, or more than LONGEST bytes."""
    if not isinstance(name, str):
        raise ConfigError(f"{what} is a name, a text, got {name!r}")
    wrong = not name or not name.isprintable() or "/" in name or "\\" in name or name[0] in ".-" or name != name.strip()
    if wrong or len(name.encode()) > LONGEST:
        shown = repr(name) if len(name) <= 80 else f"{name[:80]!r}... ({len(name.encode(errors='replace'))} bytes)"
        raise ConfigError(
            f"{what} is a plain name of at most {LONGEST} bytes, it becomes a folder of the run store (no slash, no "
            f"control character, no '.' or '-' in front, no blank at an end); got {shown}"
        )
    return name


def new_name(config: Config) -> str:
    """Return a new name for a run: its algorithm and seed, and what `dated` adds."""
    return dated(f"{config.algorithm['name']}-s{config.seed}".replace(":", "."))


def dated(kind: str) -> str:
    """Return a new name that begins with `kind`, with the time and six random digits."""
    return f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
