"""Every codec of the registry against the laws that all of them share."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_engine.codecs import CODECS, CONTRACT, Half, Qsgd
from fl_engine.core.types import Codec
from fl_engine.testing.codecs import CodecSuite
from tests.harness.deflated import Deflated


class TestCodecs(CodecSuite):
    """Every registered codec; QSGD with few and many levels, in buckets of all sizes and codings of all kinds."""

    @pytest.fixture(
        params=[
            *(CODECS[name]() for name in sorted(CODECS)),
            Qsgd(bits=1, bucket=1, coding="fixed"),
            Qsgd(bits=3, bucket=None, coding="elias"),
            Qsgd(levels=9, bucket=5),
            Qsgd(bits=16, coding="elias"),
        ],
        ids=str,
    )
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        codec: Codec = request.param
        return codec

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        if isinstance(codec, Qsgd):
            return level_of(codec, tensor)
        return torch.clamp(tensor.abs() * 2**-11, min=2**-25) if isinstance(codec, Half) else torch.zeros(())

    def is_unbiased(self, codec: Codec) -> bool:
        return isinstance(codec, Qsgd)


def level_of(codec: Qsgd, tensor: Tensor) -> Tensor:
    """What a level is worth, for each element, and the rounding of float32, in which the level is computed too."""
    x, found = tensor.flatten(), torch.zeros(tensor.numel(), dtype=torch.float64)
    for start in range(0, len(x), codec.bucket or max(1, len(x))):
        part = slice(start, start + (codec.bucket or len(x)))
        found[part] = x[part].norm() / codec.s
    return (found.reshape(tensor.shape) * (1 + 2**-22) + tensor.abs() * 2**-20) + codec.s * 2.0**-125


class TestTheGuide(CodecSuite):
    """The codec of docs/guides/extending/codecs.md, word by word."""

    @pytest.fixture(scope="class")
    def codec(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Codec]:
        guide = (Path(__file__).parents[2] / "docs/guides/extending/codecs.md").read_text()
        (text,) = re.findall(r"```python\n# mycodec\.py.*?\n(.*?)```", guide, re.DOTALL)
        folder = tmp_path_factory.mktemp("guide")
        (folder / "mycodec.py").write_text(text)
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            importlib.import_module("mycodec")
            yield CONTRACT.parse({"name": "mycodec:BFloat16"})

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        return torch.clamp(tensor.abs() * 2**-8, min=2**-134)  # half of the smallest number of bfloat16


class TestDeflated(CodecSuite):
    """One that rounds at random, and whose streams have any length."""

    @pytest.fixture
    def codec(self) -> Codec:
        return Deflated()

    def most_error(self, codec: Codec, tensor: Tensor) -> Tensor:
        return tensor.abs().max() / 99.9 if tensor.numel() else torch.zeros(())

    def is_unbiased(self, codec: Codec) -> bool:
        return True
