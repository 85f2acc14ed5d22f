"""The code of one's own that a configuration names: digests of its source, so that a run resumes with the same code."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.registry import resolve
from fl_engine.core.text import check_plain
from fl_engine.datasets import stored_data
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from flexfleet.config.schema import Config

MAIN = "__main__"


def named(config: Config, sections: Collection[str] | None = None) -> tuple[str, ...]:
    """Return the values `package.module:Name` of a configuration, or of some of its sections."""
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
    elif isinstance(value, str) and key in ("name", "objective", "optimizer") and not stored_data.is_stored(value):
        module, sign, attribute = value.partition(":")
        if sign and attribute.isidentifier() and all(part.isidentifier() for part in module.split(".")):
            yield value


def cells(value: Any) -> list[str]:
    """Return the names in a configuration that only this process can resolve, because a cell or a script defines
    them."""
    if isinstance(value, Mapping):
        return [name for each in value.values() for name in cells(each)]
    if isinstance(value, list | tuple):
        return [name for each in value for name in cells(each)]
    return [value] if isinstance(value, str) and value.startswith(f"{MAIN}:") else []


def to_a_file(name: str, who: str) -> str:
    """Return what to do about such a name if others (`who`) have to import it."""
    own = name.removeprefix(f"{MAIN}:")
    file = f"{own.lower()}.py"
    return (
        f"{own} is defined in this notebook or script, which {who} cannot import: write it to a file, {file} "
        f"(%%writefile {file} in a cell), import it from there, and give that"
    )


def sources(config: Config, sections: Collection[str] | None = None) -> dict[str, str]:
    """Return the sha256 of the module's file by name. For a name of a cell or script it covers the source of the object
    and of the functions and classes that it uses there. Names in the package of `run.code` are left out, because the
    package has its own sha256. Raises ConfigError if a name cannot be imported."""
    package = None if config.run.code is None else code.name_of(Path(config.run.code))
    return {name: _digest(name) for name in named(config, sections) if name.partition(":")[0].split(".")[0] != package}


def _digest(name: str) -> str:
    module_name = name.partition(":")[0]
    value: Any = resolve({}, name, "code of one's own")
    module = sys.modules[module_name]
    file = getattr(module, "__file__", None)
    if module_name != MAIN and file is not None and Path(file).is_file():
        return sha256(Path(file).read_bytes())
    return sha256("\n".join(map(_source, _used_by(value))).encode())


def _used_by(value: Any) -> list[Any]:
    """Return the class or function, and everything of the same notebook or script that it inherits from or names."""
    found, left = dict[str, Any](), [value]
    while left:
        each = left.pop()
        if not isinstance(each, type | types.FunctionType):
            each = type(each)
        if each.__module__ != value.__module__ or each.__qualname__ in found:
            continue
        found[each.__qualname__] = each
        members = [each] if isinstance(each, types.FunctionType) else map(_function, vars(each).values())
        space = vars(sys.modules[each.__module__])
        for member in members:
            names = _names_in(member.__code__) if isinstance(member, types.FunctionType) else []
            names.append(getattr(member, "__qualname__", ""))  # an attribute that is a function or a class from outside
            left.extend(space[name] for name in names if isinstance(space.get(name), type | types.FunctionType))
        left.extend(each.__mro__[1:] if isinstance(each, type) else ())
    return [found[name] for name in sorted(found)]


def _names_in(code: types.CodeType) -> list[str]:
    inner = [name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_in(each)]
    return [*code.co_names, *inner]


def _function(member: Any) -> Any:
    """Return the function behind a static method, class method or property; else the member itself."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _source(value: type | types.FunctionType) -> str:
    """Return the text of a class or function. Python cannot find the text of a class in a notebook's cell, so its
    methods and plain data stand for it."""
    try:
        return inspect.getsource(value)
    except (OSError, TypeError):
        pass
    if isinstance(value, types.FunctionType):
        return repr(_compiled(value.__code__))
    parts = []
    for name, member in sorted(vars(value).items()):
        inner = _function(member)
        if isinstance(inner, types.FunctionType):
            parts.append(f"{name}: {_source(inner)}")
        elif not name.startswith("_"):
            parts.append(f"{name} = {member!r}" if _is_plain(member) else f"{name}: {type(member).__qualname__}")
    return "\n".join([repr(value.__bases__), *parts])


def _compiled(code: types.CodeType) -> tuple[Any, ...]:
    """Return what a function does, without its place in the file and in memory."""
    return code.co_code, code.co_names, tuple(map(_constant, code.co_consts))


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _compiled(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else value  # a set has another order each time


def _is_plain(value: Any) -> bool:
    try:
        check_plain(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
