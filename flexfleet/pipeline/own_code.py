"""The user's own code (`run.code`) of a run: its wheel is stored in the run's folder, and run.json has the sha256."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.allowed import check_wheel
from fl_engine.core.errors import ConfigError
from fl_engine.storage import code
from fl_engine.storage.code import Wheel
from flexfleet.config import Config
from flexfleet.config.sources import named, sources
from flexfleet.files.artifacts import RunFile


def wheel_of(config: Config) -> Wheel | None:
    """The wheel that this process imports from; None without `run.code`. Raises ConfigError if the files have changed
    since the configuration was read."""
    if config.run.code is None:
        return None
    wheel = code.pack(Path(config.run.code))
    if not code.enabled(wheel.sha256):
        raise ConfigError(f"run.code = {config.run.code} has changed since it was imported: start again")
    return wheel


def sha256_of(config: Config) -> str | None:
    """The sha256 of `wheel_of`."""
    wheel = wheel_of(config)
    return None if wheel is None else wheel.sha256


def digests(config: Config, sections: Collection[str]) -> dict[str, Any]:
    """Digests of the user's own code that these sections name; empty if they name none."""
    found = sources(config, sections)
    packed = set(named(config, sections)) - found.keys()  # in the wheel, which has one sha256 for all
    return ({"sources": found} if found else {}) | ({"own code": sha256_of(config)} if packed else {})


def check_same(before: str | None, config: Config, out: Path) -> None:
    """Raise ConfigError unless a run continues with the wheel that it was started with, whose sha256 is `before`."""
    now = sha256_of(config)
    if before != now:
        said, here = (f"the code {sha[:12]}" if sha else "no code of its own" for sha in (before, now))
        raise ConfigError(
            f"run.code = {config.run.code} is {here} now, but {out} was started with {said}. Restore its files, or "
            "choose another --run-id"
        )


def check_sources(before: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    """Raise ConfigError if the source of something that a configuration names (`config.sources`) has changed."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise ConfigError(f"{out} was started with another source of {name}: undo the change, or start another run")


def enable(run: RunFile, folder: Path) -> None:
    """Import from the wheel in a run's folder, if it has one. Raises IntegrityError if the wheel is damaged,
    ClientError or ConfigError if this machine does not allow it (`core.allowed`)."""
    if run.code_sha256 is not None:
        check_wheel(run.code_sha256, stored=True)
        code.enable_file(str(folder / code.store_key(run.code_sha256)), run.code_sha256)


def stored(run: RunFile) -> dict[str, Any]:
    """The configuration in a run's record, without the place of its code on the machine that started it."""
    section = run.config.get("run")
    return run.config | ({"run": {**section, "code": None}} if isinstance(section, dict) else {})
