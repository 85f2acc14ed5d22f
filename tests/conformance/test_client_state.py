"""Algorithms whose clients keep something, those of the registry too, against the laws that all of them share."""

from __future__ import annotations

from typing import Any

import pytest

from fl_engine.algorithms import ALGORITHMS
from fl_engine.core.contracts import Algorithm, KeepsClientState
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.client_state import ClientStateSuite
from fl_engine.testing.personal import PersonalHeads
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
