"""Compute digests of the user's code that a configuration uses, so that a run is only resumed with unchanged code."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.allowed import LOCAL, NAME
from fl_engine.core.registry import resolve
from fl_engine.datasets import stored_data
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from flexfleet.config.local_code import names_in
from flexfleet.config.schema import Config

MAIN = "__main__"
KEYS = ("name", "objective", "optimizer")
"""Names of parameters whose value can be the name of the user's own code."""


def named(config: Config, sections: Collection[str] | None = None) -> tuple[str, ...]:
    """Return all values `package.module:Name` in the given sections of a configuration (None for all sections)."""
    values = config.model_dump(mode="json")
    chosen = values if sections is None else {section: values[section] for section in sections}
    return tuple(dict.fromkeys(_names(chosen)))


def _names(value: Any, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _names(each, name)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _names(each, key)
    elif key in KEYS and isinstance(value, str) and NAME.fullmatch(value) and not stored_data.is_stored(value):
        yield value


def cells(config: Config) -> list[str]:
    """Return the names of objects from a notebook, script or function. Other processes cannot import these objects."""
    return [name for name in named(config) if name.startswith((f"{MAIN}:", f"{LOCAL}:"))]


def sources(config: Config, sections: Collection[str] | None = None) -> dict[str, str]:
    """Map each name of the user's code to the sha256 of its source. Raises ConfigError if an import fails.

    The source is the module's whole file. For an object in a notebook or script, the source is the code of the object
    and of the functions and classes that it uses. The package in `run.code` is omitted, because it has its own sha256.
    """
    package = None if config.run.code is None else code.name_of(Path(config.run.code))
    return {name: _digest(name) for name in named(config, sections) if name.partition(":")[0].split(".")[0] != package}


def _digest(name: str) -> str:
    module_name = name.partition(":")[0]
    value: Any = resolve({}, name, "code of one's own")
    if module_name == LOCAL:  # The name already contains a digest of the code.
        return sha256(name.encode())
    file = getattr(sys.modules[module_name], "__file__", None)
    if module_name != MAIN and file is not None and Path(file).is_file():
        return sha256(Path(file).read_bytes())
    return sha256("\n".join(map(_source, _used_by(value))).encode())


def _used_by(value: Any) -> list[Any]:
    """Return the class or function, its base classes, and all classes and functions that it uses from its module."""
    found, left = dict[str, Any](), [value]
    while left:
        each = left.pop()
        if not isinstance(each, type | types.FunctionType):
            each = type(each)
        if each.__module__ != value.__module__ or each.__qualname__ in found:
            continue
        found[each.__qualname__] = each
        known = vars(sys.modules[each.__module__])
        names = [name for function in _functions(each) for name in names_in(function.__code__)]
        if isinstance(each, type):
            names += [getattr(member, "__qualname__", "") for member in vars(each).values()]
            left.extend(each.__mro__[1:])
        left.extend(known[name] for name in names if isinstance(known.get(name), type | types.FunctionType))
    return [found[name] for name in sorted(found)]


def _functions(value: Any) -> list[types.FunctionType]:
    """Return the functions in `value`: the function itself, or all methods and property functions of a class."""
    members = [vars(value)[name] for name in sorted(vars(value))] if isinstance(value, type) else [value]
    inner = [getattr(each, "__func__", getattr(each, "fget", each)) for each in members]
    return [each for each in inner if isinstance(each, types.FunctionType)]


def _source(value: type | types.FunctionType) -> str:
    """Return the source code of a function. For a class, return its bases, functions and plain attributes, because
    Python cannot find the source code of a whole class in a notebook."""
    texts = []
    for function in _functions(value):
        try:
            texts.append(inspect.getsource(function))
        except (OSError, TypeError):  # a decorator such as dataclass generated the function
            texts.append(function.__qualname__)
    if isinstance(value, type):
        values = {name: each for name, each in vars(value).items() if not name.startswith("_")}
        plain = {name: each for name, each in values.items() if isinstance(each, int | float | str | tuple | list)}
        texts += [repr(value.__bases__), repr(sorted(plain.items()))]
    return "\n".join(texts)
