"""Types of hyper-parameters, and what pydantic reads and writes them with."""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeGuard, get_origin, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
)

from fl_engine.core.errors import ConfigError
from fl_engine.core.text import at_home

STRICT = ConfigDict(extra="forbid", strict=True)
"""For `__pydantic_config__` of dataclasses that are built from a configuration."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]


def user_path(text: str) -> str:
    """Return `at_home(text)`. Raises ValueError, as pydantic expects."""
    try:
        return at_home(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


UserPath = Annotated[str, AfterValidator(user_path)]
"""A path, or an address that contains one. `~` becomes the home folder."""


def is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether an annotation is a pydantic model. (In Python 3.10 `list[int]` passes as a type.)"""
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


class Moves(Enum):
    """What changes if a parameter changes. Annotates a field, or a section for all its fields; the default is
    RESULT."""

    RESULT = "the model"
    LENGTH = "how far a run goes"
    ANSWERS = "which answers a round has, by the clock on the wall"
    NUMERICS = "bits, as a run's record of its numerics tells"
    EXECUTION = "nothing but how it is executed"
    PLACE = "nothing but where things are kept and told"


class Unseen:
    """Annotates a section that clients do not receive, because its addresses may contain passwords."""


class Section(BaseModel):
    """A section of the configuration: strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LeavesOut(BaseModel):
    """Omits these fields from the file if they are empty, so that they do not change the file's checksum."""

    left_out: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value or name not in self.left_out}


MOST_KINDS = 512
"""Bounds the caches below, because a notebook may define a class again and again."""
_adapter = lru_cache(MOST_KINDS)(TypeAdapter)
_hints = lru_cache(MOST_KINDS)(get_type_hints)


def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the cached `pydantic.TypeAdapter` of a class or annotation. Making one takes milliseconds."""
    return _adapter(kind)


def hints(kind: Any) -> dict[str, Any]:
    """Return the cached `typing.get_type_hints` of a class. Do not change the result."""
    return _hints(kind)
