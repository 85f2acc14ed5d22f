"""Boxes in images, as targets store them.

A box is (centre x, centre y, width, height), each a share of the image's width or height. Targets are float32 (...,
boxes, 5), a category and a box in each row. All images have the same number of rows; a row without a box has the
category `NONE` and zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
"""The category of a row without a box."""
TINY = 1e-12
"""As a share of the image: the smallest area that is divided by."""
VISIBLE = 0.1
"""A moved box keeps at least this share of its area in the image, as is common in detectors' training code."""


def present(y: Tensor) -> Tensor:
    """Return the rows of targets that hold a box, bool (..., boxes)."""
    return y[..., 0] >= 0


def corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return left upper and right lower corners, (..., 2) each, of boxes (..., 4)."""
    centre, size = boxes[..., :2], boxes[..., 2:4]
    return centre - size / 2, centre + size / 2


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union of boxes (..., 4), broadcast: (...). Two boxes without area have none."""
    return _shares(a, b)[0]


def generalised_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return GIoU (Rezatofighi et al., CVPR 2019, Alg. 1), in [-1, 1]: the IoU, less the share of the smallest box
    around both that neither fills. Unlike the IoU it has a gradient for boxes apart."""
    shared, union = _shares(a, b)
    (low_a, high_a), (low_b, high_b) = corners(a), corners(b)
    around = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).prod(-1)
    return shared - (around - union) / around.clamp(min=TINY)


def _shares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the area of the union."""
    (low_a, high_a), (low_b, high_b) = corners(a), corners(b)
    shared = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    union = a[..., 2:4].prod(-1) + b[..., 2:4].prod(-1) - shared
    return shared / union.clamp(min=TINY), union


def moved(y: Tensor, matrices: Tensor) -> Tensor:
    """Return targets (B, boxes, 5) after each image was mapped by p -> A p + t, `matrices` (B, 2, 3) = [A | t], points
    as shares of the image. A box becomes the smallest upright one around its four corners, within the image, and is
    removed if less than `VISIBLE` of it is left."""
    low, high = corners(y[..., 1:])
    corner = torch.stack([low, high], dim=-2)  # (B, boxes, 2, 2): which of the two, x or y
    xs, ys = corner[..., 0], corner[..., 1]
    points = torch.stack([xs.repeat_interleave(2, -1), ys.repeat(1, 1, 2)], dim=-1)  # (B, boxes, 4, 2)
    matrices = matrices.to(y)
    points = points @ matrices[:, None, :, :2].transpose(-1, -2) + matrices[:, None, None, :, 2]
    low, high = points.amin(-2), points.amax(-2)
    inside_low, inside_high = low.clamp(0, 1), high.clamp(0, 1)
    kept = (inside_high - inside_low).prod(-1) >= VISIBLE * (high - low).prod(-1).clamp(min=TINY)
    found = torch.cat([y[..., :1], (inside_low + inside_high) / 2, inside_high - inside_low], dim=-1)
    return without(found, ~(kept & present(y)))


def without(y: Tensor, gone: Tensor) -> Tensor:
    """Return targets without the boxes in the rows `gone` (..., boxes)."""
    empty = torch.tensor([float(NONE), 0, 0, 0, 0], dtype=y.dtype, device=y.device)
    return torch.where(gone[..., None], empty, y)
