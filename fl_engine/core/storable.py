"""What a ledger holds of an algorithm's state exactly: value, type, and the order of names. Anything else is refused
where it is made, since a run that goes on from it would compute other bits."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from fl_engine.core.adapters import adapter
from fl_engine.core.errors import ModelError, brief, kind_of, printable

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
