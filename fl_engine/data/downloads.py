"""Downloads the files of data sets, and unpacks members of archives.

An existing file that is wrong is an error, because only its owner knows whether it may be deleted.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import lzma
import shutil
import struct
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.data.files import read, replacing, sweep

CHUNK = 1 << 20
DAMAGE = (
    KeyError,
    tarfile.TarError,
    zipfile.BadZipFile,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    OSError,
    ValueError,
    RuntimeError,
    struct.error,
    MemoryError,
)
"""The errors that readers raise for a damaged archive. A header may declare a dictionary of gigabytes (MemoryError)."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A file to download: its official address, its local name, and its checksum as `algorithm:hex`."""

    url: str
    filename: str
    checksum: str


def download(remote: Remote, folder: Path) -> Path:
    """Download one file unless it exists, and return its path. Logs progress in steps of a tenth.

    Raises DataError if the content does not match the checksum, EnvironmentFailure if the network fails or the file
    cannot be written. Then nothing is kept.
    """
    target = folder / remote.filename
    if target.exists():
        read(target, remote.checksum)
        return target
    sweep([target])
    algorithm, expected = remote.checksum.split(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with urllib.request.urlopen(remote.url, timeout=60) as response, replacing(target) as out:
            length = response.headers.get("Content-Length") or ""
            total = int(length) if length.isdecimal() else 0
            done = 0
            while chunk := response.read(CHUNK):
                out.write(chunk)
                digest.update(chunk)
                _report(remote.filename, done, done + len(chunk), total)
                done += len(chunk)
            if done < total:
                raise ConnectionError(f"the connection ended after {done} of {total} bytes")
            if digest.hexdigest() != expected:
                raise DataError(
                    f"{remote.url}: expected {algorithm} {expected}, found {digest.hexdigest()} ({done} bytes). Fetch "
                    f"it again, or put the right file at {target}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentFailure(
            f"{remote.url}: download failed ({error}). Check the network, or put the file at {target}"
        ) from error
    return target


def _report(filename: str, before: int, after: int, total: int) -> None:
    if total and before * 10 // total != after * 10 // total:
        log.info("%s: %d %% of %.1f MB", filename, after * 100 // total, total / 1e6)


def download_members(archive: Remote, folder: Path, members: Mapping[str, Path]) -> None:
    """Download the archive into `folder` and unpack the members whose path does not exist. The archive is kept.

    Raises what `download` and `extract` raise.
    """
    absent = {name: path for name, path in members.items() if not path.exists()}
    if absent:
        extract(download(archive, folder), absent)


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Write members of a tar or .zip file to the given paths.

    Other members are ignored and no path is taken from the archive, so no archive can write elsewhere. Raises DataError
    for an archive that is damaged or lacks a member, EnvironmentFailure if a member cannot be written.
    """
    sweep(members.values())
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as packed:
                for name, target in members.items():
                    with packed.open(name) as content, replacing(target) as out:
                        shutil.copyfileobj(content, out, CHUNK)
            return
        with tarfile.open(archive) as tar:
            for name, target in members.items():
                member = tar.getmember(name)
                source = tar.extractfile(member) if member.isreg() else None
                if source is None:
                    raise DataError(f"{archive}: {name} is not a plain file. Delete the archive and fetch it again")
                with source, replacing(target) as out:
                    shutil.copyfileobj(source, out, CHUNK)
    except DAMAGE as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}). Delete the archive and fetch it again") from error
