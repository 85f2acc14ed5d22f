"""Object detection: predict categories and boxes of objects in images at every cell of a grid. The metric is mAP-50."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import DataError, EnvironmentFailure, ModelError
from fl_engine.core.system import install_command
from fl_engine.core.task import Described, Measured, Metric, wrong_shape
from fl_engine.tasks.multilabel import divergence_of_labels

log = logging.getLogger(__name__)

BOX = 4
"""Number of outputs of a cell that describe a box. The outputs for the categories follow the box."""
PRIOR = 4.595
"""Value that is subtracted from category outputs, so that an output of 0 gives a score of .01. With initial scores of
.5, training diverges, because most cells have no object (Focal Loss, Lin et al., ICCV 2017, section 3.3)."""
LARGEST = 8.0
"""Maximum logarithm of the width or height of a box, measured in cells."""
BALANCE, FOCUS = 0.25, 2.0
"""Parameters alpha and gamma of the focal loss, with the values of Lin et al."""
BOX_WEIGHT = 2.0
CANDIDATES, DETECTIONS = 1000, 300
"""Maximum number of boxes per image before non-maximum suppression (as in FCOS's code), and maximum number of
detections per image (as in YOLOv8's code)."""
SAME = 0.6
"""Maximum IoU of two detections of one category in an image (as in FCOS's code, Tian et al., 2019)."""
ROUNDING = 1e-4
"""Tolerance for boxes outside of the image, as a fraction of the image size. Files contain rounded values."""
NEIGHBOURS = 1
"""A box can be the target of cells up to this many rows and columns away from the cell at the box's centre."""


@dataclass(frozen=True)
class Detection(Described):
    """Object detection. Targets are float32 (N, most, 5) with at most `most` boxes per image (see `core.boxes`).

    The network divides the image into a grid of any size and returns (batch, 4 + categories, H, W). The first two
    outputs of a cell are the offset of the box's centre from the cell's centre, measured in cells to the right and
    down. The next two outputs are the logarithms of the box's width and height in cells. All other outputs are category
    logits plus `PRIOR`.

    A box is the target of the cell that contains the box's centre, and of neighbouring cells whose centres are inside
    the box. If several boxes could be a cell's target, boxes whose centre is in the cell have priority, then smaller
    boxes (FCOS, section 3.1).
    """

    categories: int
    most: int
    """Maximum number of boxes per image."""

    name: ClassVar[str] = "detection"
    metric: ClassVar[Metric] = Metric("map50", low=0.0, high=1.0)
    label_word: ClassVar[str] = "most frequent category"
    boxes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.categories) is not int or self.categories < 1:
            raise DataError(f"detection: `categories` must be an integer of at least 1, got {self.categories!r}")
        if type(self.most) is not int or self.most < 1:
            raise DataError(f"detection: `most` must be an integer of at least 1, got {self.most!r}")

    @property
    def outputs(self) -> int:
        """Number of outputs per cell."""
        return BOX + self.categories

    @property
    def label_count(self) -> int:
        """Number of categories plus 1. The extra label marks images without boxes."""
        return self.categories + 1

    def check(self, y: Tensor, what: str) -> Tensor:
        if not y.is_floating_point() or y.dim() != 3 or y.shape[1:] != (self.most, 5):
            raise DataError(
                f"{what}: boxes must be floats of shape (N, {self.most}, 5), got "
                f"{str(y.dtype).removeprefix('torch.')} {tuple(y.shape)}. Each row contains (category, centre x, "
                f"centre y, width, height). Empty rows have category {boxes.NONE}"
            )
        y = y.float()
        held = boxes.present(y)
        category, (low, high) = y[..., 0], boxes.corners(y[..., 1:])
        known = (category == category.round()) & (category < self.categories) & (category >= boxes.NONE)
        within = (low >= -ROUNDING).all(-1) & (high <= 1 + ROUNDING).all(-1) & (y[..., 3:] > 0).all(-1)
        wrong = (~(known & (within | ~held))).nonzero()
        if len(wrong):
            image, row = wrong[0].tolist()
            raise DataError(
                f"{what}: a category must be from 0 to {self.categories - 1}, and a box's centre and size must be "
                f"fractions of the image, got {[round(v, 4) for v in y[image, row].tolist()]} in image {image}"
            )
        if not bool(held.any()):
            raise DataError(f"{what}: at least one image must have a box, because mAP is undefined without boxes")
        return boxes.without(y, ~held)

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the most frequent category of each image, or `categories` for images without boxes. In case of a tie,
        return the lowest category number."""
        counts = torch.stack([(y[..., 0] == category).sum(1) for category in range(self.categories)], dim=1)
        counts = torch.cat([counts, (counts == 0).all(1, keepdim=True)], dim=1)
        # If counts are equal, NumPy's argmax returns the first index, while torch's argmax may return any index.
        found: NDArray[np.int64] = counts.numpy().argmax(1)
        return found

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random targets with min(`most`, 10) boxes per image."""
        count_per_image = min(self.most, 10)
        size = 0.05 + 0.3 * torch.rand(count, count_per_image, 2, generator=generator)
        centre = size / 2 + (1 - size) * torch.rand(count, count_per_image, 2, generator=generator)
        category = torch.randint(0, self.categories, (count, count_per_image, 1), generator=generator)
        empty = torch.tensor([float(boxes.NONE), 0, 0, 0, 0]).repeat(count, self.most - count_per_image, 1)
        return torch.cat([torch.cat([category, centre, size], dim=2), empty], dim=1)

    def loss(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return the loss of each image. The category loss is the focal loss: the sum over cells and categories,
        divided by the number of cells with a target box. The box loss is `BOX_WEIGHT` times the mean of 1 - GIoU over
        cells with a target box."""
        box_b4p, logits_bcp = self._decoded(outputs_bo)
        owner_bp = self._owners(y, outputs_bo.shape[2], outputs_bo.shape[3])
        held_bp = owner_bp < self.most
        wanted_bp5 = y.gather(1, owner_bp.clamp(max=self.most - 1)[..., None].expand(-1, -1, 5))
        category_bp = torch.where(held_bp, wanted_bp5[..., 0], float(self.categories)).long()
        # Drop the last column, which marks cells that are not trained on a box.
        target_bcp = F.one_hot(category_bp, self.categories + 1)[..., :-1].transpose(1, 2).to(logits_bcp)
        entropy = F.binary_cross_entropy_with_logits(logits_bcp, target_bcp, reduction="none")
        missed = (target_bcp - logits_bcp.sigmoid()).abs()
        balance = BALANCE * target_bcp + (1 - BALANCE) * (1 - target_bcp)
        learning_b = held_bp.sum(1).clamp(min=1)
        category_loss = (balance * missed**FOCUS * entropy).sum((1, 2)) / learning_b
        apart = 1 - boxes.generalised_overlap(box_b4p.transpose(1, 2), wanted_bp5[..., 1:])
        box_loss = torch.where(held_bp, apart, 0.0).sum(1) / learning_b
        return category_loss + BOX_WEIGHT * box_loss

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """Subtract `PRIOR` from the logits, and return all outputs divided by the temperature."""
        return torch.cat([outputs_bo[:, :BOX], outputs_bo[:, BOX:] - PRIOR], dim=1) / temperature

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """Return KL(teacher || student) for each category. Each category has a separate probability (Yang et al.,
        Bridging Cross-task Protocol Inconsistency for Distillation in Dense Object Detection, ICCV 2023). For boxes,
        return the squared errors of the four values. The errors are multiplied by the teacher's highest score in the
        cell, because the boxes of cells without an object are arbitrary."""
        teacher = self.softened(teacher_bo, temperature)
        score = (teacher[:, BOX:] * temperature).amax(1, keepdim=True).sigmoid()
        of_boxes = score * (softened_bo[:, :BOX] - teacher[:, :BOX]).square()
        return torch.cat([of_boxes, divergence_of_labels(softened_bo[:, BOX:], teacher[:, BOX:])], dim=1)

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return float32 (batch, DETECTIONS + most, 6) with the detections, sorted by descending score, and the
        targets. Each row contains category, box and score; targets have score 1."""
        found = self.found(outputs_bo)
        return torch.cat([found, torch.cat([y, torch.ones_like(y[..., :1])], dim=2)], dim=1)

    def found(self, outputs_bo: Tensor) -> Tensor:
        """Return float32 (batch, DETECTIONS, 6): category, box and score of each object, in descending order of scores.
        Unused rows contain `NONE` and zeros. If boxes of one category have an IoU above `SAME`, only the box with the
        highest score is returned."""
        box_b4p, logits_bcp = self._decoded(outputs_bo.float())
        cells = logits_bcp.shape[2]
        # A stable sort orders equal scores in the same way on every machine.
        score_bn, at_bn = logits_bcp.sigmoid().flatten(1).sort(dim=1, descending=True, stable=True)
        score_bk, at_bk = score_bn[:, :CANDIDATES], at_bn[:, :CANDIDATES]
        category_bk = at_bk // cells
        box_bk4 = box_b4p.transpose(1, 2).gather(1, (at_bk % cells)[..., None].expand(-1, -1, BOX))
        low, high = boxes.corners(box_bk4)
        low, high = low.clamp(0, 1), high.clamp(0, 1)
        box_bk4 = torch.cat([(low + high) / 2, high - low], dim=2)
        kept_bk = _suppress(box_bk4, category_bk) & (box_bk4[..., 2:] > 0).all(-1)
        rows = torch.cat([category_bk[..., None].to(box_bk4), box_bk4, score_bk[..., None]], dim=2)
        empty = torch.tensor([float(boxes.NONE), 0, 0, 0, 0, 0], device=rows.device)
        rows = torch.where(kept_bk[..., None], rows, empty)
        first = (~kept_bk).long().sort(dim=1, stable=True).indices[:, :DETECTIONS]
        rows = rows.gather(1, first[..., None].expand(-1, -1, 6))
        missing = empty.expand(len(rows), DETECTIONS - rows.shape[1], -1)
        return torch.cat([rows, missing], dim=1)

    def ready(self) -> None:
        _scorer()

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return mAP-50 as in COCO: the mean precision at 101 recalls (0, .01, ..., 1), averaged over the categories of
        all targets. A detection is correct if the IoU with an unmatched target of the same category is at least 0.5.
        Raises EnvironmentFailure if faster-coco-eval is not installed."""
        whole = torch.cat([part.cpu() for part in observed]).double().numpy()
        return Measured({self.metric.name: _map50(whole[:, :DETECTIONS], whole[:, DETECTIONS:], self.categories)})

    def _decoded(self, outputs_bo: Tensor) -> tuple[Tensor, Tensor]:
        """Decode boxes (batch, 4, cells), as fractions of the image, and logits (batch, categories, cells)."""
        if outputs_bo.dim() != 4 or outputs_bo.shape[1] != self.outputs:
            expected = f"(batch, {self.outputs}, H, W) with a box and {self.categories} scores per cell"
            error = wrong_shape(self, outputs_bo, expected)
            raise ModelError(f"{error}. Set model.name=point_detector", path="model.name")
        rows, columns = outputs_bo.shape[2:]
        size = torch.tensor([columns, rows], device=outputs_bo.device, dtype=outputs_bo.dtype)[:, None]
        flat = outputs_bo.flatten(2)
        cells_p2 = torch.cartesian_prod(*(torch.arange(n, device=flat.device) for n in (rows, columns)))
        centre = (cells_p2.flip(1).T.to(flat) + 0.5 + flat[:, :2]) / size
        extent = flat[:, 2:BOX].clamp(-LARGEST, LARGEST).exp() / size
        return torch.cat([centre, extent], dim=1), flat[:, BOX:] - PRIOR

    def _owners(self, y: Tensor, rows: int, columns: int) -> Tensor:
        """Return the index of each cell's target box, int64 (batch, cells), or `most` for cells without a target."""
        held_bm, box = boxes.present(y), y[..., 1:]
        grid = torch.tensor([columns, rows], device=y.device)
        home_bm2 = (box[..., :2] * grid).floor().long().clamp(min=0).minimum(grid - 1)
        reach = torch.arange(-NEIGHBOURS, NEIGHBOURS + 1, device=y.device)
        steps_s2 = torch.cartesian_prod(reach, reach)
        cell_bms2 = home_bm2[:, :, None] + steps_s2
        at_home_s = (steps_s2 == 0).all(1)
        off = ((cell_bms2 + 0.5) / grid - box[:, :, None, :2]).abs() * 2
        inside = (off < box[:, :, None, 2:]).all(-1) & ((cell_bms2 >= 0) & (cell_bms2 < grid)).all(-1)
        takes_bms = (inside | at_home_s) & held_bm[..., None]
        # Sort the boxes by ascending area. Boxes with equal areas keep their order.
        area_bm = torch.where(held_bm, box[..., 2:].prod(-1), torch.inf)
        by_area_bm = area_bm.argsort(dim=1, stable=True)
        rank_bm = by_area_bm.argsort(dim=1)
        claim = torch.where(takes_bms, rank_bm[..., None] + self.most * ~at_home_s, 2 * self.most)
        cell = (cell_bms2[..., 1] * columns + cell_bms2[..., 0]).clamp(0, rows * columns - 1)
        best = torch.full((len(y), rows * columns), 2 * self.most, device=y.device)
        best = best.scatter_reduce(1, cell.flatten(1), claim.flatten(1), "amin")
        owner = by_area_bm.gather(1, best % self.most)
        return torch.where(best < 2 * self.most, owner, self.most)


def _suppress(box_bk4: Tensor, category_bk: Tensor) -> Tensor:
    """Return a mask, bool (B, K), of the boxes that remain after non-maximum suppression. The boxes must be sorted by
    descending score. A box is removed if the IoU with an earlier remaining box of the same category exceeds SAME."""
    # Process one image at a time, because 128 images at once would take gigabytes.
    pairs = ((box[:, None], box, category) for box, category in zip(box_bk4, category_bk, strict=True))
    same = torch.stack([(boxes.overlap(a, b) > SAME) & (c[:, None] == c) for a, b, c in pairs])
    kept = torch.ones(category_bk.shape, dtype=torch.bool, device=box_bk4.device)
    for k in range(kept.shape[1] - 1):
        kept[:, k + 1 :] &= ~(same[:, k, k + 1 :] & kept[:, k : k + 1])
    return kept


def _scorer() -> tuple[Any, Any]:
    """Import faster-coco-eval; return its class for a set of boxes and its class that compares two sets."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise EnvironmentFailure(f"mAP requires faster-coco-eval. Run `{install_command('detection')}`") from error
    return COCO, COCOeval_faster


def _map50(found: NDArray[np.float64], wanted: NDArray[np.float64], categories: int) -> float:
    """Return the mAP-50 of the detections `found` for the targets `wanted`, both of shape (images, boxes, 6)."""
    catalogue_of, scorer_of = _scorer()

    def listed(rows: NDArray[np.float64]) -> list[dict[str, Any]]:
        image, at = np.nonzero(rows[..., 0] >= 0)
        lines = []
        for number, (i, row) in enumerate(zip(image.tolist(), rows[image, at].tolist(), strict=True), 1):
            category, x, y, width, height, score = row
            lines.append(
                {
                    "id": number, "image_id": i, "category_id": int(category), "score": score, "iscrowd": 0,
                    "bbox": [x - width / 2, y - height / 2, width, height], "area": width * height,
                }
            )  # fmt: skip
        return lines

    def catalogue(rows: NDArray[np.float64]) -> Any:
        names = [{"id": c, "name": str(c)} for c in range(categories)]
        images = [{"id": i, "width": 1, "height": 1} for i in range(len(rows))]
        return catalogue_of({"images": images, "categories": names, "annotations": listed(rows)})

    scorer = scorer_of(catalogue(wanted), catalogue(found), "bbox", print_function=log.debug)
    scorer.params.iouThrs, scorer.params.maxDets = np.array([0.5]), [DETECTIONS]
    scorer.params.areaRng, scorer.params.areaRngLbl = [[0.0, 1e10]], ["all"]
    scorer.evaluate()
    scorer.accumulate()
    precision = np.asarray(scorer.eval["precision"])
    known = precision[precision > -1]
    return float(known.mean()) if known.size else float("nan")
