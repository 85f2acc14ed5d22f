"""Algorithm states to tensors and JSON, and back.

A state is a frozen dataclass. Fields made with `constant()` follow from the configuration and are not stored;
`Params` fields become tensors named `<field>/<name>`; every other field becomes JSON, as its annotation says. What
would come back as another value or type is refused (`core.storable`): a run that goes on would have other bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from torch import Tensor

from fl_engine.core.adapters import adapter, hints
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.storable import check_tensors, dumped
from fl_engine.core.types import Params

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
