"""Algorithm states to tensors and JSON, and back.

A state is a frozen dataclass. Fields made with `constant()` follow from the configuration and are not stored;
`Params` fields become tensors named `<field>/<name>`; every other field becomes JSON, as its annotation says. What
would come back as another value or type is refused (`core.state`): a run that goes on would have other bits.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from fl_engine.core.errors import IntegrityError, ModelError, brief, kind_of, printable
from fl_engine.core.fields import adapter, hints
from fl_engine.core.types import Params

CAN = (
    "What can be stored: Params (tensors by name); and finite int and float, bool, str and None of Python's own, "
    "enums, and tuples, lists, dicts and dataclasses of these, each of the kind that the field's annotation says"
)
KINDS = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""By type of torch, its name in a file of safetensors, in the order in which tensors are written."""
RANKS = {getattr(torch, name): (rank, kind) for rank, (name, kind) in enumerate(KINDS.items()) if hasattr(torch, name)}
PLAIN = frozenset((bool, int, float, str, type(None)))
UNFIT = (PydanticUserError, PydanticSerializationError, AttributeError, TypeError, ValueError, RecursionError)
"""What pydantic and json raise for a value, or an annotation, that they do not know."""


def check_tensors(value: Any, where: str) -> None:
    """Raises ModelError, which says `where`, for anything but a dict of tensors that a file of safetensors holds."""
    if type(value) is not dict:
        raise ModelError(f"{where} holds {kind_of(value)}, where Params, a dict of tensors by name, is expected")
    for name, tensor in value.items():
        if type(name) is not str:
            raise ModelError(f"{where} has the name {name!r}, {kind_of(name)}, where a str is expected")
        if wrong := _wrong_with(tensor):
            raise ModelError(f"{where}[{name!r}] is {wrong}, which would come back from the ledger as another")


def _wrong_with(tensor: Any) -> str:
    if type(tensor) is not Tensor:  # a Parameter, for one
        return f"{kind_of(tensor)} instead of a torch.Tensor"
    if tensor.requires_grad:
        return "a tensor with requires_grad; `.detach()` gives one without"
    if tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in RANKS:
        return f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
    return ""


def dumped(value: Any, kind: Any, where: str, can: str = "") -> Any:
    """The value as JSON, from which its annotation `kind` makes it again. Raises ModelError for a value that does not
    come back as it is. The error says `where` it is, and what `can` be there (empty: what a state's field can hold)."""
    told = can or f"The field is annotated as {_name(kind)}. {CAN}"
    try:
        kept = adapter(kind)
        stored = kept.dump_python(value, mode="json", warnings=False)
        json.dumps(stored, allow_nan=False)
        back = kept.validate_python(stored)  # which is what JSON gives back: lists, and dicts by str
    except ValidationError as error:
        raise ModelError(f"{where} holds {_said(value)}, which does not fit: {brief(error)}. {told}") from error
    except UNFIT as error:
        said = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise ModelError(f"{where} holds {_said(value)}, which cannot be stored: {said}. {told}") from error
    if found := _difference(value, back):
        part, held, given = found
        raise ModelError(f"{where}{part} holds {_said(held)}, which comes back from JSON as {_said(given)}. {told}")
    return stored


def _name(kind: Any) -> str:
    plain = isinstance(kind, type) and not hasattr(kind, "__args__")
    return kind.__name__ if plain else str(kind).replace("typing.", "")


def _said(value: Any) -> str:
    """`3.5 (float)`; in one short line."""
    text = printable(repr(value))
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def _difference(held: Any, back: Any) -> tuple[str, Any, Any] | None:
    """Where two values first differ, in value, type or order, and the two there."""
    kind = type(held)
    if kind is not type(back) or kind in (set, frozenset):  # whose order follows from its history
        return "", held, back
    if kind in PLAIN:
        return None if held == back else ("", held, back)
    steps: Iterable[Any]
    lefts: Iterable[Any]
    rights: Iterable[Any]
    if isinstance(held, list | tuple):
        if len(held) != len(back):
            return "", held, back
        if _plain_and_same(held, back):
            return None
        form, steps, lefts, rights = "[{!r}]", range(len(held)), held, back
    elif isinstance(held, dict):
        if not _plain_and_same([*held], [*back]) and repr([*held]) != repr([*back]):
            return "", held, back
        form, steps, lefts, rights = "[{!r}]", held, held.values(), back.values()
    elif dataclasses.is_dataclass(held):
        steps = [field.name for field in dataclasses.fields(held)]
        form, lefts, rights = ".{}", *([getattr(one, name) for name in steps] for one in (held, back))
    else:
        return None if repr(held) == repr(back) else ("", held, back)
    for step, left, right in zip(steps, lefts, rights, strict=True):
        if found := _difference(left, right):
            return form.format(step) + found[0], *found[1:]
    return None


def _plain_and_same(held: Sequence[Any], back: Sequence[Any]) -> bool:
    """A look at all values at once, which is enough for most of a large table's."""
    kinds = [*map(type, held)]
    return PLAIN.issuperset(kinds) and kinds == [*map(type, back)] and held == back


S = TypeVar("S")


def constant() -> Any:
    """Marks a state's field that `init` gives and no round changes."""
    return dataclasses.field(metadata={"constant": True})


def constants(state: Any) -> list[str]:
    """The names of the fields that no round changes."""
    return [field.name for field in dataclasses.fields(state) if field.metadata.get("constant")]


def pack(state: Any) -> tuple[Params, dict[str, Any]]:
    """(tensors, JSON) of a state. `<field>/order` lists the names of a field's tensors, where it has them in another
    order than a file of tensors. Raises ModelError for what would not come back as it is."""
    tensors: Params = {}
    rest: dict[str, Any] = {}
    name, kinds = type(state).__name__, _kinds(state)
    for field in _stored(state):
        value, kind = getattr(state, field.name), kinds[field.name]
        if kind == Params:
            check_tensors(value, f"{name}.{field.name}")
            tensors.update({f"{field.name}/{name}": t.contiguous() for name, t in value.items()})
            if list(value) != sorted(value):
                rest[f"{field.name}/order"] = list(value)
        else:
            rest[field.name] = dumped(value, kind, f"{name}.{field.name}")
    return tensors, rest


def unpack(initial: S, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> S:
    """The state that `pack` gave, on top of `initial` (which brings the constant fields).

    Raises IntegrityError where what is stored does not fit the state's fields, or its tensors' names, types or shapes.
    """
    if not isinstance(rest, Mapping):
        raise IntegrityError(f"stored state: a mapping of fields is expected, found {type(rest).__name__}")
    loaded: dict[str, Any] = {}
    kinds = _kinds(initial)
    for field in _stored(initial):
        if kinds[field.name] == Params:
            prefix = f"{field.name}/"
            found = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
            _same_form(field.name, getattr(initial, field.name), found)
            loaded[field.name] = _in_order(field.name, found, rest.get(f"{prefix}order"))
        else:
            try:
                loaded[field.name] = adapter(kinds[field.name]).validate_python(rest[field.name])
            except (KeyError, ValidationError) as error:
                raise IntegrityError(f"stored state: field {field.name!r} does not fit: {error}") from error
    return dataclasses.replace(initial, **loaded)  # type: ignore[type-var]


def _stored(state: Any) -> list[dataclasses.Field[Any]]:
    """Raises ModelError for what is no dataclass, or has fields that cannot be set when it is made."""
    name = type(state).__name__
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ModelError(f"a {name} is no state: make it a @dataclass(frozen=True) with `params`, the weights")
    fields = [field for field in dataclasses.fields(state) if not field.metadata.get("constant")]
    for field in fields:
        if not field.init:
            raise ModelError(f"{name}.{field.name} is a field with init=False, which no stored state can set")
    return fields


def _kinds(state: Any) -> dict[str, Any]:
    try:
        return hints(type(state))
    except (NameError, TypeError) as error:
        raise ModelError(
            f"the annotations of {type(state).__name__} cannot be read: {error}. Define or import what they name at "
            "the top of its module, outside of `if TYPE_CHECKING`"
        ) from error


def _in_order(field: str, found: Params, order: Any) -> Params:
    if order is None:
        return {name: found[name] for name in sorted(found)}
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(found):
        raise IntegrityError(f"stored state: {field}/order does not list the names of its tensors")
    return {name: found[name] for name in order}


def _same_form(field: str, expected: Params, found: Params) -> None:
    if not expected:  # an optimiser's moments are empty before the first round
        return
    wrong = [n for n in expected.keys() | found.keys() if n not in found or n not in expected]
    wrong += [n for n in expected.keys() & found.keys() if _form(expected[n]) != _form(found[n])]
    if wrong:
        raise IntegrityError(f"stored state: {field} differs from the configured model in {sorted(wrong)[:4]}")


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape
