"""The inputs of a network's last layer, computed for the training samples."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import Data, batch_layout, split
from fl_engine.core.slicing import runnable
from fl_engine.core.types import FULL, Params

LAST = (nn.Linear, nn.Conv2d)


def pooled(family: ModelFamily, params: Params, data: Data, batch_size: int = 128) -> NDArray[np.float32]:
    """(N_train, F): the input of the network's last linear or convolution layer for each training sample, averaged over
    pixels or time steps where the input has any. Raises ModelError for a network without such a layer."""
    module = runnable(family, FULL, {name: tensor.clone() for name, tensor in params.items()}).eval()
    layers = [layer for layer in module.modules() if isinstance(layer, LAST)]
    if not layers:
        raise ModelError(f"{type(family).__name__} has no linear layer and no convolution whose input could be read")
    found: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if isinstance(layers[-1], nn.Conv2d):
            found.append(x.mean((2, 3)))
        else:
            found.append(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)

    def answer(x: Tensor) -> None:
        module(batch_layout(data.normalise(x)))

    parts = split(data.train_x, batch_size, answer)
    layers[-1].register_forward_pre_hook(look)
    with torch.no_grad():
        for x in parts:
            answer(x)
    return torch.cat(found).float().numpy()
