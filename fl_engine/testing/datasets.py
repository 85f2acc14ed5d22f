"""What every data set has to hold, for pytest: subclass `DatasetSuite`, give it a `load` fixture, done.

class TestMine(DatasetSuite):
    @pytest.fixture(scope="module")
    def load(self): return lambda: my_data.load(root)
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fl_engine.core.types import Data
from fl_engine.data.files import fingerprint


class DatasetSuite:
    @pytest.fixture(scope="module")
    def load(self) -> Callable[[], Data]:
        """A function that loads the data set anew; skip here where its files are not there."""
        raise NotImplementedError("a DatasetSuite needs a `load` fixture")

    @pytest.fixture(scope="module")
    def data(self, load: Callable[[], Data]) -> Data:
        return load()

    def test_images_are_bytes_and_labels_are_long(self, data: Data) -> None:
        for x, y in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
            assert x.dtype == torch.uint8
            assert x.dim() == 4
            assert y.dtype == torch.int64
            assert y.shape == (len(x),)
            assert len(x) > 0
        assert data.train_x.shape[1:] == data.test_x.shape[1:] == data.input_chw

    def test_natural_clients_name_every_training_sample(self, data: Data) -> None:
        if data.natural_client is not None:
            assert data.natural_client.dtype == torch.int64
            assert data.natural_client.shape == data.train_y.shape

    def test_every_class_occurs_in_both_parts(self, data: Data) -> None:
        for y in (data.train_y, data.test_y):
            assert 0 <= int(y.min()) <= int(y.max()) < data.classes
            assert (y.bincount(minlength=data.classes) > 0).all()

    def test_images_use_the_range_of_a_byte(self, data: Data) -> None:
        """Values of 0..1 or 0..16 would pass for bytes and be divided by 255 all the same."""
        assert int(data.train_x.min()) == 0
        assert int(data.train_x.max()) > 127

    def test_loading_twice_is_equal(self, data: Data, load: Callable[[], Data]) -> None:
        assert fingerprint(load()) == fingerprint(data)

    def test_normalised_training_images_have_zero_mean_and_unit_deviation(self, data: Data) -> None:
        channels = data.input_chw[0]
        assert len(data.mean) == len(data.std) == channels
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
