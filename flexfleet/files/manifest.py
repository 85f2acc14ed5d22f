"""manifest.json: the size and the sha256 of each file of a finished run, so that a later change is noticed.

The manifest is written last, so a folder with a manifest is that of a finished run or central training. It covers the
record, the results, the model and the folders of the steps. It leaves out the ledger, which has sums of its own, and
drawings and exported models, which later commands may add or replace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from fl_engine.core.errors import IntegrityError
from fl_engine.core.system import hashed
from flexfleet.files.artifacts import Artifact

MANIFEST = "manifest.json"
FILES = ("*.json", "model.safetensors", "partition/**/*", "pretrain/**/*", "pool/**/*", "code/*")
"""Patterns of the files that a manifest covers."""


class FileSum(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
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
    """Compare a run's folder with its manifest. Return False if it has none: the run has not finished. Raises
    IntegrityError, which names the first file that is missing or has changed since the run finished."""
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


def _way_out(path: Path) -> str:
    return (
        f"Restore the file from a copy, or delete {path} and make the results again with the same command and --resume"
    )


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
