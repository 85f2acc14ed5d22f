"""Which texts are addresses, and which are meant as one: they are no names of folders."""

from __future__ import annotations

import re

MEANT = re.compile(r"[a-z][a-z0-9+.-]+:[/\\]|s3:|s3//|[a-z0-9.-]+:\d+(/|$)", re.IGNORECASE)
"""How a text begins that somebody wrote as an address: a scheme and a slash (s3:/bucket, with one slash too few), or a
server and its port. A folder of such a name is given by its whole path."""


def is_meant(text: str) -> bool:
    """Whether the text is an address, or was meant as one; else it is the name of a folder."""
    return "://" in text or MEANT.match(text) is not None
