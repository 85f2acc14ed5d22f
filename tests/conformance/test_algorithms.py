"""Every algorithm of the registry against the laws that all of them share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fl_engine.algorithms import ALGORITHMS, AllLarge
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import TRAINING
from fl_engine.types import Algorithm


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestAlgorithms(AlgorithmSuite):
    @pytest.fixture(params=sorted(ALGORITHMS))
    def algorithm(self, request: pytest.FixtureRequest) -> Algorithm:
        return ALGORITHMS[request.param](training=TRAINING)


class TestAllLargeOnEveryDevice(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> Algorithm:
        return AllLarge(training=TRAINING, eligible="all")

    def promises_to_fit(self, algorithm: Algorithm) -> bool:
        return False
