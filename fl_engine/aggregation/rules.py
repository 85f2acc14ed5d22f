"""The aggregations. A new one is a file and a line here.

`algorithm.aggregation.name` names one of them, or your own as `package.module:NAME` (`protocol.AggregationRule`). The
server's optimizer steps after the aggregation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from fl_engine.aggregation import averaging
from fl_engine.aggregation.privacy import Private, Public
from fl_engine.aggregation.protocol import Aggregate, AggregationRule, clipped
from fl_engine.aggregation.robust import Median, TrimmedMean
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.registry import Contract
from fl_engine.core.types import ParamLayout, Params


@dataclass(frozen=True)
class Mean:
    """FedAvg: the weighted mean of each element over the updates that hold it (`averaging.StreamingMean`)."""

    __pydantic_config__ = STRICT
    name: Literal["mean"] = "mean"
    clip: Positive | None = None
    """Largest L2 norm of the change of an update's weights; null: no limit. Running statistics neither count nor are
    scaled. With a coarse codec on the way down, most of this change may be the codec's rounding."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return clipped(averaging.StreamingMean(old, layout), old, layout, self.clip)


AGGREGATIONS: dict[str, type[AggregationRule]] = {
    "mean": Mean,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "private": Private,
}

Aggregation = Annotated[AggregationRule, Contract("aggregation", AGGREGATIONS, AggregationRule)]
"""The annotation of an algorithm's field."""

__all__ = ["AGGREGATIONS", "Aggregate", "Aggregation", "Mean", "Median", "Private", "TrimmedMean"]
