"""Published comparisons: `flexfleet compare --suite fedaiot/aep` makes the rows of a paper's table.

A suite is a YAML file in `suites/`:

    paper: who, what, where     the head: what `flexfleet compare --suites` prints. The suites that come with flexfleet
    shows: Table II, avg, full  have paper, shows and cost; a small one, which is named like its large one with -small
    cost: hours, and of what    behind, says also what it lacks
    lacks: what it cannot show
    small: fedrolex/table3.2-small    the small twin of a suite that has none of its own

    like: fedaiot/_common       another suite, or several, of which later ones win: all that they say applies too unless
                                given here, but of their heads only the paper
    seeds: [0, 1, 2]
    settings: {a.b: value}      for all rows, on top of the defaults
    rows:
      fedavg-low: {algorithm: all_large, partition.alpha: 0.5}    null: leave out this row of `like`
    cases:                      every row is made in each case, as ROW-CASE: fedavg-low-iid; null as for rows
      iid: {partition.rule: iid, fedavg-low:training.lr: 0.1}     ROW:a.b is for that row alone, as --set has it
    to: [0.4, 0.45]             the accuracies to reach, as --to has them
    central: true               also `flexfleet central` with each seed, as the reference

A case's settings take the place of the suite's, a row's take the place of the case's, and `ROW:a.b` of the case that of
the row's. A file whose name begins with an underscore is not a suite itself, only for `like` of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fl_engine.core.errors import ConfigError, masked, nearest
from fl_engine.core.text import read_yaml
from flexfleet.config import Config
from flexfleet.config.comparison_runs import (
    Entry,
    by_label,
    check_factors,
    checked_accuracies,
    entries_from,
    label_overrides,
    seeds_of,
)
from flexfleet.config.explain import explain
from flexfleet.config.overrides import Overrides, on_top
from flexfleet.experiments.central_reference import LABEL

FOLDER = Path(str(resources.files("flexfleet.experiments").joinpath("suites")))
_Row = dict[str, Any] | None


SMALL = "-small"
"""What the name of a small twin has behind that of its suite."""
HEAD = ("shows", "cost", "lacks", "small")
"""What a suite says of itself alone."""


class PaperSuite(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    paper: str = ""
    """Authors, title, where and when."""
    shows: str = ""
    """The table or figure, and what of it."""
    cost: str = ""
    """What all of its runs take, and where that is from."""
    lacks: str = ""
    """What it cannot show."""
    small: str = ""
    """The small twin, where no suite has this one's name with -small behind it."""
    like: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = {}
    """The settings of all rows, by dotted name."""
    rows: dict[str, dict[str, Any] | None] = Field(default={})
    """The rows by label: `algorithm`, and the row's own settings by dotted name."""
    cases: dict[str, dict[str, Any] | None] = Field(default={})
    """By name, the settings of all rows in this case, by dotted name, and those of one row, `row:a.b`."""
    to: tuple[float, ...] = ()
    """Accuracies to reach, as shares."""
    central: bool = False

    @field_validator("like", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("to")
    @classmethod
    def _shares(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        return checked_accuracies(value)

    def made(self) -> dict[str, tuple[str, str | None]]:
        """The row and the case of each label. Raises ConfigError for two labels, rows and cases of the same name."""
        rows = [label for label, row in self.rows.items() if row is not None]
        cases = [name for name, case in self.cases.items() if case is not None]
        if not cases:
            return {row: (row, None) for row in rows}
        made = [(row, case) for row in rows for case in cases]
        names = Counter([*(f"{row}-{case}" for row, case in made), *rows, *cases])
        if twice := [name for name, n in names.items() if n > 1]:
            raise ConfigError(f"the suite has more than one row or case of the name {', '.join(twice)}: rename one")
        return {f"{row}-{case}": (row, case) for row, case in made}


@dataclass(frozen=True)
class Listed:
    """A suite that comes with flexfleet, as `flexfleet compare --suites` lists it."""

    name: str
    paper: str
    shows: str
    cost: str
    lacks: str
    small: str | None
    """The name of its small twin."""


def names() -> list[str]:
    """The names of the suites that come with flexfleet."""
    found = (path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.yaml"))
    return sorted(path.as_posix() for path in found if not path.name.startswith("_"))


def listed() -> list[Listed]:
    """The suites that come with flexfleet, with their heads."""
    out, known = [], names()
    for name in known:
        suite, small = load(name), f"{name}{SMALL}"
        small_one = small if small in known else suite.small or None
        out.append(Listed(name, suite.paper, suite.shows, suite.cost, suite.lacks, small_one))
    return out


def load(name: str) -> PaperSuite:
    """A suite by its name, or from a file with .yaml. Raises ConfigError if it does not exist or is invalid."""
    if not name.endswith((".yaml", ".yml")) and name not in names():
        raise ConfigError(f"no suite is named {name!r}{nearest(name, names())}; or give a file with .yaml")
    suite = _read(name, ())
    if not suite.made() or not suite.seeds:
        raise ConfigError(f"the suite {name} lacks {'rows' if suite.seeds else 'seeds'}")
    return suite


def _read(name: str, before: tuple[str, ...]) -> PaperSuite:
    if name in before:
        raise ConfigError(f"the suite {before[0]} is like itself: {' -> '.join((*before, name))}")
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    try:
        own = PaperSuite.model_validate(read_yaml(path.read_text("utf-8")) or {})
    except OSError as error:
        raise ConfigError(f"cannot read the suite {path}: {error.strerror}") from error
    except (ValidationError, yaml.YAMLError, UnicodeDecodeError) as error:
        said = explain(error, PaperSuite) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"{path} is no suite: {masked(said)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is no suite: {error}") from error
    whole = PaperSuite()
    for base in own.like:
        whole = _on(whole, _read(base, (*before, name)))
    return _on(whole, own).model_copy(update={field: getattr(own, field) for field in HEAD})


def _on(base: PaperSuite, own: PaperSuite) -> PaperSuite:
    """The base with what the other says."""
    said = {field: getattr(own, field) for field in own.model_fields_set - {"like"}}
    return PaperSuite(**{field: getattr(base, field) for field in base.model_fields_set} | said | {
        "settings": base.settings | own.settings,
        "rows": _each_on(base.rows, own.rows),
        "cases": _each_on(base.cases, own.cases),
    })  # fmt: skip


def _each_on(base: Mapping[str, _Row], own: Mapping[str, _Row]) -> dict[str, _Row]:
    """The base's entries in their order, then the other's new ones; where both have an entry, the other's is put on
    top."""
    changed = {label: None if row is None else {**(base.get(label) or {}), **row} for label, row in own.items()}
    return {**base, **changed}


def entries_of(
    suite: PaperSuite,
    only: str | None,
    seeds: str | None,
    overrides: Overrides,
    load: Callable[[Overrides], Config],
    id: str,
    factors: Mapping[str, Sequence[Any]] | None = None,
) -> list[Entry]:
    """All runs of the suite, or of what is named in `only` (`a,b`: rows, cases, or a row in a case; `central` is the
    reference). `overrides`, which may be for one of these too (`a:training.lr`), and `seeds` replace what the suite
    says, and so do the factors. Raises ConfigError."""
    made = suite.made()
    if suite.central and LABEL in made:
        raise ConfigError(f"the suite's row {LABEL} has the name of its reference: give it another, or central: false")
    wanted = made
    if only is not None:
        asked = [name for name in _named(only) if name != LABEL]
        if not asked:
            raise ConfigError(f"--algorithms: name a row beside the reference, of {', '.join(made)}")
        wanted = {label: made[label] for name in asked for label in _labels(name, made, "--algorithms: the suite has")}
    given: Overrides = {}
    for key, value in overrides.items():
        label, colon, path = (word.strip() for word in key.partition(":"))
        told = [one for one in _labels(label, made, f"{key}: the suite has") if one in wanted] if colon else []
        if colon and not told:
            raise ConfigError(f"{key}: no row of this comparison is of {label!r}, --algorithms leaves it out")
        given |= {f"{one}:{path}": value for one in told} if colon else {label: value}
    factors = factors or {}
    check_factors(factors, given)
    own, names = dict[str, Overrides](), dict[str, str]()
    for label, (row, case) in wanted.items():
        own[label] = _row_in(suite, row, case)
        if not isinstance(name := own[label].pop("algorithm", None), str):
            raise ConfigError(f"the suite's row {row} names no algorithm")
        names[label] = name
    by_label({f"{label}:{path}": value for label, row in own.items() for path, value in row.items()}, names)
    by_label(suite.settings, ())
    chosen = label_overrides(names, given)
    labels = {label: on_top(on_top(suite.settings, own[label]), chosen[label]) for label in wanted}
    return entries_from(labels, seeds_of(seeds) if seeds else suite.seeds, load, id, factors)


def _row_in(suite: PaperSuite, row: str, case: str | None) -> dict[str, Any]:
    """The row's algorithm and settings in this case. Raises ConfigError for a row that is not there."""
    of_case = {} if case is None else suite.cases[case] or {}
    common = {path: value for path, value in of_case.items() if ":" not in path}
    special = {}
    for key, value in of_case.items():
        of, colon, path = key.partition(":")
        if colon and of not in suite.rows:
            raise ConfigError(f"the suite's case {case} has {key}, but no row {of!r}{nearest(of, list(suite.rows))}")
        if colon and of == row:
            special[path.strip()] = value
    return {**common, **(suite.rows[row] or {}), **special}


def _labels(name: str, made: Mapping[str, tuple[str, str | None]], said: str) -> list[str]:
    """The labels of a row, of a case, or of a row in a case."""
    if name in made:
        return [name]
    if found := [label for label, of in made.items() if name in of]:
        return found
    known = dict.fromkeys([*made, *(one for of in made.values() for one in of if one is not None)])
    raise ConfigError(f"{said} no row {name!r}{nearest(name, list(known))}")


def central_of(
    suite: PaperSuite,
    only: str | None,
    seeds: str | None,
    overrides: Overrides,
    load: Callable[[Overrides], Config],
    id: str,
) -> list[Entry]:
    """The central trainings of the suite, one for each seed, with the settings that all rows have in common; none where
    `only` leaves them out."""
    if not suite.central or (only is not None and LABEL not in _named(only)):
        return []
    common = on_top(suite.settings, {key: value for key, value in overrides.items() if ":" not in key})
    labels = label_overrides({LABEL: "all_large"}, common)
    return entries_from(labels, seeds_of(seeds) if seeds else suite.seeds, load, id)


def _named(only: str) -> list[str]:
    return [label.strip() for label in only.split(",")]
