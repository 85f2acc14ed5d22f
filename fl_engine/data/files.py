"""Files of data sets: finds, checks and reads them, and writes them whole or not at all.

Loading never uses the network (`downloads` does). A wrong file is neither repaired nor deleted, because only its owner
knows whether it may be.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.core.system import hashed

DEFAULT_ROOT = "~/.cache/flexfleet/data"
ABANDONED_S = 86_400
"""After so many seconds, an unfinished file is one that a killed process has left."""
PART = re.compile(r"(.+)\.[0-9a-f]{8}\.part(\.[0-9]+\.old)?", re.DOTALL)
"""A name that `part_of` makes, or that `array_cache` renames."""
MOST_NAMED = 10
"""An error lists this many missing files by name."""
OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write. Other errors without a file name come from what is read: a network or an archive."""

log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------- finding and reading
def data_root(argument: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of all data sets: the argument, else the variable FLEXFLEET_DATA, else ~/.cache/flexfleet/data.
    Raises DataError for the home folder (~name) of an unknown user."""
    root = Path(argument or os.environ.get("FLEXFLEET_DATA") or DEFAULT_ROOT)
    try:
        return root.expanduser()
    except RuntimeError as error:
        raise DataError(f"the data root {root} is not a folder: {error}") from error


def absent(root: Path, files: Sequence[str]) -> tuple[Path, ...]:
    """Return those of `files` (relative to `root`) that do not exist. A name with a `*` needs one matching file."""
    return tuple(root / file for file in files if not any(path.is_file() for path in root.glob(file)))


def require(name: str, root: Path, files: Sequence[str], url: str) -> None:
    """Raise DataError unless all `files` (relative to `root`) exist."""
    require_by_hand(name, root, files, f"Run `flexfleet fetch {name}`, or download {url} and put the files there")


def require_by_hand(name: str, root: Path, files: Sequence[str], how: str) -> None:
    """As `require`, for a data set that users download themselves. `how`: what, from where, how large, and where to put
    it."""
    if missing := absent(root, files):
        more = [f"{len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else []
        raise DataError(
            f"{name}: {len(missing)} of {len(files)} files are missing: "
            f"{', '.join([*map(str, missing[:MOST_NAMED]), *more])}. "
            f"{how}, or set the data root (FLEXFLEET_DATA) to the folder that holds {Path(files[0]).parts[0]}/"
        )


def warn_of_other_counts(data: Data, train: int, test: int) -> None:
    """Log a warning if a data set without published checksums has another number of samples than published."""
    found = len(data.train_y), len(data.test_y)
    if found != (train, test):
        log.warning(
            "%s has %d training and %d test samples, but %d and %d were published. Files are missing or of another "
            "version, so the split differs too",
            data.name,
            *found,
            train,
            test,
        )


def damaged(where: Path | str, expected: str, found: object) -> DataError:
    """Return the error for a file, or a place in it, with other content than its publisher says."""
    return DataError(f"{where}: expected {expected}, found {str(found)[:400]}. Delete the file and download it again")


def read(path: Path, checksum: str | None = None, most: int | None = None) -> bytes:
    """Return the content of a file, which must match `checksum` (`md5:...`, `sha1:...`) if one is given.

    Raises DataError for a pipe or a device, and for a file that cannot be read, has more than `most` bytes or does not
    match its checksum.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
            raise DataError(f"{path}: expected a file, found a pipe, a socket or a device")
        if most is not None and about.st_size > most:
            raise DataError(f"{path}: expected at most {most} bytes, found {about.st_size}. It is another file")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    if checksum is not None:
        algorithm, expected = checksum.split(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise damaged(path, f"{algorithm} {expected}", f"{found} ({len(content)} bytes)")
    return content


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads`. Raises ValueError if a name occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0][:80]!r} occurs twice")
    return found


def digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file. Raises DataError if it cannot be read."""
    try:
        return hashed(path, hashlib.sha256()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error


# ---------------------------------------------------------------------------------------------------- writing
def part_of(path: Path) -> Path:
    """Return a temporary name for what is renamed to `path` when it is finished."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def sweep(paths: Iterable[Path]) -> None:
    """Remove temporary files and folders of these paths that killed processes have left, which may be large."""
    wanted = set(paths)
    for folder in {path.parent for path in wanted}:
        for part in folder.glob("*.part*"):
            named = PART.fullmatch(part.name)
            if named is None or folder / named[1] not in wanted:
                continue
            with suppress(OSError):  # another process may do the same
                if part.lstat().st_mtime < time.time() - ABANDONED_S:
                    remove(part)


def remove(path: Path) -> None:
    """Remove a file, a folder or a link. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which replaces `path` unless an error is raised. Raises EnvironmentFailure, which names
    `path`, if it cannot be written or the disk is full."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno not in OF_DISKS:
            raise
        raise EnvironmentFailure(
            f"{path}: cannot be written ({error}). Make room, or change its permissions"
        ) from error
    finally:
        with suppress(OSError):
            part.unlink()
