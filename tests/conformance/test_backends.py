"""Every backend of the registry against the laws that all of them share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.backends import BACKENDS, InProcess
from fl_engine.client import Site
from fl_engine.errors import EnvironmentFailure
from fl_engine.testing.backends import BackendSuite, Make
from fl_engine.testing.tiny import SEED, TRAINING, assert_same_outcomes, start_of, tiny_site
from fl_engine.types import Backend


class TestBackends(BackendSuite):
    @pytest.fixture(params=sorted(BACKENDS))
    def make(self, request: pytest.FixtureRequest) -> Make:
        def build(site: Site, devices: Sequence[str]) -> Backend:
            return BACKENDS[request.param](site, tuple(devices))

        return build


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(EnvironmentFailure, match=r"run\.devices names 'warp:9'"):
        InProcess(tiny_site(FlexFL()), ("cpu", "warp:9"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu")], ids="-".join)
def test_updates_from_several_accelerators_can_be_merged(devices: tuple[str, ...]) -> None:
    algorithm = FlexFL(training=TRAINING)
    site = tiny_site(algorithm)
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, 0, SEED)
    first, second = (list(InProcess(site, devices).run(algorithm, plan)) for _ in range(2))
    assert_same_outcomes(first, second)
    assert {t.device.type for t in algorithm.merge(state, plan, first).params.values()} == {"cpu"}
