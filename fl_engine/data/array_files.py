"""Reads NumPy's .npy files without unpickling, and caches the arrays of data sets on disk."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.data.files import DAMAGE, part_of

log = logging.getLogger(__name__)


def map_npy(path: Path) -> NDArray[np.generic]:
    """Map the array in a .npy file into memory. Values are read from disk only when they are used, so a wrong size in
    the header cannot exhaust the memory. Raises ValueError if the file is not a valid array of numbers."""
    try:
        with np.errstate(over="ignore"):  # NumPy rejects too large shapes
            found = np.lib.format.open_memmap(path, "r")
        if found.dtype.kind not in "iuf":
            raise ValueError(f"{found.dtype} of {' x '.join(map(str, found.shape))}")
        if (size := path.stat().st_size - found.offset) != found.nbytes:
            raise ValueError(f"{size} bytes of numbers")
        return found
    except DAMAGE as error:
        raise ValueError(str(error)[:300]) from error


INDEX = "pack.json"


def cached(folder: Path, version: int, inputs: Sequence[Path], write: Callable[[Path], None]) -> dict[str, Tensor]:
    """Return the arrays of a data set, and cache them next to its files, because reading the files takes minutes.

    The arrays are mapped copy-on-write, so they may be larger than RAM, and changes are never written to the files. The
    cache is rebuilt if the version has changed, or if the size or a time stamp of an input has changed. If `folder` is
    not writable, the arrays are created for this process only.

    Args:
        folder: Folder of the cache.
        version: Version of the code that reads the inputs.
        inputs: Files that `write` reads.
        write: Function that writes a file `<name>.npy` for each array into the given folder.

    Raises:
        DataError: An input cannot be read, or the disk is full. Errors raised by `write` are passed on.
    """
    folder = folder.resolve()
    wanted = {"version": version, "inputs": _states(folder.parent, inputs)}
    with suppress(OSError, ValueError):
        if json.loads((folder / INDEX).read_bytes()) == wanted:
            return _mapped(folder)
    part = part_of(folder)
    try:
        part.mkdir(parents=True)
    except OSError as error:
        log.warning("%s cannot be written (%s), so the next run reads all files again", folder, error)
        part = Path(tempfile.mkdtemp())
    try:
        write(part)
        (part / INDEX).write_text(json.dumps(wanted), encoding="utf-8")
        arrays = _mapped(part)
        if part.parent == folder.parent:
            shutil.rmtree(folder, ignore_errors=True)  # other processes can still use arrays that they have mapped
            with suppress(OSError):  # another process was faster
                part.rename(folder)
        return arrays
    except OSError as error:
        raise DataError(f"{folder} cannot be written ({error}). Free disk space or change permissions") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _states(root: Path, files: Sequence[Path]) -> dict[str, list[int]]:
    """Map relative paths of files to sizes and time stamps. Programs cannot forge `st_ctime`."""
    try:
        found = {os.path.relpath(path, root): path.stat() for path in files}
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read ({error.strerror})") from error
    return {name: [state.st_size, state.st_mtime_ns, state.st_ctime_ns] for name, state in found.items()}


def _mapped(folder: Path) -> dict[str, Tensor]:
    return {path.stem: torch.from_numpy(np.load(path, mmap_mode="c")) for path in sorted(folder.glob("*.npy"))}
