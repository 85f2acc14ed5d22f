"""Algorithm states to tensors and JSON, and back.

A state is a frozen dataclass. Fields made with `constant()` follow from the configuration and are not stored. `Params`
fields become tensors named `<field>/<name>`, and every other field becomes JSON, as its annotation says. A value that
would come back with another value, type or order is refused, because a resumed run would then compute other bits.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from pydantic import ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from fl_engine.core.errors import IntegrityError, ModelError, brief, kind_of, printable
from fl_engine.core.fields import adapter, hints
from fl_engine.core.types import Params

S = TypeVar("S")

CAN = (
    "A state stores Params (tensors by name); and finite int and float, bool, str, None, enums, and tuples, lists, "
    "dicts and dataclasses of these, of the types that the field's annotation says"
)
KINDS = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Map torch's types to their names in safetensors, in the order in which tensors are written."""
RANKS = {getattr(torch, name): (rank, kind) for rank, (name, kind) in enumerate(KINDS.items()) if hasattr(torch, name)}
UNFIT = (PydanticUserError, PydanticSerializationError, AttributeError, TypeError, ValueError, RecursionError)
"""Errors of pydantic and json for a value or an annotation that they do not support."""


def constant() -> Any:
    """Mark a field of a state that `init` sets and no round changes."""
    return dataclasses.field(metadata={"constant": True})


def constants(state: Any) -> list[str]:
    """Return the names of the fields that no round changes."""
    return [field.name for field in dataclasses.fields(state) if field.metadata.get("constant")]


def pack(state: Any) -> tuple[Params, dict[str, Any]]:
    """Return the tensors and the JSON of a state.

    `<field>/order` lists the names of a field's tensors if they are not sorted. Raises ModelError for a value that
    would not come back as it is.
    """
    tensors: Params = {}
    rest: dict[str, Any] = {}
    name, kinds = type(state).__name__, _kinds(state)
    for field in _stored(state):
        value, kind = getattr(state, field.name), kinds[field.name]
        if kind == Params:
            _check_tensors(value, f"{name}.{field.name}")
            tensors.update({f"{field.name}/{name}": t.contiguous() for name, t in value.items()})
            if list(value) != sorted(value):
                rest[f"{field.name}/order"] = list(value)
        else:
            rest[field.name] = dumped(value, kind, f"{name}.{field.name}")
    return tensors, rest


def unpack(initial: S, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> S:
    """Return the state that `pack` stored. `initial` provides the constant fields.

    Raises IntegrityError if the stored fields, or the names, types or shapes of their tensors, do not fit.
    """
    if not isinstance(rest, Mapping):
        raise IntegrityError(f"stored state: expected a mapping of fields, got {type(rest).__name__}")
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


def dumped(value: Any, kind: Any, where: str, can: str = CAN) -> Any:
    """Return the value as JSON, from which its annotation `kind` restores it.

    Raises ModelError for a value that would not come back as it is. The error names the place (`where`) and what is
    possible there (`can`).
    """
    said = printable(repr(value))
    said = f"{said[:60]}{'...' if len(said) > 60 else ''} ({type(value).__name__})"
    try:
        kept = adapter(kind)
        stored = kept.dump_python(value, mode="json", warnings=False)
        json.dumps(stored, allow_nan=False)
        back = kept.validate_python(stored)
    except ValidationError as error:
        raise ModelError(f"{where} holds {said}, which does not fit: {brief(error)}. {can}") from error
    except UNFIT as error:
        reason = printable(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise ModelError(f"{where} holds {said}, which cannot be stored: {reason}. {can}") from error
    # A set iterates in an order that follows from its history. repr compares types and orders too.
    if re.search(r"\b(frozen)?set\b", str(kind)) or back != value or repr(back) != repr(value):
        raise ModelError(f"{where} holds {said}, which comes back as {printable(repr(back))[:60]}. {can}")
    return stored


def _check_tensors(value: Any, where: str) -> None:
    """Raise ModelError unless the value is a dict of tensors that a safetensors file can hold."""
    if type(value) is not dict:
        raise ModelError(f"{where} must be Params, a dict of tensors by name, got {kind_of(value)}")
    for name, tensor in value.items():
        if type(name) is not str:
            raise ModelError(f"{where} must have names of type str, got {name!r}")
        if type(tensor) is not Tensor:  # a Parameter, for example
            raise ModelError(f"{where}[{name!r}] must be a torch.Tensor, got {kind_of(tensor)}")
        if tensor.requires_grad or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in RANKS:
            raise ModelError(
                f"{where}[{name!r}] must be a dense tensor without requires_grad (use `.detach()`), got "
                f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
            )


def _stored(state: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields that are stored. Raises ModelError unless the state is a dataclass that can be restored."""
    name = type(state).__name__
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ModelError(f"a state must be a @dataclass(frozen=True) with `params`, the weights, got a {name}")
    fields = [field for field in dataclasses.fields(state) if not field.metadata.get("constant")]
    for field in fields:
        if not field.init:
            raise ModelError(f"{name}.{field.name} has init=False, so a stored state cannot set it")
    return fields


def _kinds(state: Any) -> dict[str, Any]:
    try:
        return hints(type(state))
    except (NameError, TypeError) as error:
        raise ModelError(
            f"cannot read the annotations of {type(state).__name__}: {error}. Import their names at the top of its "
            "module, outside of `if TYPE_CHECKING`"
        ) from error


def _in_order(field: str, found: Params, order: Any) -> Params:
    if order is None:
        return {name: found[name] for name in sorted(found)}
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(found):
        raise IntegrityError(f"stored state: {field}/order does not list the names of its tensors")
    return {name: found[name] for name in order}


def _same_form(field: str, expected: Params, found: Params) -> None:
    if not expected:  # an optimizer has no moments before the first round
        return
    wrong = [n for n in expected.keys() | found.keys() if n not in found or n not in expected]
    wrong += [n for n in expected.keys() & found.keys() if _form(expected[n]) != _form(found[n])]
    if wrong:
        raise IntegrityError(f"stored state: {field} differs from the configured model in {sorted(wrong)[:4]}")


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape
