"""Finds, checks and reads files of data sets, and writes files atomically.

Loading never uses the network. A file with wrong content is neither replaced nor deleted, because the user may still
need it.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import logging
import lzma
import os
import secrets
import struct
import tarfile
import wave
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fl_engine.core.errors import DataError, EnvironmentFailure, brief
from fl_engine.core.samples import Data
from fl_engine.core.text import path_of

DEFAULT_ROOT = "~/.cache/flexfleet/data"
MOST_NAMED = 10
"""Maximum number of missing files that an error lists by name."""
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of failed disk writes. Any other OSError without a file name comes from the network or an archive."""

BILINEAR = 2
"""Pillow's `Image.Resampling.BILINEAR`."""
DAMAGE = (
    OSError, ValueError, TypeError, LookupError, ArithmeticError, SyntaxError, TokenError, EOFError, RuntimeError,
    MemoryError, struct.error, zlib.error, lzma.LZMAError, csv.Error, wave.Error, tarfile.TarError, zipfile.BadZipFile,
)  # fmt: skip
"""Exceptions that libraries raise for damaged files. For example, a wrong size in a header may cause a MemoryError."""
log = logging.getLogger(__name__)


def data_root(argument: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets: the argument, the environment variable FLEXFLEET_DATA, or `DEFAULT_ROOT`.
    Raises ConfigError if the path begins with `~name` and no user has this name."""
    return path_of(argument or os.environ.get("FLEXFLEET_DATA") or DEFAULT_ROOT)


def absent(root: Path, files: Sequence[str]) -> tuple[Path, ...]:
    """Return the paths of missing `files` (relative to `root`). A name with a `*` is missing if no file matches it."""
    return tuple(root / file for file in files if not any(path.is_file() for path in root.glob(file)))


def require(name: str, root: Path, files: Sequence[str], url: str) -> None:
    """Raise DataError unless all `files` (relative to `root`) exist."""
    require_by_hand(name, root, files, f"Run `flexfleet fetch {name}`, or download {url} and put the files there")


def require_by_hand(name: str, root: Path, files: Sequence[str], how: str) -> None:
    """Raise DataError if `files` are missing in a data set that users download themselves. `how` is the instruction in
    the error message, with the URL, the size of the download, and the target folder."""
    if missing := absent(root, files):
        more = [f"{len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else []
        raise DataError(
            f"{name}: {len(missing)} of {len(files)} files are missing: "
            f"{', '.join([*map(str, missing[:MOST_NAMED]), *more])}. "
            f"{how}, or set the data root (FLEXFLEET_DATA) to the folder that contains {Path(files[0]).parts[0]}/"
        )


def warn_of_other_counts(data: Data, train: int, test: int) -> Data:
    """Return the data. Log a warning if the number of training or test samples is not the published number."""
    found = len(data.train_y), len(data.test_y)
    if found != (train, test):
        text = (
            "%s has %d training and %d test samples, but the published set has %d and %d. Some files are missing or "
            "belong to another version, so the split also differs from the published split"
        )
        log.warning(text, data.name, *found, train, test)
    return data


def damaged(where: Path | str, expected: str, found: object) -> DataError:
    """Return a DataError about wrong content. `where` is a file or a location in a file."""
    return DataError(f"{where}: expected {expected}, found {str(found)[:400]}. Delete the file and download it again")


@contextmanager
def expecting(where: Path | str, expected: str) -> Iterator[None]:
    """Raise `damaged(where, expected, error)` if the block raises an error in `DAMAGE`."""
    try:
        yield
    except DAMAGE as error:
        found = brief(error) if isinstance(error, ValidationError) else error
        raise damaged(where, expected, found) from error


def check_labels(where: Path | str, labels: NDArray[np.integer], classes: int) -> None:
    """Raise DataError if a label is outside 0 .. classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise damaged(where, f"labels 0..{classes - 1}", f"{labels[wrong[0]]} at sample {wrong[0]}")


def read(path: Path, checksum: str | None = None, most: int | None = None) -> bytes:
    """Return the content of a file. If `checksum` (`md5:...`, `sha1:...`) is given, the content must match it.

    Raises DataError if `path` is not a regular file, or if the file cannot be read, has more than `most` bytes or does
    not match its checksum.
    """
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} must be a regular file")
        if most is not None and (size := path.stat().st_size) > most:
            raise DataError(f"{path} must have at most {most} bytes, found {size}. Check the file")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error})") from error
    if checksum is not None:
        algorithm, expected = checksum.split(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise damaged(path, f"{algorithm} {expected}", f"{found} ({len(content)} bytes)")
    return content


def read_text(path: Path, most: int, checksum: str | None = None) -> str:
    """Return the content of a UTF-8 file. Raises the same errors as `read`, and DataError if the file is not UTF-8."""
    with expecting(path, "UTF-8"):
        return read(path, checksum, most).decode()


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict from the pairs of a JSON object (an `object_pairs_hook`). Raises ValueError if a name repeats."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0][:80]!r} occurs twice")
    return found


def part_of(path: Path) -> Path:
    """Return a temporary path next to `path`. The caller renames the file or folder to `path` when it is complete."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename it to `path` unless an error is raised. Raises EnvironmentFailure if the file
    cannot be written or the disk is full."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno not in DISK_ERRORS:
            raise
        raise EnvironmentFailure(f"{path} cannot be written ({error}). Free disk space or set permissions") from error
    finally:
        with suppress(OSError):
            part.unlink()


@contextmanager
def open_jpeg(path: Path, most: int) -> Iterator[Any]:
    """Open a JPEG file of at most `most` bytes as a Pillow image. Raises EnvironmentFailure if Pillow (installed with
    Matplotlib) is missing, and DataError if the file is damaged, even if the damage is found inside the `with`
    block."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("Pillow is required to read JPEG files. Run `pip install pillow`") from error
    content = read(path, most=most)
    try:
        with expecting(path, "a JPEG file"), Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise damaged(path, "a smaller image", error) from error
