"""A file or folder that gets its name only if all went well, and if no other process was quicker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fl_engine.data.files import part_of, remove, sweep


class Taken(Exception):
    """Another process was quicker."""


@contextmanager
def made_once(path: Path) -> Iterator[Path]:
    """A folder or file to write, which gets the name `path` only if all went well. Raises Taken if a folder with
    something in it has that name by then; a file or an empty folder is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep([path])
    part = part_of(path)
    try:
        yield part
        try:
            part.rename(path)
        except OSError as error:
            if not path.exists():
                raise
            raise Taken from error
    finally:
        with suppress(OSError):  # it has its name
            remove(part)
