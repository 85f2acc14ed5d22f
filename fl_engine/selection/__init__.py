"""Which clients take part in a round, and which pool model each is sent.

A selector is a frozen dataclass with `init`, `pick` and `learn` (see `types.Selector`); any algorithm takes any of
them. What a selector learns from the models that come back lies in tables, in the algorithm's state.
"""

from typing import Annotated

from pydantic import Field

from fl_engine.selection.curiosity import Curiosity
from fl_engine.selection.resource_table import ResourceTable
from fl_engine.selection.uniform import Uniform

Selection = Annotated[Uniform | ResourceTable | Curiosity, Field(discriminator="name")]
"""For an algorithm's field: chosen by name in a configuration."""

__all__ = ["Curiosity", "ResourceTable", "Selection", "Uniform"]
