"""Bounding boxes in images, and the tensor format of targets that contain boxes.

A box is (centre x, centre y, width, height), as fractions of the image's width and height. Targets are float32 (...,
boxes, 5), and each row contains a category and a box. The number of rows is the same for all images of a data set. A
row without a box contains the category `NONE` and four zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

NONE = -1
"""Category of a row without a box."""
TINY = 1e-12
"""Before dividing by an area, the area is clamped to at least this fraction of the image's area."""
VISIBLE = 0.1
"""Minimum fraction of a moved box that must be inside the image; otherwise the box is removed."""


def are_boxes(y: Tensor) -> bool:
    """Return whether the targets y (N, ...) are boxes."""
    return y.dim() == 3 and y.shape[2] == 5 and y.is_floating_point()


def present(y: Tensor) -> Tensor:
    """Return a bool mask (..., boxes) of the rows that contain a box."""
    return y[..., 0] >= 0


def corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper left and the lower right corners of boxes (..., 4), both with the shape (..., 2)."""
    centre, size = boxes[..., :2], boxes[..., 2:4]
    return centre - size / 2, centre + size / 2


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the intersection over union (IoU) of boxes (..., 4). The result has the broadcast shape (...). The IoU of
    two boxes without area is 0."""
    return _shares(a, b)[0]


def generalised_overlap(a: Tensor, b: Tensor) -> Tensor:
    """Return the generalised IoU, from -1 to 1 (Rezatofighi et al., CVPR 2019, Alg. 1). GIoU is the IoU minus the
    fraction of the enclosing box that neither box covers. For disjoint boxes, only the GIoU has a nonzero gradient."""
    shared, union = _shares(a, b)
    (low_a, high_a), (low_b, high_b) = corners(a), corners(b)
    around = (torch.maximum(high_a, high_b) - torch.minimum(low_a, low_b)).prod(-1)
    return shared - (around - union) / around.clamp(min=TINY)


def _shares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the IoU and the area of the union of each pair of boxes."""
    (low_a, high_a), (low_b, high_b) = corners(a), corners(b)
    shared = (torch.minimum(high_a, high_b) - torch.maximum(low_a, low_b)).clamp(min=0).prod(-1)
    union = a[..., 2:4].prod(-1) + b[..., 2:4].prod(-1) - shared
    return shared / union.clamp(min=TINY), union


def moved(y: Tensor, matrices: Tensor) -> Tensor:
    """Move the boxes of targets (B, boxes, 5). Each point p of an image moves to A p + t.

    `matrices` (B, 2, 3) contain [A | t], in fractions of the image size. The new box is the smallest axis-aligned box
    around the four moved corners, cropped to the image. The box is removed if less than `VISIBLE` of its area remains.
    """
    low, high = corners(y[..., 1:])
    corner = torch.stack([low, high], dim=-2)  # the axes are batch, box, corner and coordinate
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
    """Return a copy of the targets without the boxes for which the mask `gone` (..., boxes) is true."""
    empty = torch.tensor([float(NONE), 0, 0, 0, 0], dtype=y.dtype, device=y.device)
    return torch.where(gone[..., None], empty, y)
