"""Convert algorithm states to tensors and JSON, and back.

A state is a frozen dataclass. Fields declared with `constant()` depend only on the configuration and are not stored.
`Params` fields are stored as tensors named `<field>/<name>`, and all other fields as JSON according to their
annotation. If JSON does not preserve the type and order of a value, `pack` raises an error, because a resumed run would
differ.
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

from fl_engine.core.errors import IntegrityError, ModelError, brief, first_line, kind_of, printable
from fl_engine.core.fields import adapter, hints
from fl_engine.core.types import Params

S = TypeVar("S")

CAN = (
    "A state can store Params (tensors by name), finite int and float, bool, str, None, enums, and tuples, lists, "
    "dicts and dataclasses of these. The values must have the types in the field's annotation"
)
KINDS = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32", "uint32": "U32",
    "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16", "int16": "I16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Map torch's dtypes to safetensors' names. A safetensors file sorts its tensors by these dtypes."""
RANKS = {getattr(torch, name): (rank, kind) for rank, (name, kind) in enumerate(KINDS.items()) if hasattr(torch, name)}
UNFIT = (PydanticUserError, PydanticSerializationError, AttributeError, TypeError, ValueError, RecursionError)
"""Errors that pydantic and json raise for unsupported values or annotations."""


def constant() -> Any:
    """Declare a field of a state that `init` sets and that does not change afterwards."""
    return dataclasses.field(metadata={"constant": True})


def constants(state: Any) -> list[str]:
    """Return the names of the fields that were declared with `constant()`."""
    return [field.name for field in dataclasses.fields(state) if field.metadata.get("constant")]


def pack(state: Any) -> tuple[Params, dict[str, Any]]:
    """Convert a state to a tuple (tensors, JSON of all other fields).

    If the names of a field's tensors are not sorted, `<field>/order` in the JSON lists the names. Raises ModelError for
    a value that JSON or safetensors would change.
    """
    tensors: Params = {}
    rest: dict[str, Any] = {}
    for field, kind in _stored(state):
        value, where = getattr(state, field), f"{type(state).__name__}.{field}"
        if kind == Params:
            _check_tensors(value, where)
            tensors.update({f"{field}/{name}": t.contiguous() for name, t in value.items()})
            if list(value) != sorted(value):
                rest[f"{field}/order"] = list(value)
        else:
            rest[field] = dumped(value, kind, where)
    return tensors, rest


def unpack(initial: S, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> S:
    """Return the state that `pack` stored. The constant fields are copied from `initial`.

    Raises IntegrityError if the fields, tensor names, types or shapes differ from those of `initial`.
    """
    loaded: dict[str, Any] = {}
    for field, kind in _stored(initial):
        if kind == Params:
            prefix = f"{field}/"
            found = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
            _check_form(field, getattr(initial, field), found)
            order = rest.get(f"{prefix}order", sorted(found))
            if not isinstance(order, list) or sorted(map(str, order)) != sorted(found):
                raise IntegrityError(f"stored state: {prefix}order must list the names of the field's tensors")
            loaded[field] = {name: found[name] for name in order}
        else:
            try:
                loaded[field] = adapter(kind).validate_python(rest[field])
            except (KeyError, ValidationError) as error:
                raise IntegrityError(f"stored state: field {field!r} is invalid: {error}") from error
    return dataclasses.replace(initial, **loaded)  # type: ignore[type-var]


def dumped(value: Any, kind: Any, where: str, can: str = CAN) -> Any:
    """Convert a value of the type `kind` to JSON from which pydantic can restore the value.

    Raises ModelError if reading the JSON does not restore the value. The error message begins with `where` (name of the
    value) and ends with `can` (list of supported values).
    """
    text = printable(repr(value))
    text = f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"
    try:
        stored = adapter(kind).dump_python(value, mode="json", warnings=False)
        json.dumps(stored, allow_nan=False)
        back = adapter(kind).validate_python(stored)
    except UNFIT as error:
        reason = brief(error) if isinstance(error, ValidationError) else printable(first_line(error))
        raise ModelError(f"{where} is {text}, which cannot be stored: {reason}. {can}") from error
    # Sets are rejected, because their order is not stable. Comparing `repr` also detects a changed type or order.
    if re.search(r"\b(frozen)?set\b", str(kind)) or back != value or repr(back) != repr(value):
        raise ModelError(f"{where} is {text}, but would be restored as {printable(repr(back))[:60]}. {can}")
    return stored


def _check_tensors(value: Any, where: str) -> None:
    """Raise ModelError unless the value is a dict of tensors that safetensors supports."""
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise ModelError(f"{where} must be Params, a dict from names to tensors, got {kind_of(value)}")
    for name, tensor in value.items():
        is_plain = type(tensor) is Tensor and not tensor.requires_grad  # nn.Parameter is rejected
        if not is_plain or tensor.layout != torch.strided or tensor.is_meta or tensor.dtype not in RANKS:
            raise ModelError(
                f"{where}[{name!r}] must be a dense, detached torch.Tensor without gradient, got {kind_of(tensor)}"
            )


def _stored(state: Any) -> list[tuple[str, Any]]:
    """Return pairs (name, annotation) of all stored fields. Raises ModelError unless the state is a dataclass."""
    name = type(state).__name__
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ModelError(f"a state must be a @dataclass(frozen=True) with the weights as `params`, got a {name}")
    try:
        kinds = hints(type(state))
    except (NameError, TypeError) as error:
        raise ModelError(
            f"cannot read the annotations of {name}: {error}. Import the types outside of `if TYPE_CHECKING`"
        ) from error
    fixed = constants(state)
    return [(field.name, kinds[field.name]) for field in dataclasses.fields(state) if field.name not in fixed]


def _check_form(field: str, expected: Params, found: Params) -> None:
    if not expected:  # the moments of an optimizer are empty before the first round
        return
    forms = [{name: (tensor.dtype, tensor.shape) for name, tensor in each.items()} for each in (expected, found)]
    if forms[0] != forms[1]:
        wrong = sorted({name for name, _ in forms[0].items() ^ forms[1].items()})
        raise IntegrityError(f"stored state: {wrong[:4]} in {field!r} must have the shapes of the configured model")
