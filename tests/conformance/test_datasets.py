"""Every data set of the registry, where its files are, against the suite that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from fl_engine.core.samples import Data
from fl_engine.datasets import DATASETS, data_root
from fl_engine.testing.datasets import DatasetSuite


class TestDatasets(DatasetSuite):
    @pytest.fixture(scope="module", params=sorted(DATASETS))
    def load(self, request: pytest.FixtureRequest) -> Callable[[], Data]:
        name: str = request.param
        source, root = DATASETS[name], data_root()
        # Only files that are not there are a reason to skip: damaged ones have to fail.
        if missing := source.missing(root):
            pytest.skip(f"{missing[0].name} not under {root}; flexfleet fetch {name}")
        return partial(source.load, root)

    def test_is_called_as_it_is_listed(self, data: Data) -> None:
        assert data.name in DATASETS
