"""A last batch of one sample: batch norm refuses one value per channel, so it joins another batch or is told."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.pool import measure_apoz
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.models.traced import from_module
from fl_engine.tasks import Classification
from fl_engine.training.evaluation import last_layer_inputs

SAMPLES = 65


class Vectors(nn.Module):
    running = True

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.a, self.bn = nn.Linear(5, 16), nn.BatchNorm1d(16, track_running_stats=self.running)
        self.relu, self.b = nn.ReLU(), nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.relu(self.bn(self.a(x))))
        return found


class OfTheBatch(Vectors):
    running = False


def family_of(network: type[nn.Module]) -> ModelFamily:
    made: ModelFamily = from_module(network)((5,), 4)
    return made


def numbers(count: int = SAMPLES) -> Data:
    x, y = torch.randn(count, 5, generator=torch.Generator().manual_seed(0)), torch.arange(count) % 4
    return Data("numbers", Classification(4), x, y, x, y)


@pytest.mark.parametrize("network", [Vectors, OfTheBatch])
def test_activations_are_measured_of_every_sample(network: type[nn.Module]) -> None:
    """With statistics of the batch the last sample is measured beside the batch before it; else batches are of 32."""
    family, data = family_of(network), numbers()
    params = initial_params(family, 0)
    module = family.module().eval()
    module.load_state_dict(params)
    sizes = [32, 33] if network is OfTheBatch else [32, 32, 1]
    seen: list[Tensor] = []
    module.b.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        for part in torch.split(data.train_x, sizes):
            module(part)
    wanted = torch.cat(seen)
    assert np.array_equal(last_layer_inputs(family, params, data, batch_size=32), wanted.numpy())
    (found,) = measure_apoz(family, params, data.train_x, batch_size=32)
    assert found == int((wanted == 0).sum()) / wanted.numel()
