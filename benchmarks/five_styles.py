"""Fashion-MNIST in five styles, whose clients differ in features and not in labels.

FedBN (Li et al., ICLR 2021) is evaluated on five sets of digits, where each client has the digits of one set. Here each
of 20 clients has 500 training and 100 test images of clothes in one of the styles in `STYLES`. Use the data set with
`dataset.name=benchmarks.five_styles:FIVE_STYLES` and `partition.rule=natural`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.data.transforms import byte_statistics
from fl_engine.datasets import Source
from fl_engine.datasets.mnist import FASHION_MNIST

CLIENTS = 20
TRAIN, TEST = 500, 100
"""Images of each client."""


def _with_noise(images: Tensor) -> Tensor:
    noise = seeds.rng(0, "five_styles/noise", len(images)).normal(0, 64, size=images.shape)
    return (images.float() + torch.from_numpy(noise)).clamp(0, 255).to(torch.uint8)


def _with_stripes(images: Tensor) -> Tensor:
    stripes = torch.zeros(images.shape[2:], dtype=torch.uint8)
    stripes[:, ::4] = 200
    return torch.maximum(images, stripes)


STYLES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda images: images,
    lambda images: 255 - images,
    lambda images: images // 4,
    _with_noise,
    _with_stripes,
)
"""The images as published, inverted, with a quarter of the brightness, with noise, and with vertical stripes."""


def load(root: Path) -> Data:
    """Load the images of 20 clients. Client i has the style i mod 5. Raises DataError like `IdxSet.load`."""
    data = FASHION_MNIST.load(root)
    train_x, train_y, owners = _of_clients(data.train_x, data.train_y, TRAIN)
    test_x, test_y, test_owners = _of_clients(data.test_x, data.test_y, TEST)
    mean, std = byte_statistics(train_x.numpy())
    return replace(
        data,
        name="five_styles",
        train_x=train_x,
        train_y=train_y,
        test_x=test_x,
        test_y=test_y,
        mean=mean,
        std=std,
        natural_client=owners,
        natural_test_client=test_owners,
    )


def _of_clients(x: Tensor, y: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the images, labels and clients of CLIENTS * `count` random samples, sorted by client."""
    chosen = torch.from_numpy(seeds.rng(0, "five_styles", count).permutation(len(x))[: CLIENTS * count])
    images = [STYLES[i % len(STYLES)](part) for i, part in enumerate(x[chosen].split(count))]
    owners = torch.from_numpy(np.repeat(np.arange(CLIENTS), count))
    return torch.cat(images), y[chosen], owners


FIVE_STYLES = Source(
    "Fashion-MNIST in five styles, 20 clients with 500 + 100 images", load, FASHION_MNIST.fetch, FASHION_MNIST.files
)
