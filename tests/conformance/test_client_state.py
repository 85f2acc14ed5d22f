"""Algorithms whose clients keep something, those of the registry too, against the laws that all of them share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_engine.algorithms import ALGORITHMS
from fl_engine.core.contracts import Algorithm, KeepsClientState
from fl_engine.core.types import FULL, WorkOrder
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.client_state import ClientStateSuite, with_state
from fl_engine.testing.plugins import PersonalHeads
from fl_engine.testing.tiny import TRAINING

KEEPING = [PersonalHeads, *(kind for _, kind in sorted(ALGORITHMS.items()) if issubclass(kind, KeepsClientState))]


class TestWhatClientsKeep(ClientStateSuite):
    @pytest.fixture(params=KEEPING, ids=lambda kind: kind.__name__)
    def algorithm(self, request: pytest.FixtureRequest) -> Any:
        return request.param(training=TRAINING)


class TestPersonalHeads(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> PersonalHeads:
        return PersonalHeads(training=TRAINING)

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        return False  # sends all the whole network


def test_an_order_keeps_what_the_server_computed_for_its_client() -> None:
    """The state is beside it, as SCAFFOLD needs it."""
    order = WorkOrder(0, 0, FULL, {}, 0, 0, memory={"w": torch.ones(2), "state/old": torch.ones(1)})
    assert with_state(order, {"own": torch.zeros(1)}).memory.keys() == {"w", "state/own"}
