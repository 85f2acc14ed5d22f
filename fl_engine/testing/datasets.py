"""Test suite for data sets. Subclass `DatasetSuite` and define the fixture `load`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fl_engine.core.samples import Data
from fl_engine.data.transforms import fingerprint


class DatasetSuite:
    """Test suite that requires a fixture `load` with scope "module". The fixture returns a function that loads the data
    set, or skips the tests if the files of the data set do not exist."""

    @pytest.fixture(scope="module")
    def data(self, load: Callable[[], Data]) -> Data:
        return load()

    def test_every_label_occurs_in_both_parts(self, data: Data) -> None:
        """Labels of regression targets are not checked, because some bins may be empty."""
        for y in (data.train_y, data.test_y):
            if data.task.label_count and not y.is_floating_point():
                assert (np.bincount(data.task.labels(y), minlength=data.task.label_count) > 0).all()

    def test_images_use_the_range_of_a_byte(self, data: Data) -> None:
        """Pixels must have values from 0 to 255, because all images are divided by 255."""
        if not data.has_images:
            pytest.skip("the samples are not images")
        for x in (data.train_x, data.test_x):
            assert int(x.min()) == 0
            assert int(x.max()) > 127

    def test_loading_twice_is_equal(self, data: Data, load: Callable[[], Data]) -> None:
        assert fingerprint(load()) == fingerprint(data)

    def test_normalised_samples_have_zero_mean_and_unit_deviation(self, data: Data) -> None:
        if not data.mean or ({*data.mean} == {0.0} and {*data.std} == {1.0}):
            pytest.skip("the samples are not normalised, or only scaled to 0..1")
        axis = 1 if data.train_x.dim() == 4 else -1
        for feature, mean, std in zip(data.train_x.movedim(axis, 0), data.mean, data.std, strict=True):
            x = feature.float() / 255 if data.has_images else feature.double()
            assert float((x.mean() - mean) / std) == pytest.approx(0, abs=0.02)
            assert float(x.std() / std) == pytest.approx(1, abs=0.02)
