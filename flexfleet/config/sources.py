"""The code of one's own that a configuration names: digests of its source, so that a run resumes with the same code."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_engine.datasets import kept
from fl_engine.exchange import code
from fl_engine.storage.store import sha256
from flexfleet.config.schema import Config

MAIN = "__main__"


def named(config: Config, sections: Collection[str] | None = None) -> tuple[str, ...]:
    """The values `package.module:Name` of a configuration, or of some of its sections."""
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
    elif isinstance(value, str) and key in ("name", "objective", "optimiser") and not kept.is_kept(value):
        module, sign, attribute = value.partition(":")
        if sign and attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            yield value


def sources(config: Config, sections: Collection[str] | None = None) -> dict[str, str]:
    """By name, the sha256 of its module's file; of what a cell or a script itself defines, that of its own source. What
    is in the package of `run.code` is left out: the package has a sha256 as a whole."""
    package = None if config.run.code is None else code.name_of(Path(config.run.code))
    return {name: _digest(name) for name in named(config, sections) if name.partition(":")[0].split(".")[0] != package}


def _digest(name: str) -> str:
    module_name, _, attribute = name.partition(":")
    module = importlib.import_module(module_name)
    file = getattr(module, "__file__", None)
    if module_name != MAIN and file is not None and Path(file).is_file():
        return sha256(Path(file).read_bytes())
    return sha256(_source(getattr(module, attribute)).encode())


def _source(value: Any) -> str:
    """The text of a class or a function. Python cannot find that of a class of a notebook's cell, but that of its
    methods; what else it has counts as it is shown."""
    if not isinstance(value, type | types.FunctionType):
        value = type(value)
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        pass
    if isinstance(value, types.FunctionType):
        return repr((value.__code__.co_code, value.__code__.co_consts, value.__code__.co_names))
    parts = []
    for name, member in sorted(vars(value).items()):
        inner = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(inner, types.FunctionType):
            parts.append(f"{name}: {_source(inner)}")
        elif not name.startswith("_"):
            parts.append(f"{name} = {member!r}")
    return "\n".join([repr(value.__bases__), *parts])
