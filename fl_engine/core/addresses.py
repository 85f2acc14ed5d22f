"""Which texts are addresses, and which are meant as one: they are no names of folders."""

from __future__ import annotations

import re

SCHEME = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]|s3:|s3//", re.IGNORECASE)
SERVER = re.compile(r"[a-z0-9.-]+:\d+(/|$)", re.IGNORECASE)
"""How a text begins that somebody wrote as an address: a scheme and a slash (s3:/bucket, with one slash too few), or a
server and its port. A folder of such a name (night-12:30) is given as a path (./night-12:30)."""


def is_meant(text: str) -> bool:
    """Whether the text is an address, or was meant as one; else it is the name of a folder."""
    return "://" in text or any(how.match(text) for how in (SCHEME, SERVER))


def folder_hint(text: str) -> str:
    """For the error about a text that was meant as an address: how a folder is given whose name looks like a server and
    its port; empty for any other text."""
    is_server = SERVER.match(text) and not SCHEME.match(text)
    return f" (a folder of that name is given as ./{text})" if is_server else ""
