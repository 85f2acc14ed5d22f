"""Registry of aggregations. List a new aggregation in AGGREGATIONS."""

from __future__ import annotations

from typing import Annotated

from fl_engine.aggregation.fltrust import FLTrust
from fl_engine.aggregation.judged import Judged
from fl_engine.aggregation.multi_krum import MultiKrum
from fl_engine.aggregation.privacy import Private
from fl_engine.aggregation.rules import RULES, AggregationRule
from fl_engine.core.registry import Contract

AGGREGATIONS: dict[str, type[AggregationRule]] = {
    **RULES,
    "judged": Judged,
    "multi_krum": MultiKrum,
    "fltrust": FLTrust,
    "private": Private,
}

Aggregation = Annotated[AggregationRule, Contract("aggregation", AGGREGATIONS, AggregationRule)]
