"""The algorithms, one file each. A new one is a file and a line here."""

from fl_engine.algorithms.all_large import AllLarge
from fl_engine.algorithms.flexfl import FlexFL
from fl_engine.types import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "all_large": AllLarge,
    "flexfl": FlexFL,
}

__all__ = ["ALGORITHMS", "AllLarge", "FlexFL"]
