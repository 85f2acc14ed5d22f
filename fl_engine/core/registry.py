"""Build objects that a configuration chooses by name: registered objects, or user code named as `package.module:NAME`.

A `Contract` describes one choice, such as the algorithm or the selection. The contract lists the registered objects,
and the attributes and methods that a class must have.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from fl_engine.core.allowed import check_call, check_module
from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.fields import adapter

T = TypeVar("T")

COMPLETE = "complete"
"""Type of pydantic errors whose message already contains the invalid value."""
SIMILAR = 0.8
"""Minimum similarity of a misspelled method to the method that was meant, from 0 to 1."""
UNKNOWN = "unknown_option"
"""Type of a pydantic error for an unknown option. The error's context contains the chosen `name`, the `known` options
of this name, and `others`, the names whose options include the unknown option."""


def resolve(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return a registered object, or import the object `package.module:NAME`. Raises ConfigError if the object does not
    exist, or if `core.allowed` refuses to import or call it."""
    if name in registry:
        return registry[name]
    module, sign, attribute = name.partition(":")
    if not sign:
        raise ConfigError(
            f"unknown {what} {name!r}{did_you_mean(name, registry)}. Choose from {', '.join(registry)}, or name your "
            "own class as package.module:NAME"
        )
    check_module(name, what)
    if os.getcwd() not in sys.path:  # the user's own module may be in the working directory
        sys.path.append(os.getcwd())
    try:
        found: T = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # user code may raise any exception
        hint = did_you_mean(attribute, getattr(sys.modules.get(module), "__dict__", ()))
        if module == "__main__":
            hint = ". Define it in a file, because other processes cannot import from a script or notebook"
        raise ConfigError(f"{what} {name!r} cannot be imported: {type(error).__name__}: {error}{hint}") from error
    check_call(found, name, what)
    return found


def check_names(section: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in options:
        if key not in known:
            path = f"{section}.{key}"
            raise ConfigError(f"unknown parameter {path!r}{nearest(key, known)}", code="config.unknown", path=path)


@dataclass(frozen=True, eq=False)
class Contract(Generic[T]):
    """Objects that a configuration can choose for one purpose, such as the selection of clients.

    If a field of a dataclass is annotated with a contract, pydantic builds the chosen object. `Annotated[Selector,
    Contract("selection", SELECTIONS, Selector)]` accepts `{name: uniform, model: largest}`, and `{name: my.module:Mine,
    ...}` with the fields of `Mine` as options.
    """

    what: str
    """Name of the choice in error messages."""
    registry: Mapping[str, type[T]] = field(hash=False)
    protocol: type
    """Protocol whose methods and attributes a chosen class must have."""
    needs: tuple[str, ...] = ()
    """Names of further fields that a chosen class must have."""
    optional: tuple[type, ...] = ()
    """Protocols whose methods a chosen class can also have."""

    def kind(self, name: str) -> type[T]:
        """Return the class `name`. Raises ConfigError if the class does not exist or does not meet the contract."""
        kind = resolve(self.registry, name, self.what)
        if not (isinstance(kind, type) and is_dataclass(kind)):
            raise ConfigError(
                f"{self.what} {name!r} must be a dataclass that has the options as its fields and defines "
                f"{', '.join((*_members(self.protocol), *self.needs))}, got {kind!r}"
            )
        options = [each for each in inspect.get_annotations(kind).values() if "ClassVar" not in str(each)]
        if options and "__dataclass_fields__" not in vars(kind):  # only a base class is decorated
            raise ConfigError(
                f"{self.what} {name!r} has options. Decorate {kind.__name__} with @dataclass(frozen=True)",
                code="config.own_code",
            )
        if missing := self.missing(kind):
            raise ConfigError(f"{self.what} {name!r} must define {', '.join(missing)}")
        if name not in self.registry:
            self._check_spelling(kind)
        return kind

    def _check_spelling(self, kind: type) -> None:
        """Raise ConfigError if a method's name is similar to a method that the class could override but does not."""
        bases = [base for base in kind.__mro__[1:] if base is not object]
        known = {*_members(self.protocol), *(name for base in (*bases, *self.optional) for name in vars(base))}
        for name in (name for name, value in vars(kind).items() if callable(value) and name not in known):
            meant = difflib.get_close_matches(name, known - set(vars(kind)), n=1, cutoff=SIMILAR)
            if meant and not name.startswith("_"):
                raise ConfigError(
                    f"{kind.__name__}.{name} is not a method of {self.what}s (did you mean {meant[0]!r}?). Rename it",
                    code="config.own_code",
                )

    def missing(self, kind: type) -> list[str]:
        """Return the names of the contract's fields, methods and attributes that the dataclass `kind` does not have."""
        defined = {field.name for field in fields(kind)}
        members = [name for name in _members(self.protocol) if name not in defined and not hasattr(kind, name)]
        return members + [name for name in self.needs if name not in defined]

    def of_section(self, section: Mapping[str, Any]) -> type[T]:
        """Return the class that a section of the configuration names. Raises ConfigError if the name is invalid."""
        name = section.get("name") if isinstance(section, Mapping) else None
        if not isinstance(name, str):
            raise ConfigError(
                f"{self.what}.name must be set to one of {', '.join(self.registry)} or to package.module:NAME",
                code="config.missing",
                path=f"{self.what}.name",
            )
        return self.kind(name)

    def parse(self, section: Any) -> T:
        """Build the object that a section describes. The key `name` chooses the class, and all other keys are fields of
        this class. Raises pydantic's ValidationError if the section is invalid."""
        if not isinstance(section, Mapping):
            raise PydanticCustomError("section", "a section with the key `name` is expected")
        try:
            kind = self.of_section(section)
        except ConfigError as error:
            reason = PydanticCustomError(COMPLETE, "{reason}", {"reason": str(error)})
            wrong: list[InitErrorDetails] = [{"type": reason, "loc": ("name",), "input": section.get("name", section)}]
            raise ValidationError.from_exception_data(self.what, wrong) from error
        options = {key: value for key, value in section.items() if key != "name"}
        known, wrong = _options_of(kind), []
        for key in options.keys() - set(known):
            others = [each for each, other in self.registry.items() if key in _options_of(other)]
            about = {"name": section["name"], "known": known, "others": others}
            reason = PydanticCustomError(UNKNOWN, "unknown parameter", about)
            wrong.append({"type": reason, "loc": (key,), "input": options[key]})
        try:
            found: T = adapter(kind).validate_json(json.dumps({k: v for k, v in options.items() if k in known}))
        except ValidationError as error:
            wrong += [_again(each) for each in error.errors()]
        if wrong:
            raise ValidationError.from_exception_data(self.what, wrong)
        return found

    def section(self, value: T) -> dict[str, Any]:
        """Return the section from which `parse` builds an equal object."""
        kind = type(value)
        names = (name for name, each in self.registry.items() if each is kind)
        options = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}  # type: ignore[arg-type]
        return {"name": "", **options} | {"name": next(names, f"{kind.__module__}:{kind.__qualname__}")}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema that parses a section. The JSON schema lists the registered classes with their options."""
        registered = {name: handler.generate_schema(kind) for name, kind in self.registry.items()}
        listed = core_schema.tagged_union_schema(registered, discriminator="name")
        written = core_schema.plain_serializer_function_ser_schema(self.section)
        return core_schema.no_info_plain_validator_function(
            self.parse, json_schema_input_schema=listed, serialization=written
        )


def _options_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.init and field.name != "name"]


def _again(error: Any) -> InitErrorDetails:
    """Convert one entry of `ValidationError.errors()` so that a validator can raise the error again."""
    kind = PydanticCustomError(error["type"], "{message}", {**error.get("ctx", {}), "message": error["msg"]})
    return {"type": kind, "loc": error["loc"], "input": error["input"]}


def _members(protocol: type) -> list[str]:
    """Return the names of the public methods and attributes of a protocol and of the protocol's base classes."""
    bases = [base for base in reversed(protocol.__mro__) if base not in (object, Protocol, Generic)]
    names = [name for base in bases for name in (*inspect.get_annotations(base), *vars(base))]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]
