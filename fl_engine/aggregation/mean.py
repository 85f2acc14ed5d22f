"""The weighted mean of the updates, element by element: sum_m d_m * p_m / sum_m d_m over the updates m that hold the
element p of the global model; where no update holds it, p keeps its old value (`averaging.Mean`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fl_engine.aggregation import averaging
from fl_engine.aggregation.clipping import clipped
from fl_engine.aggregation.privacy import Public
from fl_engine.aggregation.protocol import Aggregate
from fl_engine.core.fields import STRICT, Positive
from fl_engine.core.types import ParamLayout, Params


@dataclass(frozen=True)
class Mean:
    """FedAvg: weighted as the algorithm says."""

    __pydantic_config__ = STRICT
    name: Literal["mean"] = "mean"
    clip: Positive | None = None
    """Largest L2 norm of an update's change from the server's weights; running statistics neither count nor are scaled;
    null: no limit. With a coarse codec on the way down, most of this change may be the codec's rounding: what a client
    learned is then scaled down with it."""

    def start(self, old: Params, layout: ParamLayout, public: Public) -> Aggregate:
        return clipped(averaging.Mean(old, layout), old, layout, self.clip)
