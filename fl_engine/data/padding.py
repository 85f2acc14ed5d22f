"""Images on larger black squares, for networks that need them."""

from __future__ import annotations

from dataclasses import replace

import torch

from fl_engine.core import boxes
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.core.task import has_boxes

LARGEST_SIDE = 1024
"""The largest side of a padded image, in pixels."""


def pad(data: Data, side: int) -> Data:
    """Centres all images on black squares of side x side; if a margin is odd, the larger half is right or below.
    Targets that are boxes stay around what they are about.

    For networks that need larger images (`TakesImages.min_hw`). Raises DataError for images larger than `side`, for a
    side above LARGEST_SIDE, and for samples that are not images.
    """
    if not data.has_images:
        raise DataError(f"{data.name} holds no images, and only images can be padded: set dataset.pad=none")
    _, height, width = data.input_shape
    down, right = side - height, side - width
    if down < 0 or right < 0 or side > LARGEST_SIDE:
        raise DataError(
            f"{data.name}: images of {height} x {width} cannot be padded to {side} x {side} "
            f"(at most {LARGEST_SIDE} x {LARGEST_SIDE})"
        )
    margins = (right // 2, right - right // 2, down // 2, down - down // 2)
    train_x, test_x = (torch.nn.functional.pad(x, margins) for x in (data.train_x, data.test_x))
    train_y, test_y = data.train_y, data.test_y
    if has_boxes(data.task):
        shares = torch.tensor([[width, 0, right // 2], [0, height, down // 2]], dtype=torch.float64) / side
        train_y, test_y = (boxes.moved(y.double(), shares.expand(len(y), 2, 3)).to(y) for y in (train_y, test_y))
    return replace(data, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
