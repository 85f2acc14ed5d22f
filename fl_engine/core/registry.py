"""Objects that a configuration chooses by name: registered ones, or the user's own as `package.module:NAME`.

A `Contract` says for one choice (the algorithm, the selection, ...) what is registered, and which attributes and
methods a class must have to be chosen.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fl_engine.core.allowed import check_call, check_module
from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.fields import adapter

T = TypeVar("T")

COMPLETE = "complete"
"""Type of a pydantic error whose message already says what arrived."""
UNKNOWN = "unknown_option"
"""Type of a pydantic error for an unknown option. Its context has the chosen `name`, its `known` options, and the
`others` that have this option."""


def resolve(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return a registered object, or the one that `package.module:NAME` names. Raises ConfigError if there is none, or
    if `core.allowed` refuses to import or call it."""
    if name in registry:
        return registry[name]
    module, sign, attribute = name.partition(":")
    if not sign:
        raise ConfigError(
            f"no {what} named {name!r}{did_you_mean(name, registry)}; there are {', '.join(registry)}; "
            "your own is given as package.module:NAME"
        )
    check_module(name, what)
    if os.getcwd() not in sys.path:  # the user's own module may be in the working directory
        sys.path.append(os.getcwd())
    try:
        found: T = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # of somebody else's code
        raise ConfigError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    check_call(found, name, what)
    return found


def check_names(section: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown parameter {f'{section}.{key}'!r}{nearest(key, known)}")


# ------------------------------------------------------------------------------------------------------ contracts
@dataclass(frozen=True, eq=False)
class Contract(Generic[T]):
    """One choice in a configuration. As the annotation of a dataclass's field it makes pydantic build the chosen
    object: `Annotated[Selector, Contract("selection", SELECTIONS, Selector)]` accepts `{name: uniform, model:
    largest}`, and `{name: my.module:Mine, ...}` with the fields of `Mine` as options."""

    what: str
    """The choice's name in errors."""
    registry: Mapping[str, type[T]] = field(hash=False)
    protocol: type
    """All its methods and attributes are required."""
    needs: tuple[str, ...] = ()
    """Additional required fields."""
    optional: tuple[type, ...] = ()
    """Optional protocols, whose methods must accept their arguments."""

    def kind(self, name: str) -> type[T]:
        """Return the named class. Raises ConfigError unless it exists and fits."""
        kind = resolve(self.registry, name, self.what)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            wanted = ", ".join([each for each, _ in _members(self.protocol)] + list(self.needs))
            raise ConfigError(
                f"{self.what} {name!r} is {kind!r}; a dataclass is expected, with the options as its fields and with "
                f"{wanted}"
            )
        if wrong := self.misfits(kind):
            raise ConfigError(f"{self.what} {name!r} does not fit: {', and '.join(wrong)}")
        return kind

    def misfits(self, kind: type) -> list[str]:
        """Return a clause for each way in which a dataclass does not fit."""
        own = {field.name for field in fields(kind)}
        wrong = [f"it has no field {name!r}" for name in self.needs if name not in own]
        for protocol in (self.protocol, *self.optional):
            for name, member in _members(protocol):
                if name not in own and not hasattr(kind, name):
                    if protocol is self.protocol:
                        wrong.append(f"it has no {_call(name, member) if callable(member) else repr(name)}")
                elif callable(member) and (said := _refuses(kind, name, member)):
                    wrong.append(said)
        return wrong

    def of_section(self, section: Mapping[str, Any]) -> type[T]:
        """Return the class that a section of the configuration names. Raises ConfigError."""
        name = section.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{self.what}.name is missing: name one, e.g. {self.what}: {{name: ...}}")
        return self.kind(name)

    # ------------------------------------------------------------------------------------ in a dataclass's field
    def parse(self, section: Any) -> T:
        """Return the object of a section: the class `name` with the other entries as fields. Raises pydantic's
        ValidationError."""
        if not isinstance(section, Mapping):
            raise PydanticCustomError(
                "section", "a section with a name is expected, {example}", {"example": "{name: ...}"}
            )
        name = section.get("name")
        if not isinstance(name, str):
            names = ", ".join(self.registry)
            raise _at(
                "name", section, f"no {self.what} is named; there are {names}; your own is given as package.module:NAME"
            )
        try:
            kind = self.kind(name)
        except ConfigError as error:
            raise _at("name", name, str(error)) from error
        options = {key: value for key, value in section.items() if key != "name"}
        known = _options_of(kind)
        wrong: list[InitErrorDetails] = []
        for key, value in options.items():
            if key not in known:
                others = [each for each, other in self.registry.items() if key in _options_of(other)]
                about = {"name": name, "known": known, "others": others}
                said = PydanticCustomError(UNKNOWN, "unknown parameter", about)
                wrong.append({"type": said, "loc": (key,), "input": value})
        try:
            found: T = adapter(kind).validate_json(json.dumps({k: v for k, v in options.items() if k in known}))
        except ValidationError as error:
            wrong += [_again(each) for each in error.errors()]
        if wrong:
            raise ValidationError.from_exception_data(self.what, wrong)
        return found

    def section(self, value: T) -> dict[str, Any]:
        """Return the section from which `parse` makes an equal object."""
        kind = type(value)
        names = (name for name, each in self.registry.items() if each is kind)
        options = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}  # type: ignore[arg-type]
        return {"name": "", **options} | {"name": next(names, f"{kind.__module__}:{kind.__qualname__}")}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The JSON schema lists what is registered, with the options."""
        registered = {name: handler.generate_schema(kind) for name, kind in self.registry.items()}
        listed = core_schema.tagged_union_schema(registered, discriminator="name")
        written = core_schema.plain_serializer_function_ser_schema(self.section)
        return core_schema.no_info_plain_validator_function(
            self.parse, json_schema_input_schema=listed, serialization=written
        )


def _options_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init and field.name != "name"]


def _at(key: str, value: Any, said: str) -> ValidationError:
    error = PydanticCustomError(COMPLETE, "{said}", {"said": said})
    return ValidationError.from_exception_data(key, [{"type": error, "loc": (key,), "input": value}])


def _again(error: Any) -> InitErrorDetails:
    """Return an error of pydantic's in the form in which a validator can raise it."""
    said = PydanticCustomError(error["type"], "{said}", {**error.get("ctx", {}), "said": error["msg"]})
    return {"type": said, "loc": error["loc"], "input": error["input"]}


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a protocol's methods and attributes, those of its bases first."""
    found: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        if base not in (object, Protocol, Generic):
            found |= dict.fromkeys(inspect.get_annotations(base))
            found |= {
                name: value for name, value in vars(base).items() if callable(value) or isinstance(value, property)
            }
    return ((name, value) for name, value in found.items() if not name.startswith("_"))


def _call(name: str, method: Any) -> str:
    """Return a call as in `plan(state, round, seed)`."""
    return f"{name}({', '.join(list(inspect.signature(method).parameters)[1:])})"


def _refuses(kind: type, name: str, method: Any) -> str | None:
    """Return why a class's method does not accept the arguments of the protocol's, or None."""
    own = inspect.getattr_static(kind, name)
    if isinstance(own, property) or not callable(getattr(kind, name)):
        return f"its {name!r} is no method, {_call(name, method)} is expected"
    try:
        signature = inspect.signature(getattr(kind, name))
    except ValueError:  # of compiled code
        return None
    _, *wanted = inspect.signature(method).parameters.values()
    places = [each for each in wanted if each.kind is not each.KEYWORD_ONLY]
    itself = 0 if isinstance(own, staticmethod | classmethod) else 1
    try:
        signature.bind(*[None] * (itself + len(places)), **{p.name: None for p in wanted if p.kind is p.KEYWORD_ONLY})
    except TypeError as error:
        return f"its {name}{signature} is called as {_call(name, method)}: {error}"
    return None
