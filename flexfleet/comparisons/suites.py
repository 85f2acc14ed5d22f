"""Published comparisons: `flexfleet compare --suite fedaiot/aep` makes the rows of a paper's table.

A suite is a YAML file in `suites/`:

    like: fedaiot/common        another suite, whose settings and rows apply too unless given here
    seeds: [0, 1, 2]
    settings: {a.b: value}      for all rows, on top of the defaults
    rows:
      fedavg-low: {algorithm: all_large, partition.alpha: 0.5}    null: leave out this row of `like`
    central: true               also `flexfleet central` with each seed, as the reference

A file whose name begins with an underscore is not a suite itself, only for `like` of others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_engine.core.errors import ConfigError, brief, nearest
from fl_engine.core.plain import read_yaml
from flexfleet.comparisons.reference import LABEL
from flexfleet.config import Config
from flexfleet.config.entries import Entry, entries_for
from flexfleet.config.factors import factors_of

FOLDER = Path(str(resources.files("flexfleet.comparisons").joinpath("suites")))


class Suite(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    like: str | None = None
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = {}
    """The settings of all rows, by dotted name."""
    rows: dict[str, dict[str, Any] | None] = Field(default={})
    """The rows by label: `algorithm`, and the row's own settings by dotted name."""
    central: bool = False


def names() -> list[str]:
    """The names of the suites that come with flexfleet."""
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.yaml"))
    return sorted(path.as_posix() for path in found if not path.name.startswith("_"))


def load(name: str) -> Suite:
    """A suite by its name, or from a file with .yaml. Raises ConfigError if it does not exist or is invalid."""
    if not name.endswith((".yaml", ".yml")) and name not in names():
        raise ConfigError(f"no suite is named {name!r}{nearest(name, names())}; or give a file with .yaml")
    suite = _read(name, ())
    if not suite.rows or not suite.seeds:
        raise ConfigError(f"the suite {name} lacks {'rows' if suite.seeds else 'seeds'}")
    return suite


def _read(name: str, before: tuple[str, ...]) -> Suite:
    if name in before:
        raise ConfigError(f"the suite {before[0]} is like itself: {' -> '.join((*before, name))}")
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        own = Suite.model_validate(read_yaml(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read the suite {path}: {error.strerror}") from error
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        said = brief(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path} is no suite: {said}") from error
    if own.like is None:
        return own
    base = _read(own.like, (*before, name))
    rows: dict[str, dict[str, Any] | None] = {
        label: {**(base.rows.get(label) or {}), **row} for label, row in own.rows.items() if row is not None
    }
    kept = {label: row for label, row in base.rows.items() if label not in own.rows}
    return Suite(
        seeds=own.seeds or base.seeds,
        settings=base.settings | own.settings,
        rows=kept | rows,
        central=own.central if "central" in own.model_fields_set else base.central,
    )


def entries_of(
    suite: Suite,
    only: str | None,
    seeds: str | None,
    sets: Sequence[str],
    load: Callable[[list[str]], Config],
    id: str,
    over: Sequence[str] = (),
) -> list[Entry]:
    """All runs of the suite, or of the rows named in `only` (`a,b`; `central` is the reference). `sets` and `seeds`
    replace what the suite says, and so do the factors `over` (`a.b=value,value`). Raises ConfigError."""
    rows = {label: row for label, row in suite.rows.items() if row is not None}
    if suite.central and LABEL in rows:
        raise ConfigError(f"the suite's row {LABEL} has the name of its reference: give it another, or central: false")
    wanted = list(rows) if only is None else [label for label in _named(only) if label != LABEL]
    if not wanted:
        raise ConfigError(f"--algorithms: name a row beside the reference, of {', '.join(rows)}")
    for label in wanted:
        if label not in rows:
            raise ConfigError(f"--algorithms: the suite has no row {label!r}{nearest(label, list(rows))}")
    factors = factors_of(over)
    given = [f"{path}={json.dumps(value)}" for path, value in suite.settings.items() if path not in factors]
    algorithms = []
    for label in wanted:
        own = dict(rows[label])
        if not isinstance(name := own.pop("algorithm", None), str):
            raise ConfigError(f"the suite's row {label} names no algorithm")
        algorithms.append(f"{label}={name}")
        given += [f"{label}:{path}={json.dumps(value)}" for path, value in own.items() if path not in factors]
    listed = seeds or ",".join(map(str, suite.seeds))
    return entries_for(",".join(algorithms), listed, [*given, *sets], load, id, over)


def central_of(
    suite: Suite, only: str | None, seeds: str | None, sets: Sequence[str], load: Callable[[list[str]], Config], id: str
) -> list[Entry]:
    """The central trainings of the suite, one for each seed, with the settings that all rows have in common; none where
    `only` leaves them out."""
    if not suite.central or (only is not None and LABEL not in _named(only)):
        return []
    given = [f"{path}={json.dumps(value)}" for path, value in suite.settings.items()]
    common = [text for text in sets if ":" not in text.partition("=")[0]]
    return entries_for(f"{LABEL}=all_large", seeds or ",".join(map(str, suite.seeds)), [*given, *common], load, id)


def _named(only: str) -> list[str]:
    return [label.strip() for label in only.split(",")]
