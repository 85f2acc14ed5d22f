"""Factors of a comparison: parameters of which every label is made with every combination of values.

`flexfl` over training.lr = 0.01, 0.1 becomes the labels `flexfl-lr0.01` and `flexfl-lr0.1`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import yaml

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.plain import read_yaml
from flexfleet.config.explain import quoted


def factors_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """`training.lr=0.01,0.1` to {"training.lr": [0.01, 0.1]}. Commas part the values, each of which is YAML. Raises
    ConfigError."""
    out: dict[str, list[Any]] = {}
    for text in texts:
        path, sign, listed = (word.strip() for word in text.partition("="))
        if not sign or not path or not listed:
            raise ConfigError(f"--over takes a.b=value,value, e.g. training.lr=0.01,0.1, got {quoted(text)}")
        if path in out:
            raise ConfigError(f"--over {path}: given twice, give all of its values at once")
        try:
            out[path] = read_yaml(f"[{listed}]")
        except yaml.YAMLError as error:
            said = masked(f"--over {text[:200]}: the values are not valid YAML: {error}")
            raise ConfigError(said) from error
    return out


def crossed(labels: Iterable[str], factors: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each label with each combination of the factors' values: by the new label, the old one and the values by dotted
    name. Without factors the labels stay what they are. Raises ConfigError."""
    for path, values in factors.items():
        if ":" in path:
            raise ConfigError(f"over: a factor is one of all labels, expected a dotted name, got {path!r}")
        if isinstance(values, str | Mapping) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"over: a list of values is expected for {path}, got {quoted(values)}")
        if any(isinstance(value, Mapping) for value in values):
            raise ConfigError(f"over: {path} is a section: vary its parameters, {path}.<name>")
    names = _short(factors)
    out: dict[str, tuple[str, dict[str, Any]]] = {}
    for label in labels:
        for values in product(*factors.values()):
            at = dict(zip(factors, values, strict=True))
            name = "-".join([label, *(f"{names[path]}{_word(value)}" for path, value in at.items())])
            if name in out:
                raise ConfigError(
                    f"over: two combinations of values would both be called {name}: leave one out, or give them as "
                    "labels of their own"
                )
            out[name] = (label, at)
    return out


def _short(paths: Iterable[str]) -> dict[str, str]:
    """The last part of each dotted name, or as many of its last parts as tell it from the others."""
    out: dict[str, str] = {}
    all_parts = {path: path.split(".") for path in paths}
    for path, parts in all_parts.items():
        others = [other for name, other in all_parts.items() if name != path]
        n = next((n for n in range(1, len(parts)) if all(parts[-n:] != each[-n:] for each in others)), len(parts))
        out[path] = ".".join(parts[-n:])
    return out


def _word(value: Any) -> str:
    """A value as a part of a label, which becomes a folder's name."""
    if isinstance(value, str):
        value = value.rpartition(":")[2]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value).replace("+", "")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", json.dumps(value)).strip("-")
