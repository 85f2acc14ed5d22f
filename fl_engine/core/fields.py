"""Types of hyper-parameters, and helpers that read and write them with pydantic."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, ClassVar, TypeGuard, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_serializer

from fl_engine.core.errors import ConfigError
from fl_engine.core.text import at_home, is_http

STRICT = ConfigDict(extra="forbid", strict=True)
"""Value of `__pydantic_config__` in dataclasses that pydantic creates from a configuration."""


class Options:
    """Base class of dataclasses that pydantic creates, such as the options of an algorithm."""

    __pydantic_config__ = STRICT


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]


def user_path(text: str) -> str:
    """Return `at_home(text)`. Raises ValueError instead of ConfigError, because pydantic expects a ValueError."""
    try:
        return at_home(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


UserPath = Annotated[str, AfterValidator(user_path)]
"""A path, or a URL that contains a path. `~` and `$HOME` are replaced by the home folder."""


def _server(text: str) -> str:
    if not is_http(text):
        raise ValueError("must be http://host:port or https://host:port")
    return text


ServerAddress = Annotated[str, AfterValidator(_server)]


def is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Return whether an annotation is a pydantic model. Checking the origin excludes generic types such as `list[int]`,
    which are instances of `type` in Python 3.10."""
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


class Moves(Enum):
    """Annotation that describes what changing a parameter affects. On a section, the annotation applies to all fields
    of the section. The default is RESULT."""

    RESULT = "the model"
    LENGTH = "how far a run goes"
    ANSWERS = "which results a round has, by the real clock"
    NUMERICS = "the last bits of the model"
    EXECUTION = "only how the run is executed"
    PLACE = "only where things are stored and logged"


class Unseen:
    """Marks a section that is not sent to clients, because URLs in the section may contain passwords."""


class Section(BaseModel):
    """Base class of configuration sections, which are strict and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LeavesOut(BaseModel):
    """Omits the fields in `left_out` from JSON if they are empty, so that checksums of older files do not change."""

    left_out: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value or name not in self.left_out}


# The caches are bounded, because a notebook may define the same class many times.
_adapter, _hints = lru_cache(512)(TypeAdapter), lru_cache(512)(get_type_hints)


def adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the cached `pydantic.TypeAdapter` of a class or annotation."""
    return _adapter(kind)


def hints(kind: Any) -> dict[str, Any]:
    """Return the cached `typing.get_type_hints` of a class. Callers must not modify the result."""
    return _hints(kind)
