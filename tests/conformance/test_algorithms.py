"""Every algorithm of the registry against the laws that all of them share."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fl_engine.aggregation import Aggregation
from fl_engine.aggregation.privacy import Private
from fl_engine.aggregation.rules import Mean
from fl_engine.algorithms import (
    ALGORITHMS,
    AdaptiveFL,
    DAdaQuant,
    Decoupled,
    DepthFL,
    FedAvg,
    FedBN,
    FederatedDropout,
    FedRolex,
    FedX,
    HeteroFL,
    QuantizedFedAvg,
)
from fl_engine.algorithms.fedx import Assigned
from fl_engine.core.allowed import trust
from fl_engine.core.clients import kept_by_clients
from fl_engine.core.contracts import Algorithm, KeepsClientState, ModelFamily, ServerContext
from fl_engine.core.errors import ModelError
from fl_engine.core.types import Axis, RoundContext, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.models.layers import LayerMaker
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.client_state import ClientStateSuite
from fl_engine.testing.rounds import check_search
from fl_engine.testing.tiny import TRAINING, TinyNet, tiny_site
from tests.harness.made_up import without_fine_tuning
from tests.harness.plugins import OBJECTIVE, OPTIMIZER


class TestAlgorithms(AlgorithmSuite):
    @pytest.fixture(params=sorted(ALGORITHMS.keys() - {"fedbn"}))
    def algorithm(self, request: pytest.FixtureRequest) -> Algorithm:
        return without_fine_tuning(ALGORITHMS[request.param](training=TRAINING))  # type: ignore[no-any-return]

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

    def most_assignments(self, algorithm: Algorithm, site: Site) -> int:
        levels = 3 if isinstance(algorithm, Decoupled) else 1  # k devices for each
        return levels * super().most_assignments(algorithm, site)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_search_space_contains_the_defaults(name: str) -> None:
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


KEEPING = [kind for _, kind in sorted(ALGORITHMS.items()) if issubclass(kind, KeepsClientState) and kind is not FedBN]


class TestWhatClientsKeep(ClientStateSuite):
    @pytest.fixture(params=KEEPING, ids=lambda kind: kind.__name__)
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return request.param(training=TRAINING)


class NormNet(TinyNet):
    """The tiny network with batch norm after the convolution."""

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        layers = super().layers(make)
        layers["conv"] = make.conv_bn(self.input_shape[0], Axis("conv"), 3, "batch", relu=nn.ReLU())
        return layers


class TestFedBN(AlgorithmSuite, ClientStateSuite):
    """On a network with batch norm, because the suite's own network has none."""

    @pytest.fixture
    def family(self) -> ModelFamily:
        return NormNet()

    @pytest.fixture
    def algorithm(self) -> FedBN:
        return FedBN(training=TRAINING)

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        return False


@dataclass(frozen=True)
class WithMemory(FedAvg):
    """Sends memory from the first round on, and ignores its option `aggregation`."""

    def plan(self, state: Any, context: RoundContext) -> RoundPlan:
        plan, memory = super().plan(state, context), {name: t * 0 for name, t in state.params.items()}
        return replace(plan, assignments=tuple(replace(each, memory=memory) for each in plan.assignments))

    def merge(self, state: Any, plan: RoundPlan, results: Any, server: ServerContext) -> Any:
        return FedAvg.merge(replace(self, aggregation=Mean()), state, plan, results, server)


def test_suite_accepts_memory_in_the_first_round(tmp_path: Path) -> None:
    algorithm = WithMemory(training=TRAINING)
    AlgorithmSuite().test_encoding_weights_halves_the_bytes(algorithm, tiny_site(algorithm), tmp_path)


def test_suite_detects_a_merge_that_ignores_aggregation() -> None:
    with pytest.raises(AssertionError, match="aggregation"):
        AlgorithmSuite().test_merge_uses_the_option_aggregation(WithMemory(training=TRAINING), TinyNet())


OWN_PROJECT = """
import pytest
import torch
from fl_engine.algorithms import FedPer
from fl_engine.testing import AlgorithmSuite, ClientStateSuite
from fl_engine.testing.tiny import TRAINING

class TestMine(ClientStateSuite, AlgorithmSuite):
    promises_to_fit = lambda self, algorithm: False

    @pytest.fixture
    def algorithm(self):
        return FedPer(training=TRAINING)

def test_settings_are_restored():
    assert float(torch.tensor(1e-40) * 1) > 0
"""


def test_both_suites_work_without_a_conftest(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(OWN_PROJECT)
    some = "own_last_state or at_most_what or plan_is_pure or settings"
    command = [sys.executable, "-m", "pytest", "-q", "--strict-markers", "-k", some]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "4 passed" in done.stdout, done.stdout


def test_fedbn_refuses_a_network_without_batch_norm() -> None:
    algorithm = FedBN(training=TRAINING)
    with pytest.raises(ModelError):
        kept_by_clients(algorithm, TinyNet(), tiny_site(algorithm).pool)
