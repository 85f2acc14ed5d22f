"""Each layer that docs/guides/own-networks.md promises, in a run from data to the ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flexfleet as ff


class Convolutional(nn.Module):
    """(B, 2, 6, ...) -> (B, 3), over `axes` axes of pixels or steps."""

    axes: ClassVar[int]

    def __init__(self) -> None:
        super().__init__()

        def kind(name: str) -> Any:
            return getattr(nn, f"{name}{self.axes}d")

        self.conv, self.batch = kind("Conv")(2, 8, 3, padding=1), kind("BatchNorm")(8)
        self.depthwise, self.instance = kind("Conv")(8, 8, 3, padding=1, groups=8), kind("InstanceNorm")(8, affine=True)
        self.transposed, self.group = kind("ConvTranspose")(8, 8, 2, 2), nn.GroupNorm(4, 8)
        self.pool, self.prelu, self.head = kind("MaxPool")(2), nn.PReLU(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.batch(self.conv(x)))
        x = self.prelu(self.group(self.transposed(self.pool(self.instance(self.depthwise(x))))))
        return self.head(x.flatten(2).mean(2))  # type: ignore[no-any-return]


class Over1(Convolutional):
    axes = 1


class Over2(Convolutional):
    axes = 2


class Over3(Convolutional):
    axes = 3


class Recurrent(nn.Module):
    """Tokens (B, 6) -> (B, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.rnn, self.gru = nn.RNN(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)
        self.lstm, self.head = nn.LSTM(8, 8, batch_first=True, bidirectional=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.gru(self.rnn(self.embedding(x))[0])[0])[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("network", [Over1, Over2, Over3, Recurrent])
def test_layer_that_the_guide_promises_runs_to_onnx(
    network: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, y = np.random.default_rng(0), np.arange(60) % 3
    shape = (60, 6) if network is Recurrent else (60, 2, *[6] * network.axes)
    x = rng.integers(0, 12, shape) if network is Recurrent else rng.normal(size=shape).astype(np.float32)
    options = {"training.batch_size": 5, "partition.minimum": 5, "publish.models": True, "tracking.mlflow": None}
    result = ff.run(
        ff.from_arrays(x, y), network, "heterofl", rounds=2, clients=4, local_epochs=1, client_fraction=0.5,
        options=options, progress=False,
    )  # fmt: skip
    assert result.status == "finished" and len(result.levels) > 1
    assert sorted(each.parent.name for each in result.folder.rglob("*.onnx")) == sorted(result.levels["name"])
