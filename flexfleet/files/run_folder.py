"""Lock, check and verify the folder of a run, comparison or study.

manifest.json contains the size and sha256 of each file, so that later changes are detected. The manifest is written
last, so only finished runs have a manifest. The ledger is not in the manifest, because it has its own checksums.
Figures and exported models are not in the manifest, because later commands can replace them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
from pydantic import Field

from fl_engine.core.errors import ConfigError, EnvironmentFailure, IntegrityError
from fl_engine.core.records import Strict, read_bytes
from fl_engine.core.system import hashed
from flexfleet.files import prepared
from flexfleet.files.artifacts import Artifact, RunFile

MANIFEST = "manifest.json"
BEST_MODEL = "best.safetensors"
"""Model of the round with the best validation score (`rounds.until`)."""
FILES = ("*.json", "model.safetensors", BEST_MODEL, "partition/**/*", "pretrain/**/*", "pool/**/*", "code/*")
"""Patterns of the files in a manifest."""
UNFINISHED = (".lock", "run.json", "central.json", "partition", "pretrain", "pool", "rounds", "code", "secret", "site",
              "forecast.json")  # fmt: skip
"""Entries in the folder of a run or central training that has no results yet."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock a folder, and create the folder if it is missing. Raises ConfigError if another process has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = filelock.FileLock(folder / ".lock").acquire(blocking=False)
    except filelock.Timeout:
        raise ConfigError(f"{folder} is in use by another process. Wait for the other process or stop it") from None
    with lock:
        yield


def check_is_folder(folder: Path) -> None:
    """Raise ConfigError if `folder` is not a folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder. Specify the folder of a run, such as runs/<run id>")


def check_free(folder: Path, resume: bool, name: str = "--run-id", unfinished: Collection[str] = ()) -> None:
    """Raise ConfigError if `folder` exists and `resume` is False, unless the folder only has entries in `unfinished`.
    The error suggests changing the option `name`."""
    if folder.exists() and not resume and not (unfinished and all(p.name in unfinished for p in folder.iterdir())):
        raise ConfigError(f"{folder} exists already. Continue with --resume, or choose another {name}")


def check_writable(name: str, folder: Path) -> None:
    """Raise EnvironmentFailure if no file can be created in `folder`, which may be missing. `name` is the parameter."""
    try:
        there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
        with tempfile.TemporaryDirectory(dir=there, prefix=".flexfleet-"):
            pass
    except OSError as error:
        message = f"{name} = {str(folder)!r} must be a folder that this user can write to: {error.strerror}"
        raise EnvironmentFailure(message, path=name) from error


def check_same(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    fixed: Callable[[str], bool] = lambda _: True,
    name: str = "--run-id",
) -> None:
    """Raise ConfigError if a parameter for which `fixed` is True differs in `before` and `now` (by dotted name)."""
    if changed := changes(before, now, fixed):
        raise ConfigError(f"{folder} was started with another configuration ({changed}). Choose another {name}")


def changes(before: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> str:
    """Return a string with the first six changed parameters for which `counts` returns True; "" if there are none."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key) and counts(key)]
    return ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed[:6])


def how_to_resume(id: str) -> str:
    """Return the instruction to continue a comparison, a study or a nightly run."""
    return f"continue with the same command and --id {id} --resume"


class FileSum(Strict):
    size: int
    """Size in bytes."""
    sha256: str


class RunManifest(Artifact):
    files: dict[str, FileSum] = Field(min_length=1)
    """Map paths, relative to the run's folder, to sizes and checksums."""


def manifest_of(folder: Path) -> RunManifest:
    """Return a manifest of the files in a run's folder."""
    return RunManifest(files={name: _sum(folder / name) for name in sorted(_names(folder))})


def check_manifest(folder: Path) -> bool:
    """Compare a run's folder with its manifest. Returns False if the run has not finished and therefore has no
    manifest. Raises IntegrityError if a file is missing or has changed."""
    path = folder / MANIFEST
    if not path.exists():
        return False
    for name, expected in RunManifest.read(path).files.items():
        if (found := _sum(folder / name)) != expected:
            raise IntegrityError(
                f"{folder / name} has changed since the run finished: it has {found.size} bytes and the sha256 "
                f"{found.sha256[:12]}, expected {expected.size} bytes and {expected.sha256[:12]}. Restore the file, or "
                f"delete {path} and run again with --resume"
            )
    return True


def check_inputs(folder: Path, run: RunFile) -> None:
    """Raise IntegrityError if the partition, APoZ scores or pool are missing or have changed since the run started."""
    scores = prepared.index(folder / "pretrain").get("apoz")
    read_bytes(folder / "partition" / "partition.json", run.partition_sha256)
    read_bytes(folder / "pool" / "pool.json", run.pool_sha256)
    if scores is not None:
        read_bytes(folder / "pretrain" / "apoz.json", scores.sha256)


def _names(folder: Path) -> Iterator[str]:
    for pattern in FILES:
        for path in folder.glob(pattern):
            if path.is_file() and path.name != MANIFEST and not path.name.startswith("."):
                yield path.relative_to(folder).as_posix()


def _sum(path: Path) -> FileSum:
    try:
        return FileSum(size=path.stat().st_size, sha256=hashed(path, hashlib.sha256()).hexdigest())
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read ({error.strerror}). Restore the file or repeat the run") from error
