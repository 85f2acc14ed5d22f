"""Downloads the files of data sets, and unpacks members of archives.

If a file exists with wrong content, an error is raised. The file is not replaced, because the user may still need it.
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import shutil
import tarfile
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.data.files import expecting, read, replacing

CHUNK = 1 << 20

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFile:
    """Describes a file to download: official URL, and checksum as `algorithm:hex`."""

    url: str
    checksum: str

    @property
    def filename(self) -> str:
        return self.url.rpartition("/")[2]


def download(remote: RemoteFile, folder: Path) -> Path:
    """Download one file unless it exists, and return its path. Log the progress every 10 %.

    Raises DataError if the content does not match the checksum, and EnvironmentFailure if the network fails or the file
    cannot be written.
    """
    target = folder / remote.filename
    if target.exists():
        read(target, remote.checksum)
        return target
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
                before, done = done, done + len(chunk)
                if total and before * 10 // total != done * 10 // total:
                    log.info("%s: downloaded %d %% of %.1f MB", remote.filename, done * 100 // total, total / 1e6)
            if done < total:
                raise ConnectionError(f"the connection ended after {done} of {total} bytes")
            if digest.hexdigest() != expected:
                raise DataError(
                    f"{remote.url} must have the {algorithm} checksum {expected}, found {digest.hexdigest()} ({done} "
                    f"bytes). Download the file again, or put the correct file at {target}"
                )
    except (OSError, http.client.HTTPException) as error:
        raise EnvironmentFailure(
            f"{remote.url} cannot be downloaded ({error}). Check the network, or put the file at {target}"
        ) from error
    return target


def download_members(archive: RemoteFile, folder: Path, members: Mapping[str, Path]) -> None:
    """Download the archive into `folder` and unpack the members whose target paths do not exist. The archive is kept.

    Raises the same errors as `download` and `extract`.
    """
    absent = {name: path for name, path in members.items() if not path.exists()}
    if absent:
        extract(download(archive, folder), absent)


def extract(archive: Path, members: Mapping[str, Path]) -> None:
    """Unpack members of a tar or .zip file. `members` maps names in the archive to target paths.

    Other members are ignored. Files are written only to the target paths, never to paths from the archive. Raises
    DataError if the archive is damaged or a member is missing, and EnvironmentFailure if a member cannot be written.
    """
    form = "an intact archive with the files of the data set"
    is_zip = archive.suffix == ".zip"
    with expecting(archive, form), zipfile.ZipFile(archive) if is_zip else tarfile.open(archive) as packed:
        for name, target in members.items():
            content = packed.open(name) if isinstance(packed, zipfile.ZipFile) else packed.extractfile(name)
            if content is None:
                raise ValueError(f"{name}, which is not a regular file")
            with content, replacing(target) as out:
                shutil.copyfileobj(content, out, CHUNK)
