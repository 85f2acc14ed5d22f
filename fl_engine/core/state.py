"""Algorithm states to tensors and JSON, and back.

A state is a frozen dataclass. Fields made with `constant()` follow from the configuration and are not stored;
`Params` fields become tensors named `<field>/<name>`; every other field must be JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from torch import Tensor

from fl_engine.core.adapters import adapter, hints
from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Params

S = TypeVar("S")


def constant() -> Any:
    """Marks a state's field that `init` gives and no round changes."""
    return dataclasses.field(metadata={"constant": True})


def pack(state: Any) -> tuple[Params, dict[str, Any]]:
    """(tensors, JSON) of a state."""
    tensors: Params = {}
    rest: dict[str, Any] = {}
    kinds = hints(type(state))
    for field in _stored(state):
        value = getattr(state, field.name)
        if kinds[field.name] == Params:
            tensors.update({f"{field.name}/{name}": t.contiguous() for name, t in value.items()})
        else:
            rest[field.name] = adapter(kinds[field.name]).dump_python(value, mode="json")
    return tensors, rest


def unpack(initial: S, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> S:
    """The state that `pack` gave, on top of `initial` (which brings the constant fields).

    Raises IntegrityError where what is stored does not fit the state's fields, or its tensors' names, types or shapes.
    """
    if not isinstance(rest, Mapping):
        raise IntegrityError(f"stored state: a mapping of fields is expected, found {type(rest).__name__}")
    loaded: dict[str, Any] = {}
    kinds = hints(type(initial))
    for field in _stored(initial):
        if kinds[field.name] == Params:
            prefix = f"{field.name}/"
            loaded[field.name] = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
            _same_form(field.name, getattr(initial, field.name), loaded[field.name])
        else:
            try:
                loaded[field.name] = adapter(kinds[field.name]).validate_python(rest[field.name])
            except (KeyError, ValidationError) as error:
                raise IntegrityError(f"stored state: field {field.name!r} does not fit: {error}") from error
    return dataclasses.replace(initial, **loaded)  # type: ignore[type-var]


def _stored(state: Any) -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(state) if not f.metadata.get("constant")]


def _same_form(field: str, expected: Params, found: Params) -> None:
    if not expected:  # an optimiser's moments are empty before the first round
        return
    wrong = [n for n in expected.keys() | found.keys() if n not in found or n not in expected]
    wrong += [n for n in expected.keys() & found.keys() if _form(expected[n]) != _form(found[n])]
    if wrong:
        raise IntegrityError(f"stored state: {field} differs from the configured model in {sorted(wrong)[:4]}")


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape
