"""Every codec of the registry against the laws that all of them share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fl_engine.codecs import CODECS, Half
from fl_engine.core.types import Codec
from fl_engine.testing.codecs import CodecSuite, Deflated


class TestCodecs(CodecSuite):
    @pytest.fixture(params=sorted(CODECS))
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return CODECS[request.param]()

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        return torch.clamp(tensor.abs() * 2**-11, min=2**-25) if isinstance(codec, Half) else torch.zeros(())


class TestDeflated(CodecSuite):
    """One that rounds at random, and whose streams have any length."""

    @pytest.fixture
    def codec(self) -> Codec:
        return Deflated()

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        return tensor.abs().max() / 99.9 if tensor.numel() else torch.zeros(())
