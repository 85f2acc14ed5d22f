"""Things that a configuration chooses by name: registered ones, and one's own as `package.module:NAME`.

A `Contract` says for one such choice (the algorithm, the selection, ...) what is registered, and what a class must have
to be chosen: the attributes and methods of a protocol. What does not fit is refused with the reason.
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
"""Type of a pydantic error whose message says by itself what arrived."""
UNKNOWN = "unknown_option"
"""Type of a pydantic error of an option that there is not. Its context has the `name` that was chosen, the options
`known` of it, and the `others` that may be chosen and have this one."""


def resolve(registry: Mapping[str, T], name: str, what: str) -> T:
    """Return a registered thing, or the object that `package.module:NAME` points to. Raises ConfigError if there is
    none, or if `core.allowed` does not let its module be imported or its function be called."""
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
    """What one choice in a configuration may name. As the annotation of a dataclass's field it makes pydantic build the
    chosen object: `Annotated[Selector, Contract("selection", SELECTIONS, Selector)]` takes `{name: uniform, model:
    largest}`, and `{name: my.module:Mine, ...}` with the fields of `Mine` as options."""

    what: str
    """What errors call the choice."""
    registry: Mapping[str, type[T]] = field(hash=False)
    protocol: type
    """Every method and attribute of it is required."""
    needs: tuple[str, ...] = ()
    """Fields that the dataclass must have besides."""
    optional: tuple[type, ...] = ()
    """Protocols that it may have; a method of theirs must take their arguments."""

    def kind(self, name: str) -> type[T]:
        """The named class. Raises ConfigError unless there is one that fits."""
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
        """What a dataclass lacks of the contract, a clause for each thing."""
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
        """The class that `name` in a section of the configuration names. Raises ConfigError."""
        name = section.get("name")
        if not isinstance(name, str):
            raise ConfigError(f"{self.what}.name is missing: name one, e.g. {self.what}: {{name: ...}}")
        return self.kind(name)

    # ------------------------------------------------------------------------------------ in a dataclass's field
    def parse(self, section: Any) -> T:
        """The object of a section: the class that `name` names, with the other entries as its fields. Raises pydantic's
        ValidationError, with the names of the entries as locations."""
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
        """The other way: of which section `parse` makes an equal object."""
        kind = type(value)
        names = (name for name, each in self.registry.items() if each is kind)
        options = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}  # type: ignore[arg-type]
        return {"name": "", **options} | {"name": next(names, f"{kind.__module__}:{kind.__qualname__}")}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Its JSON schema lists what is registered, with the options."""
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
    """An error that pydantic has reported, in the form in which a validator of ours can raise it."""
    said = PydanticCustomError(error["type"], "{said}", {**error.get("ctx", {}), "said": error["msg"]})
    return {"type": said, "loc": error["loc"], "input": error["input"]}


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """Names and values of a protocol's methods and attributes, those of the protocols that it extends first."""
    found: dict[str, Any] = {}
    for base in reversed(protocol.__mro__):
        if base not in (object, Protocol, Generic):
            found |= dict.fromkeys(inspect.get_annotations(base))
            found |= {
                name: value for name, value in vars(base).items() if callable(value) or isinstance(value, property)
            }
    return ((name, value) for name, value in found.items() if not name.startswith("_"))


def _call(name: str, method: Any) -> str:
    """`plan(state, round, seed)`"""
    return f"{name}({', '.join(list(inspect.signature(method).parameters)[1:])})"


def _refuses(kind: type, name: str, method: Any) -> str | None:
    """Why a class's method cannot be called with the arguments of the protocol's; None: it can."""
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
