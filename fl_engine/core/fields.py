"""Types of hyper-parameters: a value outside of them is refused when a configuration is read."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True)
"""For `__pydantic_config__` of dataclasses that are built from a configuration."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """A section of the configuration: nothing unknown, nothing converted, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
