"""Downloads the files of data sets, and unpacks what they need of an archive.

Downloading never overwrites: an existing but wrong file is an error, because only its owner knows whether it may be
deleted.
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

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A file to download: its official address, its local name, and its checksum as `algorithm:hex`."""

    url: str
    filename: str
    checksum: str


def download(remote: Remote, folder: Path, timeout_s: float = 60.0) -> Path:
    """Downloads one file unless it exists and is right. Logs progress in steps of a tenth.

    Raises DataError if the content does not match the checksum, EnvironmentFailure if the network fails or it cannot be
    written; then nothing is kept.
    """
    target = folder / remote.filename
    if target.exists():
        read(target, remote.checksum)
        return target
    sweep([target])
    algorithm, expected = remote.checksum.split(":")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    try:
        with urllib.request.urlopen(remote.url, timeout=timeout_s) as response, replacing(target) as out:
            said = response.headers.get("Content-Length") or ""
            total = int(said) if said.isdecimal() else 0
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
                    f"{remote.url}: expected {algorithm} {expected}, found {digest.hexdigest()} ({done} bytes); "
                    f"nothing was kept: fetch again, or put the right file at {target}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentFailure(
            f"{remote.url}: download failed ({error}); check the network, "
            f"or download it elsewhere and put it at {target}"
        ) from error
    return target


def _report(filename: str, before: int, after: int, total: int) -> None:
    if total and before * 10 // total != after * 10 // total:
        log.info("%s: %d %% of %.1f MB", filename, after * 100 // total, total / 1e6)


DAMAGE = (
    KeyError, tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError, ValueError,
    RuntimeError, struct.error, MemoryError,
)  # fmt: skip
"""The errors that readers raise for a damaged archive; MemoryError if a header declares a dictionary of gigabytes."""


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Writes the named members of a tar or zip file (told apart by the file's suffix) to the given paths.

    Other members are ignored and no path is taken from the archive, so no archive can write elsewhere. Raises DataError
    for an archive that is broken or has no such member, EnvironmentFailure if one cannot be written.
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
                    raise DataError(f"{archive}: {name} is not a plain file; delete the archive and fetch again")
                with source, replacing(target) as out:
                    shutil.copyfileobj(source, out, CHUNK)
    except DAMAGE as error:
        raise DataError(f"{archive}: cannot be unpacked ({error}); delete the archive and fetch again") from error
