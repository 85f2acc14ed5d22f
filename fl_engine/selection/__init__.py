"""Selectors choose the clients of a round and the pool model that each client receives.

A selector is a frozen dataclass with `init`, `pick` and `learn` (see `contracts.Selector`). Every algorithm accepts
every selector. Selectors store learned values in tables, which are part of the algorithm's state.
"""

from typing import Annotated

from fl_engine.core.contracts import Selector
from fl_engine.core.registry import Contract
from fl_engine.selection.curiosity import Curiosity
from fl_engine.selection.oort import Oort
from fl_engine.selection.uniform import ByCapacity, ResourceTable, Uniform

SELECTIONS: dict[str, type[Selector]] = {
    "uniform": Uniform,
    "by_capacity": ByCapacity,
    "resource_table": ResourceTable,
    "curiosity": Curiosity,
    "oort": Oort,
}

Selection = Annotated[Selector, Contract("selection", SELECTIONS, Selector)]

__all__ = ["SELECTIONS", "ByCapacity", "Curiosity", "Oort", "ResourceTable", "Selection", "Uniform"]
