"""The folder of a run, comparison or study: its lock, and the checks before a command starts or resumes in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from fl_engine.core.errors import ConfigError, EnvironmentFailure


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing.

    Raises:
        ConfigError: Another process holds the lock.
        EnvironmentFailure: The folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise EnvironmentFailure(
            f"{folder} cannot be created, because a file is in its place. Choose another folder"
        ) from error
    lock = filelock.FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except filelock.Timeout:
        raise ConfigError(f"{folder} is being run by another process: wait for it, or stop it first") from None
    try:
        yield
    finally:
        lock.release()


def check_is_folder(folder: Path) -> None:
    """Raise ConfigError unless `folder` is a folder, EnvironmentFailure if it cannot be read."""
    try:
        os.scandir(folder).close()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(f"{folder} is not a folder. Give the folder of a run, such as runs/<run id>") from error
    except OSError as error:
        raise EnvironmentFailure(f"{folder} cannot be read: {error.strerror}") from error


def check_free(folder: Path, resume: bool, name: str = "--run-id") -> None:
    """Raise ConfigError if `folder` exists and `resume` is False. `name` is the option that chooses another folder."""
    if folder.exists() and not resume:
        raise ConfigError(f"{folder} exists already: go on with --resume, or choose another {name}")


def check_same(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    fixed: Callable[[str], bool] = lambda _: True,
    name: str = "--run-id",
) -> None:
    """Raise ConfigError if a `fixed` setting, by dotted name, has another value than before."""
    if changed := changes(before, now, fixed):
        raise ConfigError(f"{folder} was started with another configuration ({changed}): choose another {name}")


def changes(before: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> str:
    """Describe the first settings that count and have another value than before; empty if there are none."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key) and counts(key)]
    return ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed[:6])


def go_on(id: str) -> str:
    """Say how a comparison, a study or a nightly run continues."""
    return f"the same command with --id {id} --resume goes on"


@contextmanager
def failures_tell(id: str) -> Iterator[None]:
    """Add to an EnvironmentFailure inside how the comparison or nightly run continues."""
    try:
        yield
    except EnvironmentFailure as error:
        raise type(error)(f"{error}: {go_on(id)}") from error
