"""How the updates of a round become one model: the aggregations, one file each. A new one is a file and a line here.

`algorithm.aggregation.name` chooses one of them, or one's own as `package.module:NAME` (`protocol.AggregationRule`).
The server's optimiser steps after the aggregation.
"""

from typing import Annotated

from fl_engine.aggregation.mean import Mean
from fl_engine.aggregation.middle import Median, TrimmedMean
from fl_engine.aggregation.privacy import Private
from fl_engine.aggregation.protocol import Aggregate, AggregationRule
from fl_engine.core.registry import Contract

AGGREGATIONS: dict[str, type[AggregationRule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "private": Private,
}

Aggregation = Annotated[AggregationRule, Contract("aggregation", AGGREGATIONS, AggregationRule)]
"""For an algorithm's field: chosen by name in a configuration, or one's own as `package.module:NAME`."""

__all__ = ["AGGREGATIONS", "Aggregate", "Aggregation", "Mean", "Median", "Private", "TrimmedMean"]
