"""Store the user's own code (`run.code`) as a wheel in the run's folder, and record the wheel's sha256 in run.json."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.allowed import check_wheel
from fl_engine.core.errors import ConfigError
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from flexfleet.config import Config
from flexfleet.config.sources import named, sources
from flexfleet.files.artifacts import RunFile


def wheel_of(config: Config) -> bytes | None:
    """Return the contents of the wheel from which this process imports the user's code. Return None if `run.code` is
    not set. Raises ConfigError if the files have changed since the configuration was read."""
    if config.run.code is None:
        return None
    wheel = code.pack(Path(config.run.code))
    if not code.enabled(sha256(wheel)):
        raise ConfigError(f"run.code = {config.run.code} has changed since it was imported. Start the command again")
    return wheel


def sha256_of(config: Config) -> str | None:
    """Return the sha256 of the wheel. Return None if `run.code` is not set."""
    wheel = wheel_of(config)
    return None if wheel is None else sha256(wheel)


def digests(config: Config, sections: Collection[str]) -> dict[str, Any]:
    """Return digests of the user's own code in the given sections of the configuration; {} if there is none."""
    found = sources(config, sections)
    packed = set(named(config, sections)) - found.keys()  # the others are in the wheel, which has a single sha256
    return ({"sources": found} if found else {}) | ({"own code": sha256_of(config)} if packed else {})


def check_sources(before: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    """Raise ConfigError if the source code of an object in the configuration has changed (`config.sources`)."""
    for name in before.keys() & now.keys():
        if before[name] != now[name]:
            raise ConfigError(f"{out} was started with other code for {name}. Undo the change, or start another run")


def enable(run: RunFile, folder: Path) -> None:
    """If the run's folder contains a wheel, add the wheel to the import path. Raises IntegrityError if the wheel is
    damaged, and ConfigError if this process must not import the wheel (`core.allowed`)."""
    if run.code_sha256 is not None:
        check_wheel(run.code_sha256)
        code.enable_file(str(folder / code.store_key(run.code_sha256)), run.code_sha256)


def stored(run: RunFile) -> dict[str, Any]:
    """Return the recorded configuration without `run.code`, because this path may not exist on this machine."""
    section = run.config.get("run")
    return run.config | ({"run": {**section, "code": None}} if isinstance(section, dict) else {})
