"""Every network of the registry, small, against the laws that all of them share."""

from __future__ import annotations

import pytest

from fl_engine.core.contracts import ModelFamily
from fl_engine.models import MODELS
from fl_engine.models.resnet import ResNet18
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.models import ModelSuite
from tests.harness.networks import SMALL


class TestModels(ModelSuite):
    @pytest.fixture(params=sorted(MODELS.keys() | SMALL.keys()))
    def family(self, request: pytest.FixtureRequest) -> ModelFamily:
        return SMALL[request.param]


class TestModelsOfOtherSamples(ModelSuite):
    @pytest.fixture(params=sorted(KINDS))
    def family(self, request: pytest.FixtureRequest) -> ModelFamily:
        return KINDS[request.param][0]


class TestResNetsWhoseStemIsTied(ModelSuite):
    @pytest.fixture
    def family(self) -> ModelFamily:
        return ResNet18((3, 12, 9), 5, width=0.1, channels=(64, 128, 256, 512))
