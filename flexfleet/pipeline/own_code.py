"""One's own code (`run.code`) and the record of a run: the wheel lies in the run's folder, run.json has its sha256."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.allowed import check_wheel
from fl_engine.core.errors import ConfigError, holds_password, masked
from fl_engine.storage import code
from fl_engine.storage.code import Wheel
from flexfleet.config import Config
from flexfleet.config.sources import named, sources
from flexfleet.files.artifacts import RunFile


def wheel_of(config: Config) -> Wheel | None:
    """The wheel that this process imports from; None: the configuration names no code. Raises ConfigError where the
    files have changed since the configuration was read."""
    if config.run.code is None:
        return None
    wheel = code.pack(Path(config.run.code))
    if not code.enabled(wheel.sha256):
        raise ConfigError(f"run.code = {config.run.code} has changed since it was imported: start again")
    return wheel


def sha256_of(config: Config) -> str | None:
    """The sha256 of the wheel; None: the configuration names no code. Raises what `wheel_of` raises."""
    wheel = wheel_of(config)
    return None if wheel is None else wheel.sha256


def digests(config: Config, sections: Collection[str]) -> dict[str, Any]:
    """Digests of the code of one's own that these sections name, for the inputs of what is computed with it and kept;
    empty where they name none. Raises what `sources` and `wheel_of` raise."""
    found = sources(config, sections)
    packed = set(named(config, sections)) - found.keys()  # in the wheel, which has one sha256 for all
    return ({"sources": found} if found else {}) | ({"own code": sha256_of(config)} if packed else {})


def check_same(before: str | None, config: Config, out: Path) -> None:
    """Raises ConfigError unless a run goes on with the code that it was started with; `before`: its sha256."""
    now = sha256_of(config)
    if before != now:
        said, here = (f"the code {sha[:12]}" if sha else "no code of its own" for sha in (before, now))
        raise ConfigError(
            f"{out} was started with {said}, and run.code = {config.run.code} is {here} now: restore its files, or "
            "choose another --run-id"
        )


def check_sources(before: Mapping[str, str], now: Mapping[str, str], out: Path) -> None:
    """Raises ConfigError where the source of what a configuration names (`config.sources`) has changed."""
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
    """The `recorded` configuration, without the place of the run's code on the machine that started it."""
    out, section = recorded(run), run.config.get("run")
    return out | {"run": {**section, "code": None}} if isinstance(section, dict) else out


def recorded(run: RunFile) -> dict[str, Any]:
    """The configuration in a run's record, without the password that an earlier version let stand in dataset.root."""
    data = run.config.get("dataset")
    if isinstance(data, dict) and isinstance(data.get("root"), str) and holds_password(data["root"]):
        return run.config | {"dataset": {**data, "root": masked(data["root"])}}
    return run.config
