"""Create names for networks and functions that cannot be imported, such as instances and classes inside a function.

Such an object becomes an attribute of the pseudo module `__local__`, so that this process can import the object by
name. The name contains a digest of the code and values of the object. Objects with the same code and values have the
same name in every process, so a new process can create the object again and resume a run.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn, uint8

from fl_engine.core.allowed import LOCAL, OURS, is_installed
from fl_engine.storage.store import sha256

DIGITS = 8
"""Number of hexadecimal digits of the digest in a name."""


def local_name(value: Any) -> str:
    """Register an object in this process under a name such as `__local__:Net_1a2b3c4d`, and return the name."""
    named = value.func if isinstance(value, partial) else value
    own = re.sub(r"\W", "", getattr(named, "__name__", type(named).__name__)) or "code"
    name = f"{own}_{sha256(' '.join(_parts(value, {})).encode())[:DIGITS]}"
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
            return [value.__code__, value.__defaults__, value.__kwdefaults__, *_closed_over(value), *used]
        case type():
            hidden = ("__dict__", "__weakref__", "__module__", "__doc__", "_abc_impl")
            return [value.__qualname__, value.__bases__, {n: v for n, v in vars(value).items() if n not in hidden}]
        case property():
            return [value.fget, value.fset]
        case staticmethod() | classmethod():
            return [value.__func__]
        case dict() if type(value) is dict:
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
    return module.partition(".")[0] in OURS or (module in sys.modules and is_installed(module))


def names_in(compiled: types.CodeType) -> list[str]:
    """Return the names of all global variables and attributes that the code and its inner functions use."""
    inner = [name for each in compiled.co_consts if isinstance(each, types.CodeType) for name in names_in(each)]
    return [*compiled.co_names, *inner]


def _closed_over(function: types.FunctionType) -> list[Any]:
    """Return the values of variables that the function uses from enclosing functions."""
    values = []
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # The variable is not assigned yet.
            continue
    return values
