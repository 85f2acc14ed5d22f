"""Arrays of a data set that takes minutes to read, kept in a folder beside its files.

The folder holds an array in each `<name>.npy`, and `pack.json`, which says what they were made of: the version of the
reader, and the SHA-256 of every file that it read. It also has the SHA-256 of every array. So other files, another
reader or a damaged array are noticed, and the arrays are made anew. They are mapped into memory: the system reads what
is used and may drop it again, so a data set may be larger than the memory.
"""

from __future__ import annotations

import logging
import os
import secrets
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
from fl_engine.data.files import digest

log = logging.getLogger(__name__)

INDEX = "pack.json"
ATTEMPTS = 5
"""How often a process tries to put its arrays in the place of those of others that do the same."""


class Index(BaseModel):
    """pack.json."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    version: int
    """Of the reader."""
    inputs: Mapping[str, str]
    """The SHA-256 of each file that was read, by its path from the folder that holds the pack."""
    arrays: Mapping[str, str]
    """The SHA-256 of each `<name>.npy`, by name."""


def packed(folder: Path, version: int, inputs: Sequence[Path], write: Callable[[Path], None]) -> dict[str, Tensor]:
    """The arrays that `write` makes of the inputs: it is given a folder and puts `<name>.npy` into it. They are taken
    from `folder` where they were made of the same inputs by the same `version` before, and kept there otherwise. Where
    it cannot be written, they are made in a temporary folder, for this process alone.

    The tensors are mapped copy-on-write: what is changed in them never reaches the files. Raises DataError for an input
    that cannot be read, where there is no room, and whatever `write` raises; then nothing is kept.
    """
    made_of = {os.path.relpath(path, folder.parent): digest(path) for path in inputs}
    index = _index(folder)
    if index is not None and (index.version, index.inputs) == (version, made_of):
        if damaged := _damaged(folder, index):
            log.warning("%s: %s is not what was written; made anew from %d files", folder, damaged, len(inputs))
        else:
            return _mapped(folder, index.arrays)
    try:
        part = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.part")
        part.mkdir(parents=True)
    except OSError as error:
        log.warning("%s: cannot be written (%s), so the next run reads all %d files again", folder, error, len(inputs))
        with tempfile.TemporaryDirectory() as room:
            return _mapped(Path(room), _written(Path(room), write))
    try:
        arrays = _written(part, write)
        (part / INDEX).write_text(Index(version=version, inputs=made_of, arrays=arrays).model_dump_json(indent=1))
        tensors = _mapped(part, arrays)  # now: another process may put its own in their place
        _replace(folder, part)
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
    """The first array whose bytes are others than those that were written, or gone."""
    for name, wanted in index.arrays.items():
        try:
            found = digest(folder / f"{name}.npy")
        except DataError:
            found = None
        if found != wanted:
            return f"{name}.npy"
    return None


def _written(folder: Path, write: Callable[[Path], None]) -> dict[str, str]:
    write(folder)
    return {path.stem: digest(path) for path in sorted(folder.glob("*.npy"))}


def _replace(folder: Path, part: Path) -> None:
    """Puts `part` in the place of `folder`. Who has mapped the old arrays keeps them."""
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
            shutil.rmtree(old, ignore_errors=True)


def _mapped(folder: Path, names: Mapping[str, str]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in names}
