"""Object detection: categories and boxes of objects in images, predicted at every cell of a grid; the metric is
mAP-50."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import DataError, EnvironmentFailure, ModelError
from fl_engine.core.task import Measured, Metric

log = logging.getLogger(__name__)

BOX = 4
"""The first outputs of a cell describe the box; those of the categories follow."""
PRIOR = 4.595
"""Subtracted from the categories' outputs, so that an output of 0 is a score of .01 (Focal Loss, Lin et al., ICCV 2017,
Sec. 3.3: most cells hold no object, and training that starts from scores of .5 diverges)."""
LARGEST = 8.0
"""The largest logarithm of a box's size in cells."""
BALANCE, FOCUS = 0.25, 2.0
"""alpha and gamma of the focal loss, as its authors set them."""
BOX_WEIGHT = 2.0
"""The weight of the boxes' loss relative to the categories'."""
CANDIDATES, DETECTIONS = 1000, 300
"""The number of an image's highest scores that are candidates (as in FCOS's code), and how many of these are kept after
overlapping boxes are removed (as in YOLOv8's code)."""
SAME = 0.6
"""Two boxes of a category whose IoU is larger count as one object (as in the code of FCOS, Tian et al., ICCV 2019)."""
ROUNDING = 1e-4
"""As a share of the image: files round centres and sizes, so a box may reach this far beyond the edge."""
NEIGHBOURS = 1
"""How many cells on each side of a box's own cell are also trained on it, if they lie in it."""


@dataclass(frozen=True)
class Detection:
    """Targets are float32 (N, most, 5), as described in `core.boxes`; an image has at most `most` boxes.

    The network divides the image into a grid of any size and gives (batch, 4 + categories, H, W). For each cell these
    are the offset of the box's centre from the cell's, right and down, in cells; the logarithms of the box's width and
    height in cells; and for each category the logit, plus `PRIOR`, that the box holds one.

    A box is learnt by the cell with its centre, and by that cell's neighbours whose centres it covers. If a cell could
    learn several boxes, it learns the one whose centre it has, else the smallest (FCOS, Sec. 3.1).
    """

    categories: int
    most: int
    """The number of boxes per image that targets have room for."""

    name: ClassVar[str] = "detection"
    metric: ClassVar[Metric] = Metric("map50", low=0.0, high=1.0)
    label_word: ClassVar[str] = "most frequent category"
    boxes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.categories) is not int or self.categories < 1:
            raise DataError(f"detection takes at least 1 category, got {self.categories!r}")
        if type(self.most) is not int or self.most < 1:
            raise DataError(f"detection takes room for at least 1 box in an image, got {self.most!r}")

    @property
    def outputs(self) -> int:
        """Outputs per cell."""
        return BOX + self.categories

    @property
    def label_count(self) -> int:
        """The number of categories plus one, for images without boxes."""
        return self.categories + 1

    @property
    def identity(self) -> object:
        return self.name, self.categories, self.most

    def check(self, y: Tensor, what: str) -> Tensor:
        if not y.is_floating_point() or y.dim() != 3 or y.shape[1:] != (self.most, 5):
            raise DataError(
                f"{what}: boxes are floats (N, {self.most}, 5), a row category, centre x, centre y, width, height and "
                f"category {boxes.NONE} in a row without a box; got {str(y.dtype).removeprefix('torch.')} "
                f"{tuple(y.shape)}"
            )
        y = y.float()
        held = boxes.present(y)
        category, (low, high) = y[..., 0], boxes.corners(y[..., 1:])
        known = (category == category.round()) & (category < self.categories) & (category >= boxes.NONE)
        within = (low >= -ROUNDING).all(-1) & (high <= 1 + ROUNDING).all(-1) & (y[..., 3:] > 0).all(-1)
        wrong = (~(known & (within | ~held))).any(1).nonzero().flatten()
        if len(wrong):
            image = int(wrong[0])
            row = int((~(known & (within | ~held)))[image].nonzero()[0, 0])
            raise DataError(
                f"{what}: a box has a category in 0..{self.categories - 1} and lies in the image, its centre and size "
                f"shares of it; image {image} has {[round(v, 4) for v in y[image, row].tolist()]} ({len(wrong)} such "
                "images)"
            )
        if not bool(held.any()):
            raise DataError(f"{what}: no image holds a box, so nothing can be learnt and mAP is undefined")
        return boxes.without(y, ~held)

    def labels(self, y: Tensor) -> NDArray[np.int64]:
        """Return the most frequent category of each image's boxes (ties: the lowest), or `categories` for an image
        without boxes."""
        counts = torch.stack([(y[..., 0] == category).sum(1) for category in range(self.categories)], dim=1)
        counts = torch.cat([counts, (counts == 0).all(1, keepdim=True)], dim=1)
        # For ties, torch does not define which index argmax gives; NumPy gives the first.
        found: NDArray[np.int64] = counts.numpy().argmax(1)
        return found

    def present(self, y: Tensor) -> Tensor:
        raise ModelError(
            "detection has no classes whose outputs could be masked (outputs are boxes too, and an image has several "
            "categories): set algorithm.mask_labels=false"
        )

    def examples(self, count: int, generator: torch.Generator) -> Tensor:
        """Return random targets with `most` boxes per image, at most ten."""
        held = min(self.most, 10)
        size = 0.05 + 0.3 * torch.rand(count, held, 2, generator=generator)
        centre = size / 2 + (1 - size) * torch.rand(count, held, 2, generator=generator)
        category = torch.randint(0, self.categories, (count, held, 1), generator=generator)
        empty = torch.tensor([float(boxes.NONE), 0, 0, 0, 0]).repeat(count, self.most - held, 1)
        return torch.cat([torch.cat([category, centre, size], dim=2), empty], dim=1)

    def loss(self, outputs_bo: Tensor, y: Tensor, reduction: Literal["none", "sum"] = "none") -> Tensor:
        """Return for each image the focal loss, summed over all cells and categories and divided by the number of cells
        with a box, plus `BOX_WEIGHT` times the mean of 1 - GIoU over these cells."""
        place_b4p, logits_bcp = self._answers(outputs_bo)
        owner_bp = self._owners(y, outputs_bo.shape[2], outputs_bo.shape[3])
        held_bp = owner_bp < self.most
        wanted_bp5 = y.gather(1, owner_bp.clamp(max=self.most - 1)[..., None].expand(-1, -1, 5))
        category_bp = torch.where(held_bp, wanted_bp5[..., 0], float(self.categories)).long()
        # The last column, for cells that learn no box, is dropped.
        target_bcp = F.one_hot(category_bp, self.categories + 1)[..., :-1].transpose(1, 2).to(logits_bcp)
        entropy = F.binary_cross_entropy_with_logits(logits_bcp, target_bcp, reduction="none")
        missed = (target_bcp - logits_bcp.sigmoid()).abs()
        balance = BALANCE * target_bcp + (1 - BALANCE) * (1 - target_bcp)
        learning_b = held_bp.sum(1).clamp(min=1)
        of_categories = (balance * missed**FOCUS * entropy).sum((1, 2)) / learning_b
        apart = 1 - boxes.generalised_overlap(place_b4p.transpose(1, 2), wanted_bp5[..., 1:])
        of_boxes = torch.where(held_bp, apart, 0.0).sum(1) / learning_b
        of_each = of_categories + BOX_WEIGHT * of_boxes
        return of_each.sum() if reduction == "sum" else of_each

    def softened(self, outputs_bo: Tensor, temperature: float) -> Tensor:
        """The outputs divided by the temperature; `PRIOR` is subtracted from the logits first."""
        return torch.cat([outputs_bo[:, :BOX], outputs_bo[:, BOX:] - PRIOR], dim=1) / temperature

    def divergence(self, softened_bo: Tensor, teacher_bo: Tensor, temperature: float) -> Tensor:
        """For each category KL(teacher || student), with each score as a separate probability (Yang et al., Bridging
        Cross-task Protocol Inconsistency for Distillation in Dense Object Detection, ICCV 2023). For a box the squared
        errors of its four numbers, times the teacher's highest score in the cell, since boxes of cells without an
        object mean nothing."""
        teacher = self.softened(teacher_bo, temperature)
        score = (teacher[:, BOX:] * temperature).amax(1, keepdim=True).sigmoid()
        of_boxes = score * (softened_bo[:, :BOX] - teacher[:, :BOX]).square()
        wanted = teacher[:, BOX:].sigmoid()
        cross, own = (
            F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
            for logits in (softened_bo[:, BOX:], teacher[:, BOX:])
        )
        return torch.cat([of_boxes, cross - own], dim=1)

    def observe(self, outputs_bo: Tensor, y: Tensor) -> Tensor:
        """Return float32 (batch, DETECTIONS + most, 6): the detections, the highest score first, then the targets. A
        row is category, box, score; a target's score is 1."""
        found = self.found(outputs_bo)
        return torch.cat([found, torch.cat([y, torch.ones_like(y[..., :1])], dim=2)], dim=1)

    def found(self, outputs_bo: Tensor) -> Tensor:
        """Return float32 (batch, DETECTIONS, 6): category, box and score of each object, the highest score first. Empty
        rows are as in targets, with score 0. Of boxes of a category whose IoU exceeds `SAME`, only the one with the
        highest score is kept."""
        place_b4p, logits_bcp = self._answers(outputs_bo.float())
        cells = logits_bcp.shape[2]
        # A stable sort puts equal scores in the same order on every machine.
        score_bn, at_bn = logits_bcp.sigmoid().flatten(1).sort(dim=1, descending=True, stable=True)
        score_bk, at_bk = score_bn[:, :CANDIDATES], at_bn[:, :CANDIDATES]
        category_bk = at_bk // cells
        box_bk4 = place_b4p.transpose(1, 2).gather(1, (at_bk % cells)[..., None].expand(-1, -1, BOX))
        low, high = boxes.corners(box_bk4)
        low, high = low.clamp(0, 1), high.clamp(0, 1)
        box_bk4 = torch.cat([(low + high) / 2, high - low], dim=2)
        left_bk = _left(box_bk4, category_bk) & (box_bk4[..., 2:] > 0).all(-1)
        rows = torch.cat([category_bk[..., None].to(box_bk4), box_bk4, score_bk[..., None]], dim=2)
        empty = torch.tensor([float(boxes.NONE), 0, 0, 0, 0, 0], device=rows.device)
        rows = torch.where(left_bk[..., None], rows, empty)
        first = (~left_bk).long().sort(dim=1, stable=True).indices[:, :DETECTIONS]
        rows = rows.gather(1, first[..., None].expand(-1, -1, 6))
        missing = empty.expand(len(rows), DETECTIONS - rows.shape[1], -1)
        return torch.cat([rows, missing], dim=1)

    def ready(self) -> None:
        _scorer()

    def measure(self, observed: Sequence[Tensor]) -> Measured:
        """Return mAP-50 as COCO defines it: for each category that occurs, the mean precision at 101 recalls (0, .01,
        ..., 1), then the mean over these categories. A box is correct if its IoU with an unmatched target of its
        category is at least one half. Raises EnvironmentFailure without faster-coco-eval."""
        whole = torch.cat([part.cpu() for part in observed]).double().numpy()
        return Measured({self.metric.name: _map50(whole[:, :DETECTIONS], whole[:, DETECTIONS:], self.categories)})

    def _answers(self, outputs_bo: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes (batch, 4, cells), as shares of the image, and logits (batch, categories, cells), row by row."""
        if outputs_bo.dim() != 4 or outputs_bo.shape[1] != self.outputs:
            raise ModelError(
                f"detection takes networks that give (batch, {self.outputs}, H, W), for every cell of a grid a box and "
                f"{self.categories} categories; this one gives {tuple(outputs_bo.shape)}: use model.name=point_detector"
            )
        rows, columns = outputs_bo.shape[2:]
        size = torch.tensor([columns, rows], device=outputs_bo.device, dtype=outputs_bo.dtype)[:, None]
        flat = outputs_bo.flatten(2)
        centre = (_cells(rows, columns, outputs_bo.device).T.to(flat) + 0.5 + flat[:, :2]) / size
        extent = flat[:, 2:BOX].clamp(-LARGEST, LARGEST).exp() / size
        return torch.cat([centre, extent], dim=1), flat[:, BOX:] - PRIOR

    def _owners(self, y: Tensor, rows: int, columns: int) -> Tensor:
        """Return the row of the target that each cell is trained on, int64 (batch, cells); `most`: none."""
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
        # Sorted by area, the smallest first; equal ones keep their order.
        area_bm = torch.where(held_bm, box[..., 2:].prod(-1), torch.inf)
        by_area_bm = area_bm.argsort(dim=1, stable=True)
        rank_bm = by_area_bm.argsort(dim=1)
        claim = torch.where(takes_bms, rank_bm[..., None] + self.most * ~at_home_s, 2 * self.most)
        cell = (cell_bms2[..., 1] * columns + cell_bms2[..., 0]).clamp(0, rows * columns - 1)
        best = torch.full((len(y), rows * columns), 2 * self.most, device=y.device)
        best = best.scatter_reduce(1, cell.flatten(1), claim.flatten(1), "amin")
        owner = by_area_bm.gather(1, best % self.most)
        return torch.where(best < 2 * self.most, owner, self.most)


def _cells(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return column and row of each cell, (cells, 2), row by row."""
    row, column = torch.meshgrid(torch.arange(rows, device=device), torch.arange(columns, device=device), indexing="ij")
    return torch.stack([column, row], dim=-1).flatten(0, 1)


def _left(box_bk4: Tensor, category_bk: Tensor) -> Tensor:
    """Return which of these boxes, sorted by descending score, are kept, bool (B, K): each in turn removes the later
    boxes of its category whose IoU with it exceeds SAME."""
    # One image at a time, since 128 at once would take gigabytes.
    pairs = ((box[:, None], box, category) for box, category in zip(box_bk4, category_bk, strict=True))
    same = torch.stack([(boxes.overlap(a, b) > SAME) & (c[:, None] == c) for a, b, c in pairs])
    left = torch.ones(category_bk.shape, dtype=torch.bool, device=box_bk4.device)
    for k in range(left.shape[1] - 1):
        left[:, k + 1 :] &= ~(same[:, k, k + 1 :] & left[:, k : k + 1])
    return left


def _scorer() -> tuple[Any, Any]:
    """Return the library's classes for a set of boxes and for the comparison of two sets."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster
    except ImportError as error:
        raise EnvironmentFailure("mAP needs faster-coco-eval: pip install 'flexfleet[detection]'") from error
    return COCO, COCOeval_faster


def _map50(found: NDArray[np.float64], wanted: NDArray[np.float64], categories: int) -> float:
    """Return mAP-50 of detections and targets, each (images, boxes, 6)."""
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
