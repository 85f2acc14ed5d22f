"""Caches the arrays of a data set that takes minutes to read, in a folder beside its files.

The folder holds each array as `<name>.npy`, and `pack.json` with the version of the reader and the SHA-256, size and
times of each file that it read and of each array. If a file or the reader has changed, or an array is damaged, the
arrays are made again. A file whose size and times are unchanged is not hashed again, because no program can choose the
time of the last change (`st_ctime`). The arrays are mapped into memory, so a data set may be larger than the memory.
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
"""How often a process tries to replace the folder while other processes replace it."""


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
    """Each file that was read, by its path from the folder that holds the cache."""
    arrays: Mapping[str, Seen]
    """Each `<name>.npy`, by name."""


def packed(folder: Path, version: int, inputs: Sequence[Path], write: Callable[[Path], None]) -> dict[str, Tensor]:
    """Return the arrays that `write` makes of the inputs. It is called with a folder and puts `<name>.npy` into it,
    unless `folder` holds the arrays of the same inputs and the same `version`. If `folder` cannot be written, the
    arrays are made in a temporary folder, for this process only.

    The tensors are mapped copy-on-write, so changes to them never reach the files. Raises DataError if an input cannot
    be read or changes while it is read, or the disk is full, and what `write` raises. Then nothing is stored.
    """
    index = _index(folder)
    known = index.inputs if index is not None else {}
    names = {os.path.relpath(path, folder.parent): path for path in inputs}
    made_of = {name: seen(path, known.get(name)) for name, path in names.items()}
    if index is not None and index.version == version and _sums(known) == _sums(made_of):
        if damaged := _damaged(folder, index):
            log.warning("%s: %s is damaged; making the arrays again from %d files", folder, damaged, len(inputs))
        else:
            with suppress(OSError):  # another process has just replaced the folder
                return _mapped(folder, index.arrays)

    def written(room: Path) -> dict[str, Seen]:
        write(room)
        for name, path in names.items():
            if seen(path, made_of[name]).sha256 != made_of[name].sha256:
                raise DataError(f"{path} has changed while it was read. Start again when it is complete")
        return {path.stem: seen(path) for path in sorted(room.glob("*.npy"))}

    part = part_of(folder.resolve())
    try:
        try:
            part.mkdir(parents=True)
        except OSError as error:
            log.warning("%s cannot be written (%s), so the next run reads all files again", folder, error)
            with tempfile.TemporaryDirectory() as room:
                return _mapped(Path(room), written(Path(room)))
        sweep([folder.resolve()])
        arrays = written(part)
        text = Index(version=version, inputs=made_of, arrays=arrays).model_dump_json(indent=1)
        (part / INDEX).write_text(text, encoding="utf-8")
        tensors = _mapped(part, arrays)  # before the move, because another process may then replace the folder
        _replace(folder.resolve(), part)
        return tensors
    except OSError as error:
        raise DataError(f"{folder}: cannot be written ({error}). Make room or change permissions") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _index(folder: Path) -> Index | None:
    try:
        return Index.model_validate_json((folder / INDEX).read_bytes())
    except (OSError, ValidationError):
        return None


def _damaged(folder: Path, index: Index) -> str | None:
    """The name of the first array that is missing or has changed."""
    for name, wanted in index.arrays.items():
        try:
            found = seen(folder / f"{name}.npy", wanted).sha256
        except DataError:
            found = None
        if found != wanted.sha256:
            return f"{name}.npy"
    return None


def seen(path: Path, before: Seen | None = None) -> Seen:
    """Return the file as it is now, which is `before` if nothing has written to it since. Raises DataError if it cannot
    be read."""
    try:
        now = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    times = (now.st_mtime_ns, now.st_ctime_ns)
    if before is not None and (before.size, before.times) == (now.st_size, times):
        return before
    return Seen(sha256=digest(path), size=now.st_size, times=times)


def _sums(files: Mapping[str, Seen]) -> dict[str, str]:
    return {name: each.sha256 for name, each in files.items()}


def _replace(folder: Path, part: Path) -> None:
    """Rename `part` to `folder`. Processes that have mapped the old arrays keep them."""
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
