"""Name the user's code in a configuration, and compute its digests, so that runs are only resumed with unchanged code.

Networks and functions that cannot be imported, such as instances and classes inside a function, become attributes of
the pseudo module `__local__`, so that this process can import them by name. The name contains a digest of the code and
values. Objects with the same code and values have the same name in every process, so a new process can create the
object again and resume a run.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn, uint8

from fl_engine.core.allowed import LOCAL, NAME, OURS, is_installed
from fl_engine.core.registry import resolve
from fl_engine.datasets import stored_data
from fl_engine.storage import code
from fl_engine.storage.store import sha256
from flexfleet.config.schema import Config

MAIN = "__main__"
KEYS = ("name", "objective", "optimizer")
"""Names of parameters whose value can be the name of the user's own code."""
DIGITS = 8
"""Number of hexadecimal digits of the digest in the name of a local object."""


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
    return _digest_of(value)


def local_name(value: Any) -> str:
    """Register an object in this process under a name such as `__local__:Net_1a2b3c4d`, and return the name."""
    named = value.func if isinstance(value, partial) else value
    own = re.sub(r"\W", "", getattr(named, "__name__", type(named).__name__)) or "code"
    name = f"{own}_{_digest_of(value)[:DIGITS]}"
    setattr(sys.modules.setdefault(LOCAL, types.ModuleType(LOCAL)), name, value)
    return f"{LOCAL}:{name}"


def to_a_file(name: str, who: str) -> str:
    """Return the error message for code that other processes (`who`) cannot import."""
    module, _, own = name.partition(":")
    value = getattr(sys.modules.get(module), own, None)
    own = own[: -DIGITS - 1] if module == LOCAL else own
    file = f"{own.lower()}.py"
    what = f"{own.lower()} = {own}(...)" if isinstance(value, nn.Module) else own
    return (
        f"{own} is defined in this process only, so {who} cannot import it. Write {what} at the top level of a file "
        f"{file} (%%writefile {file} in a cell), and import it from there"
    )


def _digest_of(value: Any) -> str:
    """Return the sha256 of the code and the values of an object. Comments do not count."""
    return sha256(" ".join(_parts(value, {})).encode())


def _parts(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Yield strings that describe the code and the values of an object. The digest is computed from these strings.
    `seen` maps IDs to objects that were already described."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        yield repr(value)
    elif id(value) in seen:
        yield f"#{list(seen).index(id(value))}"
    else:
        seen[id(value)] = value
        yield type(value).__qualname__
        if isinstance(value, set | frozenset):
            yield from sorted(" ".join(_parts(each, seen)) for each in value)
        elif isinstance(value, Tensor):
            yield f"{value.dtype} {tuple(value.shape)}"
            yield sha256(value.detach().cpu().contiguous().reshape(-1).view(uint8).numpy().tobytes())
        else:
            for each in _inside(value):
                yield from _parts(each, seen)


def _inside(value: Any) -> list[Any]:
    """Return the parts of an object that its digest covers, such as a function's code and default values."""
    match value:
        case type() | types.FunctionType() if _is_fixed(value.__module__):
            return [value.__module__, value.__qualname__]
        case types.ModuleType():
            return [value.__name__]
        case types.CodeType():
            return [value.co_code, value.co_names, value.co_consts]
        case types.FunctionType():
            known = [value.__globals__.get(name) for name in names_in(value.__code__)]
            used = [each for each in known if isinstance(each, type | types.FunctionType)]
            # An empty cell belongs to a variable of an enclosing function that is not assigned yet.
            held = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            return [value.__code__, value.__defaults__, value.__kwdefaults__, *held, *used]
        case type():
            hidden = ("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl", "__firstlineno__")
            return [value.__qualname__, value.__bases__, {n: v for n, v in vars(value).items() if n not in hidden}]
        case property():
            return [value.fget, value.fset]
        case staticmethod() | classmethod():
            return [value.__func__]
        case cached_property():
            return [value.func]
        case types.UnionType():
            return list(value.__args__)
        case dict() | types.MappingProxyType() if type(value) in (dict, types.MappingProxyType):
            return [each for pair in value.items() for each in pair]
        case list() | tuple():
            return list(value)
    try:
        made = value.__reduce_ex__(4)
    except Exception:  # Compare objects that cannot be pickled by identity.
        return [id(value)]
    return [made] if isinstance(made, str) else [list(each) if isinstance(each, Iterator) else each for each in made]


def _is_fixed(module: str) -> bool:
    """Return whether the module belongs to flexfleet or to an installed package."""
    return module.partition(".")[0] in OURS or (module != MAIN and module in sys.modules and is_installed(module))


def names_in(compiled: types.CodeType) -> list[str]:
    """Return the names of all global variables and attributes that the code and its inner functions use."""
    inner = [name for each in compiled.co_consts if isinstance(each, types.CodeType) for name in names_in(each)]
    return [*compiled.co_names, *inner]
