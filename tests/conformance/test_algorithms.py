"""Every algorithm of the registry against the laws that all of them share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_engine.aggregation.privacy import Private
from fl_engine.aggregation.rules import Aggregation
from fl_engine.algorithms import (
    ALGORITHMS,
    AdaptiveFL,
    DAdaQuant,
    Decoupled,
    DepthFL,
    FedAvg,
    FederatedDropout,
    FedRolex,
    FedX,
    HeteroFL,
    QuantizedFedAvg,
)
from fl_engine.algorithms.fedx import Assigned
from fl_engine.core.allowed import trust
from fl_engine.core.contracts import Algorithm
from fl_engine.exchange.client import Site
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.checks import check_search
from fl_engine.testing.plugins import OBJECTIVE, OPTIMIZER
from fl_engine.testing.tiny import TRAINING, TinyNet, on_devices_alone


class TestAlgorithms(AlgorithmSuite):
    @pytest.fixture(params=sorted(ALGORITHMS))
    def algorithm(self, request: pytest.FixtureRequest) -> Algorithm:
        return on_devices_alone(ALGORITHMS[request.param](training=TRAINING))  # type: ignore[no-any-return]

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        return not isinstance(algorithm, AdaptiveFL | FedAvg)  # their servers do not ask for capacities

    def with_aggregation(self, algorithm: Algorithm, aggregation: Aggregation) -> Algorithm:
        if isinstance(algorithm, DepthFL):
            algorithm = replace(algorithm, alpha=0.0)
        if isinstance(algorithm, HeteroFL | FedRolex | FederatedDropout):
            algorithm = replace(algorithm, static_bn=False)
        if isinstance(algorithm, DAdaQuant) and isinstance(aggregation, Private):
            algorithm = replace(algorithm, phi=None)
        return super().with_aggregation(algorithm, aggregation)

    def most_orders(self, algorithm: Algorithm, site: Site) -> int:
        levels = 3 if isinstance(algorithm, Decoupled) else 1  # k devices for each
        return levels * super().most_orders(algorithm, site)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_search_begins_with_what_is_configured(name: str) -> None:
    """As it is by default: with the server's fine-tuning too."""
    check_search(ALGORITHMS[name](), TinyNet())


class TestAllLargeOnCapableDevices(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> Algorithm:
        return FedAvg(training=TRAINING, eligible="capable")


class TestFedXWithASubNetworkForEachTier(AlgorithmSuite):
    """Two tiers have the same. They have no bits of their own: the suite says how its weights travel."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        tiers = {"weak": Assigned("small"), "medium": Assigned("small"), "strong": Assigned("large")}
        return FedX(training=TRAINING, widths=(0.4, 0.75, 1.0), assigned=tiers, fine_tuning=None)


class TestQuantizedFedAvgOfTheSmallestBothWays(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> Algorithm:
        return QuantizedFedAvg(training=TRAINING, level="small", bits_up=8)

    def ends_in_the_whole(self, algorithm: Algorithm) -> bool:
        return False


class TestAnObjectiveAndAnOptimiserOfOnesOwn(AlgorithmSuite):
    """With HeteroFL, whose scaler and masks stay beside them."""

    @pytest.fixture
    def algorithm(self) -> Algorithm:
        trust([OBJECTIVE, OPTIMIZER])  # as a configuration that names them does
        return HeteroFL(training=replace(TRAINING, objective=OBJECTIVE, optimizer=OPTIMIZER), static_bn=False)
