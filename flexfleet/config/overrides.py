"""Overrides: values by the dotted name of their parameter, as functions pass them to each other.

Text becomes a value once, at an entry point: `parse_sets` reads `--set a.b=value`, `read_file` a YAML file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.fields import is_model
from fl_engine.core.text import comment_of, read_yaml

Overrides = dict[str, Any]
"""Values by dotted name: {"training.lr": 0.1, "algorithm": {"name": "fedavg"}}."""

POOLS, SPACE = "kubernetes.pools", "tune.space"
MAPPINGS = (POOLS, SPACE)
"""Parameters whose keys the user chooses. A later SPACE replaces an earlier one; later POOLS are merged by tier."""


# ------------------------------------------------------------------------------------------------- from text
def parse_sets(texts: Iterable[str]) -> Overrides:
    """Return the values of `a.b=value` texts; a later text replaces an earlier one. Raises ConfigError."""
    out: Overrides = {}
    for text in texts:
        path, value = pair_of(text)
        out = on_top(out, {path: value})
    return out


def pair_of(text: str) -> tuple[str, Any]:
    """Return the dotted name and the value of `a.b=value`. Raises ConfigError."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set takes a.b=value, got {masked(repr(text[:200]))}")
    try:
        read, comment = read_yaml(value), comment_of(value)
    except yaml.YAMLError as error:
        raise ConfigError(masked(f"--set {text[:200]!r}: the value is not valid YAML: {error}")) from error
    if comment:
        raise ConfigError(
            f"--set {masked(repr(key.strip()[:200]))}: YAML reads a comment from '#' on. Put the whole value in "
            "quotes, or leave the comment out"
        )
    return key.strip(), read


# ------------------------------------------------------------------------------------------------- combining
def check_once(given: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise ConfigError if a parameter is given twice, or a section and a parameter in it.

    Args:
        given: Pairs of how values are given (`--set`, `rounds=`), for the message, and the values by dotted name.
    """
    seen: dict[str, str] = {}
    for how, values in given:
        for path in values:
            for leaf in leaves({path: values[path]}):
                if twice := next((each for each in seen if meet(each, leaf)), None):
                    name = min(twice, leaf, key=len)
                    by = f"by {seen[twice]} and by {how}" if seen[twice] != how else f"by {how}"
                    raise ConfigError(f"{name} is given twice, {by}: leave one of them out")
                seen[leaf] = how


def on_top(below: Mapping[str, Any], above: Mapping[str, Any]) -> Overrides:
    """Return both. A parameter that `above` sets gets that value, however `below` spells it."""
    taken = leaves(above)
    out = dict(pair for path, value in below.items() for pair in giving_way(taken, path, value))
    for path, value in above.items():
        out[path] = merged(out.pop(path, None), value, path)
    return out


def giving_way(taken: Collection[str], path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is given at a dotted name without the parameters `taken`.

    A section falls into its parts, but a section with a `name` stays whole, so that another `name` drops its options.
    POOLS are never left out, because the pools that are taken are merged into them."""
    above = any(each.startswith(f"{path}.") for each in taken)
    if not isinstance(value, Mapping) or path in MAPPINGS:
        if path == POOLS or not (above or path in taken):
            yield path, value
    elif above and not ("name" in value and chosen_by_name(path)):
        for key, inner in value.items():
            yield from giving_way(taken, f"{path}.{key}", inner)
    else:
        yield path, value


def apply(values: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Set overrides in nested mappings. Names that decide which other parameters there are come first, from the outside
    to the inside. Raises ConfigError."""

    def place(pair: tuple[str, Any]) -> tuple[bool, int]:
        path, value = pair
        section, _, last = path.rpartition(".")
        if last == "name" and chosen_by_name(section):
            return False, section.count(".")
        if isinstance(value, Mapping) and "name" in value and chosen_by_name(path):
            return False, path.count(".")
        return True, 0

    for path, value in sorted(overrides.items(), key=place):
        set_path(values, path, value)


def set_path(values: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted name in nested mappings. A mapping is merged into the existing one; a new `name` drops the options
    of the old one. Raises ConfigError if a part of the path is a value."""
    *parents, last = path.split(".")
    here = values
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{path}: {part!r} is a value, not a section")
    if last == "name" and here.get("name") != value and chosen_by_name(".".join(parents)):
        here.clear()
    here[last] = merged(here.get(last), value, path)


def merged(standing: Any, given: Any, path: str = "") -> Any:
    """Return `standing` with `given` on top: a mapping keeps the parameters that are not given, unless its `name`
    chooses something else, whose parameters are others. SPACE is replaced as a whole."""
    if not isinstance(standing, Mapping) or not isinstance(given, Mapping) or path == SPACE:
        return given
    if "name" in given and given["name"] != standing.get("name") and chosen_by_name(path):
        return dict(given)
    inner = {
        key: merged(standing.get(key), value, f"{path}.{key}" if path else str(key)) for key, value in given.items()
    }
    return {**standing, **inner}


# ------------------------------------------------------------------------------------------------- dotted names
def leaves(values: Mapping[str, Any], prefix: str = "") -> Overrides:
    """Return the parameters that nested mappings set, by dotted name: those of a section, but MAPPINGS as a whole."""
    out: Overrides = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        out |= leaves(value, f"{path}.") if isinstance(value, Mapping) and path not in MAPPINGS else {path: value}
    return out


def meet(one: str, other: str) -> bool:
    """Whether two dotted names are equal, or one is inside the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def chosen_by_name(path: str) -> bool:
    """Whether the `name` of the mapping at this dotted name decides which other parameters it has: true of a model, an
    algorithm, a codec and of what they and `training` name, false of a plain section (`dataset`) and inside MAPPINGS,
    where `name` is a key of the user's choice."""
    from fl_engine.algorithms.training import Training  # here, so that the command line starts without torch
    from flexfleet.config.schema import Config

    if any(meet(path, each) for each in MAPPINGS):
        return False
    here: Any = Config
    for part in path.split(".") if path else ():
        if not is_model(here):
            return True
        field = here.model_fields.get(part)
        here = None if field is None else field.annotation
    return not (is_model(here) or here is Training)
