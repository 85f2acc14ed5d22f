"""Caches the arrays of a data set that takes minutes to read, in a folder beside its files.

The folder holds each array as `<name>.npy`, and `pack.json` with the version of the reader, and of every file that it
read and of every array the SHA-256, size and times. If a file or the reader has changed, or an array is damaged, the
arrays are made again. A file whose size and times are as they were is not read for that: the file system sets the time
of its last change (`st_ctime`), which no program can choose. The arrays are mapped into memory: the system loads what
is used and may drop it again, so a data set may be larger than the memory.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.data.files import digest, part_of, remove, sweep

log = logging.getLogger(__name__)

INDEX = "pack.json"
ATTEMPTS = 5
"""How often a process tries to replace the folder, if other processes replace it at the same time."""


class Seen(BaseModel):
    """A file as it was when its SHA-256 was computed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    sha256: str
    size: int
    times: tuple[int, int]
    """`st_mtime_ns` and `st_ctime_ns`."""


class Index(BaseModel):
    """pack.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    version: int
    """The version of the reader."""
    inputs: Mapping[str, Seen]
    """Each file that was read, by its path from the folder that holds the pack."""
    arrays: Mapping[str, Seen]
    """Each `<name>.npy`, by name."""


def packed(folder: Path, version: int, inputs: Sequence[Path], write: Callable[[Path], None]) -> dict[str, Tensor]:
    """The arrays that `write` makes of the inputs: it is called with a folder and puts `<name>.npy` into it. If
    `folder` holds arrays of the same inputs and the same `version`, these are used; otherwise the new ones are stored
    there. If it cannot be written, they are made in a temporary folder, for this process alone.

    The tensors are mapped copy-on-write: changes to them never reach the files. Raises DataError if an input cannot be
    read or changes while it is read, or the disk is full, and whatever `write` raises; then nothing is stored.
    """
    index = _index(folder)
    known = index.inputs if index is not None else {}
    names = {os.path.relpath(path, folder.parent): path for path in inputs}
    made_of = {name: seen(path, known.get(name)) for name, path in names.items()}

    def written(room: Path) -> dict[str, Seen]:
        write(room)
        for name, path in names.items():
            if seen(path, made_of[name]).sha256 != made_of[name].sha256:
                raise DataError(f"{path} has changed while it was read: start again when nobody writes it any more")
        return {path.stem: seen(path) for path in sorted(room.glob("*.npy"))}

    if index is not None and index.version == version and _contents(known) == _contents(made_of):
        if damaged := _damaged(folder, index):
            log.warning("%s: %s is not what was written; made anew from %d files", folder, damaged, len(inputs))
        else:
            with suppress(OSError):  # another process has just replaced the folder
                return _mapped(folder, index.arrays)
    try:
        # What a link leads to is replaced, not the link.
        place = Path(os.path.realpath(folder)) if folder.is_symlink() else folder
        part = part_of(place)
        part.mkdir(parents=True)
        sweep([place])
    except OSError as error:
        log.warning("%s: cannot be written (%s), so the next run reads all %d files again", folder, error, len(inputs))
        with tempfile.TemporaryDirectory() as room:
            try:
                return _mapped(Path(room), written(Path(room)))
            except OSError as full:
                raise DataError(f"{room}: cannot be written ({full}); make room, or let {folder} be written") from full
    try:
        arrays = written(part)
        (part / INDEX).write_text(
            Index(version=version, inputs=made_of, arrays=arrays).model_dump_json(indent=1), encoding="utf-8"
        )
        tensors = _mapped(part, arrays)  # before the move: another process may then replace the folder
        _replace(place, part)
        return tensors
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}); make room, or let it be written") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _index(folder: Path) -> Index | None:
    try:
        return Index.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError):
        return None


def _damaged(folder: Path, index: Index) -> str | None:
    """The name of the first array that is missing or differs from what was written."""
    for name, wanted in index.arrays.items():
        try:
            found = seen(folder / f"{name}.npy", wanted).sha256
        except DataError:
            found = None
        if found != wanted.sha256:
            return f"{name}.npy"
    return None


def seen(path: Path, before: Seen | None = None) -> Seen:
    """The file as it is now: as `before` where nothing has written to it since. Raises DataError if it cannot be
    read."""
    try:
        now = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check that it is a file and who may read it") from error
    times = (now.st_mtime_ns, now.st_ctime_ns)
    if before is not None and (before.size, before.times) == (now.st_size, times):
        return before
    return Seen(sha256=digest(path), size=now.st_size, times=times)


def _contents(files: Mapping[str, Seen]) -> dict[str, str]:
    return {name: each.sha256 for name, each in files.items()}


def _replace(folder: Path, part: Path) -> None:
    """Moves `part` to `folder`. Processes that have mapped the old arrays keep them."""
    for attempt in range(ATTEMPTS):
        old = part.with_name(f"{part.name}.{attempt}.old")
        with suppress(FileNotFoundError):
            folder.rename(old)
        try:
            part.rename(folder)
            return
        except OSError:
            if attempt == ATTEMPTS - 1:
                raise
        finally:
            with suppress(OSError):
                remove(old)


def _mapped(folder: Path, names: Mapping[str, Seen]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in names}
