"""The options that all algorithms of sub-models share, with every algorithm of the registry."""

from __future__ import annotations

from typing import Any

import pytest

from fl_engine.algorithms import ALGORITHMS, Decoupled, DepthFL, FedAvg, FjORD, MultiBranch, QuantizedFedAvg
from fl_engine.testing.terms import TRAINING, TermsSuite
from fl_engine.testing.tiny import on_devices_alone


class TestTerms(TermsSuite):
    @pytest.fixture(params=sorted(ALGORITHMS))
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return on_devices_alone(ALGORITHMS[request.param](training=TRAINING))

    def aggregates_by_level(self, algorithm: Any) -> bool:
        return isinstance(algorithm, Decoupled)

    def keeps_statistics(self, algorithm: Any) -> bool:
        return not isinstance(algorithm, FjORD)

    def scales(self, algorithm: Any) -> bool:  # what these send has the full width
        return not isinstance(algorithm, FedAvg | DepthFL | MultiBranch | QuantizedFedAvg)
