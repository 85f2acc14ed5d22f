"""manifest.json: size and sha256 of each file of a finished run, so that a later change is detected.

The manifest is written last, so a folder with a manifest is that of a finished run or central training. It covers
everything but the ledger, which has its own sums, and drawings and exported models, which later commands may replace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from fl_engine.core.errors import IntegrityError
from fl_engine.core.system import hashed
from fl_engine.storage.store import sha256
from flexfleet.files import prepared
from flexfleet.files.artifacts import Artifact, RunFile, Strict

MANIFEST = "manifest.json"
FILES = ("*.json", "model.safetensors", "partition/**/*", "pretrain/**/*", "pool/**/*", "code/*")
"""Patterns of the files that a manifest covers."""


class FileSum(Strict):
    size: int
    """Bytes."""
    sha256: str


class Manifest(Artifact):
    files: dict[str, FileSum] = Field(min_length=1)
    """By path in the run's folder, with slashes."""


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of the files that a run's folder holds now."""
    return Manifest(files={name: _sum(folder / name) for name in sorted(_names(folder))})


def check(folder: Path) -> bool:
    """Compare a run's folder with its manifest. Returns False if it has none, because the run has not finished. Raises
    IntegrityError for the first file that is missing or has changed."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    for name, expected in Manifest.read(path).files.items():
        if not (folder / name).is_file():
            raise IntegrityError(f"{folder / name} is missing, and {path} lists it. {_way_out(path)}")
        if (found := _sum(folder / name)) != expected:
            raise IntegrityError(
                f"{folder / name} has changed since the run finished: {path} says sha256 {expected.sha256} "
                f"({expected.size} bytes), found {found.sha256} ({found.size} bytes). {_way_out(path)}"
            )
    return True


def check_inputs(folder: Path, run: RunFile) -> None:
    """Raise IntegrityError if partition, APoZ scores or pool in a run's folder are missing, or not those of its
    rounds."""
    scores = prepared.index(folder / "pretrain").get("apoz")
    for name, expected in (
        ("partition/partition.json", run.partition_sha256),
        ("pretrain/apoz.json", None if scores is None else scores.sha256),
        ("pool/pool.json", run.pool_sha256),
    ):
        if expected is None:
            continue
        try:
            actual = sha256((folder / name).read_bytes())
        except OSError as error:
            raise IntegrityError(
                f"{folder / name} cannot be read ({error.strerror}). Restore it, or run again"
            ) from error
        if actual != expected:
            raise IntegrityError(
                f"{folder / name} is not the file that the run used: its sha256 is {actual[:16]}, expected "
                f"{expected[:16]}. Restore the right file, or run again"
            )


def _way_out(path: Path) -> str:
    return f"Restore the file, or delete {path} and make the results again with the same command and --resume"


def _names(folder: Path) -> Iterator[str]:
    for pattern in FILES:
        for path in folder.glob(pattern):
            if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
                yield path.relative_to(folder).as_posix()


def _sum(path: Path) -> FileSum:
    try:
        return FileSum(size=path.stat().st_size, sha256=hashed(path, hashlib.sha256()).hexdigest())
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
