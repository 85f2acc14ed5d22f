"""Networks of one's own: layers that the guide promises, networks that no trace can follow, and their source."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flexfleet as ff
from fl_engine.core.errors import ModelError, PoolError
from fl_engine.core.types import HEAD
from flexfleet.pipeline.prepare import Resolved
from tests.harness.from_python import SMALL

MODULE = """
import torch
from torch import nn


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))


class Reversed(Plain):
    def forward(self, x):
        return self.last(Reverse.apply(torch.relu(self.first(x.flatten(1)))))
"""


@pytest.fixture
def networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module of networks, which no other test imports."""
    name = f"networks_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


WHOLE = ["fedavg", "fedsgd", "fedprox", "fedopt", "all_large", "quantized_fedavg"]
WIDE = "{name: heterofl, widths: [1.0], mask_labels: false, scaler: false}"


@pytest.mark.parametrize("algorithm", [*(f"{{name: {name}}}" for name in WHOLE), WIDE])
def test_algorithm_that_sends_whole_model_needs_no_trace(algorithm: str, networks: str) -> None:
    sets = ["dataset.name=digits", f"model.name={networks}:Reversed", f"algorithm={algorithm}"]
    assert Resolved.load(None, sets).family.layout().groups == {HEAD: 10}


@pytest.mark.parametrize("algorithm", ["{name: heterofl}", "{name: fedavg, mask_labels: true}"])
def test_algorithm_that_cuts_traces_the_network(algorithm: str, networks: str) -> None:
    sets = ["dataset.name=digits", f"model.name={networks}:Plain", f"algorithm={algorithm}"]
    assert "first" in Resolved.load(None, sets).family.layout().groups
    with pytest.raises(ModelError):
        _ = Resolved.load(None, [each.replace("Plain", "Reversed") for each in sets]).family


def test_masked_labels_need_an_output_layer(networks: str) -> None:
    network = f"model={{name: '{networks}:Plain', whole: true}}"
    with pytest.raises(ff.ConfigError, match=r"algorithm\.mask_labels"):
        _ = Resolved.load(None, ["dataset.name=digits", network, "algorithm={name: fedavg, mask_labels: true}"]).family


@pytest.mark.parametrize("algorithm", ["heterofl", "fedx_small", "adaptivefl"])
def test_algorithm_that_cuts_refuses_a_whole_network(algorithm: str, networks: str) -> None:
    with pytest.raises(PoolError) as error:
        ff.run(model={"name": f"{networks}:Reversed", "whole": True}, algorithm=algorithm, **SMALL)
    assert "model.whole" in str(error.value)


def test_reversed_gradient_is_trained_as_written(networks: str) -> None:
    more = {**SMALL, "rounds": 4, "learning_rate": 0.1, "client_fraction": 1.0}
    full = {
        network: ff.run(model=f"{networks}:{network}", algorithm="fedavg", **more).metrics["full"]
        for network in ("Plain", "Reversed")
    }
    assert full["Reversed"] < 0.3 < 0.6 < full["Plain"]


def test_model_of_changed_source_is_refused(networks: str, tmp_path: Path) -> None:
    result = ff.run(model=f"{networks}:Plain", algorithm="fedavg", **SMALL)
    x, file = torch.zeros(1, 1, 8, 8, dtype=torch.uint8), tmp_path / f"{networks}.py"
    before = result.model()(x)
    file.write_text(MODULE.replace("torch.relu", "torch.tanh"))
    for use in (lambda each: each.model(), lambda each: each.replay(1, 0), lambda each: each.resume(2)):
        with pytest.raises(ff.ConfigError, match=f"{networks}:Plain"):
            use(ff.load(result.run_id))
    file.write_text(MODULE)
    assert torch.equal(ff.load(result.run_id).model()(x), before)


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
def test_layer_that_the_guide_promises_runs_to_onnx(network: Any, own_folder: None) -> None:
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
