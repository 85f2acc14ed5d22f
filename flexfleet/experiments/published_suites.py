"""Read suites, which reproduce tables and figures of papers with `flexfleet compare --suite fedaiot/aep`.

A suite is a YAML file in `suites/` with the fields of `PaperSuite`; docs/guides/suites.md has an example. Each row in
each case is a variant with the label ROW-CASE. Settings of a case override settings of the suite, and settings of a row
override settings of the case. A setting `ROW:a.b` in a case overrides the setting of the row. The value null removes an
inherited row or case. A file whose name begins with an underscore can only be used in `like`. The name of a smaller,
faster version of a suite ends in -small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from fl_engine.core.errors import ConfigError, masked, nearest
from fl_engine.core.records import Strict
from flexfleet.config import Config
from flexfleet.config.comparison_runs import (
    PlannedRun,
    accuracies_of,
    by_label,
    check_factors,
    entries_from,
    label_overrides,
    seeds_of,
)
from flexfleet.config.dotted import Overrides, on_top
from flexfleet.config.explain import config_error
from flexfleet.config.read import read_file

FOLDER = Path(__file__).with_name("suites")
LABEL = "central"
"""Label of the central trainings of a suite. Run IDs are `central-s0`, `central-s1` and so on."""
HEAD = ("shows", "cost", "lacks")
"""Fields that a suite does not inherit from the suites in `like`."""

_Row = dict[str, Any] | None
Suite = TypeVar("Suite", bound=BaseModel)


class PaperSuite(Strict):
    paper: str = ""
    """Authors, title, venue and year."""
    shows: str = ""
    """Table or figure of the paper, and the values that the suite reproduces."""
    cost: str = ""
    """Cost of all runs, and how the cost was measured."""
    lacks: str = ""
    """Rows and values of the table or figure that the suite does not reproduce."""
    like: Annotated[tuple[str, ...], BeforeValidator(lambda v: (v,) if isinstance(v, str) else v)] = ()
    """Suites from which settings are inherited. Later suites override earlier suites, and this suite overrides all."""
    seeds: tuple[int, ...] = ()
    settings: dict[str, Any] = Field(default={})
    """Settings of all rows, by dotted name."""
    rows: dict[str, dict[str, Any] | None] = Field(default={})
    """Map names to rows. Each row is a mapping with the key `algorithm` and settings by dotted name."""
    cases: dict[str, dict[str, Any] | None] = Field(default={})
    """Map each case to its settings. `a.b` is a setting of all rows, and `row:a.b` is a setting of one row."""
    to: Annotated[tuple[float, ...], AfterValidator(accuracies_of)] = ()
    """Target accuracies, from 0 to 1."""
    central: bool = False
    """True to also train centrally (`flexfleet central`) with each seed, as a reference."""

    def made(self) -> dict[str, tuple[str, str | None]]:
        """Map the label of each variant to its row and case. Raises ConfigError if a name is used twice."""
        rows = [label for label, row in self.rows.items() if row is not None]
        cases = [name for name, case in self.cases.items() if case is not None]
        if not cases:
            return {row: (row, None) for row in rows}
        made = [(row, case) for row in rows for case in cases]
        names = Counter([*(f"{row}-{case}" for row, case in made), *rows, *cases])
        if twice := [name for name, n in names.items() if n > 1]:
            raise ConfigError(f"the names of the suite's rows and cases must be unique, got twice: {', '.join(twice)}")
        return {f"{row}-{case}": (row, case) for row, case in made}


def names(folder: Path = FOLDER) -> list[str]:
    """Return the names of the built-in suites."""
    found = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.yaml"))
    return sorted(path.as_posix() for path in found if not path.name.startswith("_"))


def path_of(name: str, folder: Path = FOLDER) -> Path:
    """Return the path of a built-in suite or of a .yaml file. Raises ConfigError if the name is unknown."""
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    if name not in (known := names(folder)):
        raise ConfigError(
            f"no suite is named {name!r}{nearest(name, known)}. Choose a built-in suite or a .yaml file",
            code="config.unknown",
        )
    return folder / f"{name}.yaml"


def load(name: str) -> PaperSuite:
    """Read a built-in suite or a .yaml file. Raises ConfigError if the suite does not exist or is invalid."""
    path_of(name)
    suite = _read(name, ())
    if not suite.made() or not suite.seeds:
        raise ConfigError(f"the suite {name} must set {'rows' if suite.seeds else 'seeds'}", code="config.missing")
    return suite


def _read(name: str, before: tuple[str, ...]) -> PaperSuite:
    if name in before:
        raise ConfigError(f"the suite {before[0]} inherits from itself (`like`): {' -> '.join((*before, name))}")
    path = Path(name) if name.endswith((".yaml", ".yml")) else FOLDER / f"{name}.yaml"
    own = read_suite(path, PaperSuite)
    suite = PaperSuite()
    for base in own.like:
        suite = _on(suite, _read(base, (*before, name)))
    return _on(suite, own).model_copy(update={field: getattr(own, field) for field in HEAD})


def read_suite(path: Path, model: type[Suite]) -> Suite:
    """Read and validate the file of a suite. Raises ConfigError if the file is unreadable or invalid."""
    values = read_file(path)
    try:
        return model.model_validate(values)
    except (ValidationError, ConfigError) as error:
        wrong = error if isinstance(error, ConfigError) else config_error(error, values, model.model_fields)
        raise ConfigError(f"{path} is not a valid suite: {masked(str(wrong))}") from error


def _on(base: PaperSuite, own: PaperSuite) -> PaperSuite:
    """Return a copy of `base` in which the fields that `own` sets are replaced."""
    fields = {field: getattr(base, field) for field in base.model_fields_set}
    fields |= {field: getattr(own, field) for field in own.model_fields_set - {"like"}}
    fields |= {"settings": base.settings | own.settings}
    fields |= {"rows": _each_on(base.rows, own.rows), "cases": _each_on(base.cases, own.cases)}
    return PaperSuite(**fields)


def _each_on(base: Mapping[str, _Row], own: Mapping[str, _Row]) -> dict[str, _Row]:
    """Merge the entries of `own` into a copy of `base`. Entries of `base` come first, in the same order."""
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
) -> tuple[list[PlannedRun], list[PlannedRun]]:
    """Plan the runs of a suite, and one central training for each seed, with the settings that apply to all rows. The
    second list is empty if the suite has no central trainings, or if `only` excludes them. Raises ConfigError.

    Args:
        only: Comma-separated rows, cases or labels (ROW-CASE); None for all. The name `central` selects the reference.
        seeds: Comma-separated seeds that replace the suite's seeds; None to use the suite's seeds.
        overrides: Settings that override the suite. `a:training.lr` applies only to the row, the case or the variant a.
        factors: Passed to `entries_from`.
    """
    made, factors = suite.made(), factors or {}
    if suite.central and LABEL in made:
        raise ConfigError(f"a row of the suite must not have the name {LABEL}, which is reserved for the reference")
    wanted = list(made)
    if only is not None:
        wanted = [label for name in _named(only) if name != LABEL for label in _labels(name, made)]
        if not wanted:
            raise ConfigError(f"--algorithms must include at least one of {', '.join(made)}")
    given: Overrides = {}
    for key, value in overrides.items():
        name, colon, path = (word.strip() for word in key.partition(":"))
        labels = [label for label in _labels(name, made) if label in wanted] if colon else []
        if colon and not labels:
            raise ConfigError(f"{key} applies to {name!r}, but --algorithms does not include {name!r}", path=path)
        given |= {f"{label}:{path}": value for label in labels} if colon else {name: value}
    check_factors(factors, given)
    own, algorithms = dict[str, Overrides](), dict[str, str]()
    for label in wanted:
        row, case = made[label]
        in_case = by_label((suite.cases[case] or {}) if case else {}, suite.rows)
        own[label] = {**in_case[None], **(suite.rows[row] or {}), **in_case[row]}
        if not isinstance(algorithm := own[label].pop("algorithm", None), str):
            raise ConfigError(f"the row {row} of the suite must have an algorithm", code="config.missing")
        algorithms[label] = algorithm
    by_label({f"{label}:{path}": value for label, row in own.items() for path, value in row.items()}, algorithms)
    by_label(suite.settings, ())
    chosen = label_overrides(algorithms, given)
    merged = {label: on_top(on_top(suite.settings, own[label]), chosen[label]) for label in wanted}
    numbers = seeds_of(seeds) if seeds else suite.seeds
    runs = entries_from(merged, numbers, load, id, factors)
    if not suite.central or (only is not None and LABEL not in _named(only)):
        return runs, []
    common = on_top(suite.settings, {key: value for key, value in overrides.items() if ":" not in key})
    return runs, entries_from(label_overrides({LABEL: "all_large"}, common), numbers, load, id)


def _labels(name: str, made: Mapping[str, tuple[str, str | None]]) -> list[str]:
    """Return the labels of the variants that `name` selects. `name` is a row, a case or a label."""
    if found := [label for label, pair in made.items() if name == label or name in pair]:
        return found
    known = [*made, *(part for pair in made.values() for part in pair if part is not None)]
    raise ConfigError(f"the suite does not have {name!r}{nearest(name, dict.fromkeys(known))}", code="config.unknown")


def _named(only: str) -> list[str]:
    return [label.strip() for label in only.split(",")]
