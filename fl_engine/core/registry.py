"""Things by their names: registered ones, and one's own as `package.module:NAME`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, TypeVar

from fl_engine.core.errors import ConfigError, nearest

T = TypeVar("T")


def resolve(registry: Mapping[str, T], name: str, what: str) -> T:
    """A registered thing, or the object that `package.module:NAME` points to."""
    if name in registry:
        return registry[name]
    module, sign, attribute = name.partition(":")
    if not sign:
        hint = nearest(name, registry)
        raise ConfigError(f"no {what} named {name!r}{hint}; your own is given as package.module:NAME")
    if os.getcwd() not in sys.path:  # a module of one's own lies where the command is typed
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    except Exception as error:  # of somebody else's code
        raise ConfigError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def kind_of(registry: Mapping[str, T], section: Mapping[str, Any], what: str, wanted: Sequence[str]) -> T:
    """What a section names. Raises ConfigError unless it has what is asked of it."""
    kind = resolve(registry, name_in(section, what), what)
    if not (isinstance(kind, type) and is_dataclass(kind) and all(hasattr(kind, name) for name in wanted)):
        raise ConfigError(
            f"{what}.name = {section['name']!r} is {kind!r}; a dataclass is expected, with the options as its fields "
            f"and with {', '.join(wanted)}"
        )
    return kind


def name_in(section: Mapping[str, Any], what: str) -> str:
    name = section.get("name")
    if not isinstance(name, str):
        raise ConfigError(f"{what}.name is missing: name one, e.g. {what}: {{name: ...}}")
    return name


def check_names(section: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown parameter {f'{section}.{key}'!r}{nearest(key, known)}")
