"""Where the rows of a comparison differ, beside what each of them is: the options that several rows have, with
different values. An option that is equal in all rows that have it is left out, and so is one that a single row has.

The options are those of the configuration and the algorithm's own, its defaults included: nothing is listed here by
name but what tells rows apart anyway. A row's `training` is what its algorithm trains by (FedSGD makes it one step),
and its `algorithm.selection` is the one that it selects by, where its own field is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from fl_engine.core.allowed import OURS
from fl_engine.core.contracts import Algorithm
from fl_engine.core.fields import Moves
from fl_engine.core.types import Pool
from flexfleet.config import Config, algorithm, flatten, moves
from flexfleet.reports.report import NONE, plain

IDENTITY = ("algorithm.name", "seed", "schema_version")
"""What a row is, or what runs of a label differ in."""
NOWHERE = (Moves.PLACE, Moves.EXECUTION)
"""What changes no figure."""
TITLE = "Where the rows differ, beside the algorithm"

Differences = dict[str, dict[str, Any]]
"""By an option's dotted name, its value in each label that has it."""


def differences(configs: Mapping[str, Config], pools: Mapping[str, Pool]) -> Differences:
    """`configs`: of each label; `pools`: the models of each label's run. Raises ConfigError."""
    options = {label: options_of(config, algorithm(config), pools[label]) for label, config in configs.items()}
    found: Differences = {}
    for name in dict.fromkeys(name for each in options.values() for name in each):
        values = {label: each[name] for label, each in options.items() if name in each}
        if len({plain(value) for value in values.values()}) > 1:
            found[name] = values
    return found


def options_of(config: Config, method: Algorithm, pool: Pool) -> dict[str, Any]:
    """By dotted name. What is chosen by name is one value: the name, or a mapping with the options that are not its
    defaults."""
    own: dict[str, Any] = {}
    for field in fields(method):  # type: ignore[arg-type]
        value = getattr(method, field.name)
        if field.name == "training":
            own |= {f"training.{each.name}": _value(getattr(value, each.name)) for each in fields(value)}
        else:
            own[f"algorithm.{field.name}"] = _value(value)
    if own.get("algorithm.selection", NONE) is None and hasattr(method, "selector"):
        own["algorithm.selection"] = _value(method.selector(pool))
    kept = {
        key: value
        for key, value in flatten(config).items()
        if not key.startswith("algorithm.") and not any(key.startswith(f"{whole}.") for whole in own)
    }
    return {key: value for key, value in (kept | own).items() if key not in IDENTITY and moves(key) not in NOWHERE}


def _value(value: Any) -> Any:
    """The value in a form that JSON can hold."""
    if is_dataclass(value):
        told = {each.name: _value(getattr(value, each.name)) for each in fields(value)}
        if (name := told.get("name") if _is_ours(value) else _own_name(value)) is None:
            return told
        given = {each.name: told[each.name] for each in fields(value) if _is_given(each, value)}
        return {"name": name, **given} if given else name
    if isinstance(value, Mapping):
        return {str(key): _value(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_value(inner) for inner in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _is_ours(value: object) -> bool:
    return type(value).__module__.partition(".")[0] in OURS


def _own_name(value: object) -> str:
    """The name of somebody's own class, as a configuration has it. (A class that extends one of ours has our name among
    its options.)"""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _is_given(field: Field[Any], value: Any) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return field.name != "name" and getattr(value, field.name) != default


def as_rows(found: Differences, labels: Sequence[str]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """A table's head and rows: an option in each row, a label in each column."""
    rows = (
        (name, *(shown(values[label]) if label in values else NONE for label in labels))
        for name, values in found.items()
    )
    return ("option", *labels), tuple(rows)


def shown(value: Any) -> str:
    """`oort, clip 0.9` for what is chosen by name, else JSON without the quotes of a word."""
    if isinstance(value, dict) and "name" in value:
        return ", ".join([value["name"], *(f"{key} {plain(each)}" for key, each in value.items() if key != "name")])
    return plain(value)
