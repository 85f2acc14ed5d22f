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
    """`at_home` for pydantic. Raises ValueError."""
    try:
        return at_home(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error


UserPath = Annotated[str, AfterValidator(user_path)]
"""A path, or an address that may hold one, as a user writes it: `~` becomes the home folder."""


def is_model(kind: Any) -> TypeGuard[type[BaseModel]]:
    """Whether an annotation is a model of pydantic's. (In Python 3.10 `list[int]` passes as a type.)"""
    return get_origin(kind) is None and isinstance(kind, type) and issubclass(kind, BaseModel)


class Moves(Enum):
    """What another value of a parameter moves. It stands in the annotation of the parameter's field, or of a section's
    for all of it; without one it is RESULT. Every list of parameters of one kind is derived from this."""

    RESULT = "the model"
    LENGTH = "how far a run goes"
    ANSWERS = "which answers a round has, by the clock on the wall"
    NUMERICS = "bits, as a run's record of its numerics tells"
    EXECUTION = "nothing but how it is executed"
    PLACE = "nothing but where things are kept and told"


class Unseen:
    """Annotates a section that clients are not told: its addresses may hold passwords."""


class Section(BaseModel):
    """A section of the configuration: nothing unknown, nothing converted, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class LeavesOut(BaseModel):
    """Leaves empty ones of these fields out of a file: it then has the same bytes as before the fields existed, and so
    the checksum that other files hold of it."""

    left_out: ClassVar[tuple[str, ...]]

    @model_serializer(mode="wrap")
    def _without_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if value or name not in self.left_out}


MOST_KINDS = 512
"""Classes that are defined again and again, as in a notebook, are forgotten in time."""
_adapter = lru_cache(MOST_KINDS)(TypeAdapter)
_hints = lru_cache(MOST_KINDS)(get_type_hints)


def adapter(kind: Any) -> TypeAdapter[Any]:
    """`pydantic.TypeAdapter` of a class or annotation."""
    return _adapter(kind)


def hints(kind: Any) -> dict[str, Any]:
    """`typing.get_type_hints` of a class; not to be changed."""
    return _hints(kind)
