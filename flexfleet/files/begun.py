"""What was begun before, as a command meets it: whether its folder is free, whether its settings are the same, and how
it goes on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, EnvironmentFailure


def check_looked_into(folder: Path) -> None:
    """Raises ConfigError, which says what is wrong with the path, unless it is a folder; EnvironmentFailure where
    rights, the disk or a link that leads back to itself keep one from looking into it."""
    try:
        os.stat(os.path.join(folder, "."))  # the right to list a folder is not the right to enter it
        os.scandir(folder).close()
    except OSError as error:
        linked = os.path.islink(folder)  # which raises nothing
        what = {
            errno.ENOENT: f"but a link to {os.readlink(folder)}, which is not there" if linked else "nothing is there",
            errno.ENOTDIR: "but a file, or lies below one",
            errno.ELOOP: "but a link that leads back to itself",
        }.get(error.errno or 0)
        if what is None:
            raise EnvironmentFailure(f"{folder} cannot be looked into: {error.strerror or error}") from error
        kind = EnvironmentFailure if error.errno == errno.ELOOP else ConfigError
        raise kind(f"{folder} is not a folder, {what}: give the folder of a run, e.g. runs/<run id>") from error


def check_free(folder: Path, resume: bool, name: str = "--run-id") -> None:
    """Raises ConfigError where there is a folder already and `resume` is not asked for. `name`: the option that names
    another one."""
    if folder.exists() and not resume:
        raise ConfigError(f"{folder} exists already: go on with --resume, or choose another {name}")


def check_same(
    folder: Path,
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    fixed: Callable[[str], bool] = lambda _: True,
    name: str = "--run-id",
) -> None:
    """Raises ConfigError where a setting (by dotted name) that is `fixed` has another value than before."""
    if changed := told_changes(before, now, fixed):
        raise ConfigError(f"{folder} was started with another configuration ({changed}): choose another {name}")


def told_changes(before: Mapping[str, Any], now: Mapping[str, Any], counts: Callable[[str], bool]) -> str:
    """The first settings that count and have another value than before; empty if there are none."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key) and counts(key)]
    return ", ".join(f"{key}: {before.get(key)!r} -> {now.get(key)!r}" for key in changed[:6])


def go_on(id: str) -> str:
    """How a comparison, a study or a night goes on."""
    return f"the same command with --id {id} --resume goes on"


@contextmanager
def failures_tell(id: str) -> Iterator[None]:
    """An EnvironmentFailure inside says how a comparison or a night goes on."""
    try:
        yield
    except EnvironmentFailure as error:
        raise type(error)(f"{error}: {go_on(id)}") from error
