"""Networks of one's own that no trace can follow: which algorithms train them as they are, and their source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flexfleet as ff
from fl_engine.core.errors import ModelError
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
