"""What every data set has to hold, for pytest: subclass `DatasetSuite`, give it a `load` fixture, done.

class TestMine(DatasetSuite):
    @pytest.fixture(scope="module")
    def load(self): return lambda: my_data.load(root)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fl_engine.core.samples import Data
from fl_engine.data.transforms import fingerprint


class DatasetSuite:
    @pytest.fixture(scope="module")
    def load(self) -> Callable[[], Data]:
        """A function that loads the data set anew; skip here where its files are not there."""
        raise NotImplementedError("a DatasetSuite needs a `load` fixture")

    @pytest.fixture(scope="module")
    def data(self, load: Callable[[], Data]) -> Data:
        return load()

    def test_every_label_occurs_in_both_parts(self, data: Data) -> None:
        """Every class; bins of numbers may be empty where many numbers are equal."""
        for y in (data.train_y, data.test_y):
            if data.task.label_count and not y.is_floating_point():
                assert (np.bincount(data.task.labels(y), minlength=data.task.label_count) > 0).all()

    def test_images_use_the_range_of_a_byte(self, data: Data) -> None:
        """Values of 0..1 or 0..16 would pass for bytes and be divided by 255 all the same."""
        if not data.has_images:
            pytest.skip("no images")
        for x in (data.train_x, data.test_x):
            assert int(x.min()) == 0
            assert int(x.max()) > 127

    def test_loading_twice_is_equal(self, data: Data, load: Callable[[], Data]) -> None:
        assert fingerprint(load()) == fingerprint(data)

    def test_normalised_floats_have_zero_mean_and_unit_deviation(self, data: Data) -> None:
        if data.has_images or not data.mean:
            pytest.skip("no floats that are normalised")
        features = data.normalise(data.train_x).double().movedim(1 if data.train_x.dim() == 4 else -1, 0).flatten(1)
        torch.testing.assert_close(features.mean(1), torch.zeros(len(features)).double(), atol=0.02, rtol=0)
        torch.testing.assert_close(features.std(1), torch.ones(len(features)).double(), atol=0.02, rtol=0)

    def test_normalised_images_have_zero_mean_and_unit_deviation(self, data: Data) -> None:
        if not data.has_images:
            pytest.skip("no images")
        if {*data.mean} == {0.0} and {*data.std} == {1.0}:
            pytest.skip("pixels in 0..1, as the data set says")
        channels = data.input_shape[0]
        every_byte = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, 1, 1)
        normalised = data.normalise(every_byte)
        assert normalised.dtype == torch.float32
        assert normalised.shape == every_byte.shape
        for channel in range(channels):
            # Exact, and much faster than to normalise the images: weigh each byte by how often it occurs.
            counts = data.train_x[:, channel].flatten().bincount(minlength=256).double()
            values = normalised[:, channel, 0, 0].double()
            mean = float(counts @ values / counts.sum())
            deviation = float(counts @ (values - mean).square() / counts.sum()) ** 0.5
            assert mean == pytest.approx(0, abs=0.02)
            assert deviation == pytest.approx(1, abs=0.02)
