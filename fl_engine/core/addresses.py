"""Which texts are addresses, which are meant as one, and which begin with the home folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fl_engine.core.errors import ConfigError

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]|s3:|s3//", re.IGNORECASE)
SERVER = re.compile(r"[a-z0-9.-]+:\d+(/|$)", re.IGNORECASE)
"""How a text begins that somebody wrote as an address: a scheme and a slash (s3:/bucket, with one slash too few), or a
server and its port. A folder of such a name (night-12:30) is given as a path (./night-12:30)."""


def is_meant(text: str) -> bool:
    """Whether the text is an address, or was meant as one; else it is the name of a folder."""
    return "://" in text or any(how.match(text) for how in (SCHEME, SERVER))


AT_HOME = re.compile(r"((?:sqlite(?:\+\w+)?:///|file:(?://)?)?)(~[^/]*)")
"""A path that begins with a home folder, alone or in an address of a file."""


def at_home(path: str) -> str:
    """Replace `~` or `~user` at the beginning of a path, also of one in `sqlite:///` or `file://`, by the home folder.
    Raises ConfigError if there is no such user."""
    if (match := AT_HOME.match(path)) is None:
        return path
    scheme, name = match.groups()
    if (home := os.path.expanduser(name)) == name:
        raise ConfigError(f"{name} is not the home folder of a user of this machine, got {path!r}. Name it as ./{name}")
    return f"{scheme}{home}{path[match.end() :]}"


def path_of(text: str | os.PathLike[str]) -> Path:
    """Return the path of an option or an argument, with the home folder for `~`. Raises ConfigError as `at_home`."""
    return Path(at_home(os.fspath(text)))


def folder_hint(text: str) -> str:
    """For the error about a text that was meant as an address: how a folder is given whose name looks like a server and
    its port; empty for any other text."""
    is_server = SERVER.match(text) and not SCHEME.match(text)
    return f" (a folder of that name is given as ./{text})" if is_server else ""
