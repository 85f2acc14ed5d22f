"""Files of data sets: finds, checks and reads them, and writes them whole or not at all.

Loading never touches the network (`downloads` does), and no file that is wrong is repaired or deleted: only its owner
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
"""Seconds after which what is not finished is that of a process that was killed."""
PART = re.compile(r"(.+)\.[0-9a-f]{8}\.part(\.[0-9]+\.old)?", re.DOTALL)
"""A name of `part_of`, or what `packs` moves out of its way."""
MOST_NAMED = 10
"""Missing files that an error lists by name."""

log = logging.getLogger(__name__)


# --------------------------------------------------------------------------------------- finding and reading
def data_root(argument: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the argument, else the variable FLEXFLEET_DATA, else ~/.cache/flexfleet/data. Raises
    DataError for the home folder (~name) of a user that does not exist."""
    root = Path(argument or os.environ.get("FLEXFLEET_DATA") or DEFAULT_ROOT)
    try:
        return root.expanduser()
    except RuntimeError as error:
        raise DataError(f"the data root {root} is of an unknown user's home ({error}); give a folder") from error


def absent(root: Path, files: Sequence[str]) -> tuple[Path, ...]:
    """Those of `files` (relative to `root`) that do not exist; a name with a `*` is absent if no file matches it."""
    return tuple(root / file for file in files if not any(path.is_file() for path in root.glob(file)))


def require(name: str, root: Path, files: Sequence[str], url: str) -> None:
    """Raises DataError unless all `files` (relative to `root`) exist."""
    require_by_hand(name, root, files, f"Run `flexfleet fetch {name}`, or download {url} and put the files there")


def require_by_hand(name: str, root: Path, files: Sequence[str], how: str) -> None:
    """As `require`, for a data set that its user downloads: `how` says what, from where, how much, and where to put
    it."""
    if missing := absent(root, files):
        more = [f"{len(missing) - MOST_NAMED} more"] if len(missing) > MOST_NAMED else []
        raise DataError(
            f"{name}: {len(missing)} of {len(files)} files are not there; expected "
            f"{', '.join([*map(str, missing[:MOST_NAMED]), *more])}. "
            f"{how}, or set the data root (FLEXFLEET_DATA) to the folder that holds {Path(files[0]).parts[0]}/"
        )


def warn_of_other_counts(data: Data, train: int, test: int) -> None:
    """For a data set whose publisher prints no checksums: says that there are other numbers of samples than these."""
    found = len(data.train_y), len(data.test_y)
    if found != (train, test):
        log.warning(
            "%s: %d training and %d test samples are there, %d and %d were published: files are missing, or of another "
            "version, so the split is another one too", data.name, *found, train, test,
        )  # fmt: skip


def read(path: Path, checksum: str | None = None, most: int | None = None) -> bytes:
    """The content of a file, which must match `checksum` (`md5:...`, `sha1:...`) if one is given.

    Raises DataError for what is no file, such as a pipe, which might be waited for without end, and for a file that
    cannot be read, has more than `most` bytes or does not match its checksum.
    """
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):  # of a folder reading says it
            raise DataError(f"{path}: expected a file, found a pipe, a socket or a device")
        if most is not None and (size := about.st_size) > most:
            raise DataError(f"{path}: expected at most {most} bytes, found {size}; is it another file?")
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check that it is a file and who may read it") from error
    if checksum is not None:
        algorithm, expected = checksum.split(":")
        found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
        if found != expected:
            raise DataError(
                f"{path}: expected {algorithm} {expected}, found {found} ({len(content)} bytes); "
                "the file is damaged or another version: delete it and fetch again"
            )
    return content


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object for `json.loads`. Raises ValueError where it has a name twice, of which `json` would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0][:80]!r} is there twice")
    return found


def digest(path: Path) -> str:
    """The SHA-256 (hex) of a file, read in pieces. Raises DataError if it cannot be read."""
    try:
        return hashed(path, hashlib.sha256()).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check that it is a file and who may read it") from error


# ---------------------------------------------------------------------------------------------------- writing
def part_of(path: Path) -> Path:
    """Where to write what then gets the name `path`: a name of its own for each thread of each machine."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def sweep(paths: Iterable[Path]) -> None:
    """Removes parts of these files and folders that killed processes have left: one may be as large as a data set."""
    wanted = set(paths)
    for folder in {path.parent for path in wanted}:
        for part in folder.glob("*.part*"):
            named = PART.fullmatch(part.name)
            if named is None or folder / named[1] not in wanted:
                continue
            with suppress(OSError):  # another process does the same
                if part.lstat().st_mtime < time.time() - ABANDONED_S:
                    remove(part)


def remove(path: Path) -> None:
    """A file, a folder or a link. Raises OSError."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Of a write that fails, not of what is read for it: a network or an archive."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yields a file to write, which replaces `path` unless an error is raised, so that `path` is never half written.
    Raises EnvironmentFailure, which names `path`, where nothing can be written there, or the disk takes no more."""
    part = part_of(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as out:
            yield out
        part.replace(path)
    except OSError as error:
        if error.filename is None and error.errno not in OF_DISKS:  # that of a write names no file
            raise
        why = f"{path}: cannot be written ({error}); make room, or see who may write there"
        raise EnvironmentFailure(why) from error
    finally:
        with suppress(OSError):  # there is none, or no folder that could hold it
            part.unlink()
