"""The task of finding objects: its loss, who learns which box, what is found, mAP-50, by hand and against a plain
computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.errors import DataError
from fl_engine.tasks import Detection
from fl_engine.tasks.detection import BOX_WEIGHT, DETECTIONS, PRIOR
from fl_engine.training.losses import self_distillation

NOTHING = [-1.0, 0, 0, 0, 0]
TWO = Detection(categories=2, most=3)


def answers(*cells: list[float], rows: int = 1) -> Tensor:
    """(1, outputs, rows, columns) of each cell's outputs, row by row; logits as they are after `PRIOR`."""
    out = torch.tensor(cells).T.reshape(1, -1, rows, len(cells) // rows).clone()
    out[:, 4:] += PRIOR
    return out


def test_overlap_by_hand() -> None:
    whole, half, quarter = ([0.5, 0.5, 1, 1], [0.25, 0.5, 0.5, 1], [0.75, 0.75, 0.5, 0.5])
    a, b = torch.tensor([whole, half, half]), torch.tensor([half, half, quarter])
    assert boxes.overlap(a, b).tolist() == [0.5, 1.0, 0.0]
    # The smallest box around the last two is the whole image, of which they leave a quarter.
    assert boxes.generalised_overlap(a, b).tolist() == [0.5, 1.0, -0.25]
    nothing = torch.zeros(4)
    assert float(boxes.overlap(nothing, nothing)) == 0 and math.isfinite(boxes.generalised_overlap(nothing, nothing))


@pytest.mark.parametrize(("right", "kept"), [(0.55, [1.0, 0.975, 0.25, 0.05, 0.1]), (0.59, NOTHING), (2.0, NOTHING)])
def test_box_outside_its_image_is_cut_or_removed(right: float, kept: list[float]) -> None:
    y = torch.tensor([[[1.0, 0.5, 0.25, 0.2, 0.1]]])
    found = boxes.moved(y, torch.tensor([[[1.0, 0, right], [0, 1, 0]]]))
    torch.testing.assert_close(found[0, 0], torch.tensor(kept))


def test_the_loss_of_one_cell_by_hand() -> None:
    """It answers the whole image, of which the box is the left half: GIoU 1/2. Its scores are 1/2 and 1/4."""
    task = Detection(categories=2, most=1)
    out = answers([0.0, 0, 0, 0, 0, -math.log(3)])
    wrong = 0.75 * 0.25**2 * -math.log(0.75)
    found = task.loss(out, torch.tensor([[[0.0, 0.25, 0.5, 0.5, 1]]]))
    assert found.tolist() == [pytest.approx(0.25 * 0.5**2 * math.log(2) + wrong + BOX_WEIGHT * 0.5)]
    empty = task.loss(out, torch.tensor([[NOTHING]]))
    assert empty.tolist() == [pytest.approx(0.75 * 0.5**2 * math.log(2) + wrong)]
    both = task.loss(out.repeat(2, 1, 1, 1), torch.tensor([[[0.0, 0.25, 0.5, 0.5, 1]], [NOTHING]]))
    assert both.tolist() == [float(found), float(empty)]
    assert float(task.loss(out.repeat(2, 1, 1, 1), torch.tensor([[NOTHING]] * 2)).sum()) == 2 * float(empty)


def owners(*rows: list[float]) -> list[list[int]]:
    y = torch.tensor([[*rows, *[NOTHING] * (3 - len(rows))]])
    return TWO._owners(y, 4, 4).view(4, 4).tolist()


def test_a_box_is_learnt_by_its_cell_and_the_neighbours_in_it() -> None:
    """Of 4 x 4 cells, whose centres are at 1/8, 3/8, 5/8 and 7/8."""
    large, tiny = [0.0, 0.375, 0.375, 0.75, 0.75], [1.0, 0.6, 0.375, 0.01, 0.01]
    assert owners(large) == [[0, 0, 0, 3], [0, 0, 0, 3], [0, 0, 0, 3], [3, 3, 3, 3]]
    assert owners(large, tiny) == [[0, 0, 0, 3], [0, 0, 1, 3], [0, 0, 0, 3], [3, 3, 3, 3]]
    corner = [0.0, 1.0, 1.0, 0.01, 0.01]
    assert owners(corner)[3] == [3, 3, 3, 0], "a centre on the edge is in the last cell"
    assert owners([0.0, 0.125, 0.125, 1.0, 1.0])[0] == [0, 0, 3, 3], "no further than the next cells"


@given(seed=st.integers(0, 999), rows=st.integers(5, 9), columns=st.integers(5, 9))
@settings(max_examples=20)
def test_perfect_cell_has_no_box_loss_and_is_found(seed: int, rows: int, columns: int) -> None:
    task = Detection(categories=3, most=4)
    y = task.check(task.examples(2, torch.Generator().manual_seed(seed)), "made up")
    owner = task._owners(y, rows, columns)
    out = torch.full((2, task.outputs, rows, columns), -20.0)
    out[:, :4] = 0
    learnt = set()
    for image, cell in (owner < task.most).nonzero().tolist():
        row, column = divmod(cell, columns)
        category, x, high, width, height = y[image, owner[image, cell]].tolist()
        place = [
            x * columns - column - 0.5,
            high * rows - row - 0.5,
            math.log(width * columns),
            math.log(height * rows),
        ]
        out[image, :4, row, column] = torch.tensor(place)
        out[image, 4 + int(category), row, column] = 20.0
        learnt.add((image, int(owner[image, cell])))
    assert task.loss(out, y).max() < 1e-4
    found = task.found(out)
    for image, at in learnt:
        alike = found[image][(found[image, :, 0] == y[image, at, 0]) & (found[image, :, 5] > 0.9)]
        assert boxes.overlap(alike[:, 1:5], y[image, at, 1:]).max() > 0.6  # another of its category may be as good


def test_of_boxes_that_overlap_the_best_of_each_category_is_left() -> None:
    first, again, other = [0.0, 0, 0, 0, 2, -9], [-1.0, 0, 0, 0.1, 1, 3], [0.0, 0, 0, 0, -1, -9]
    found = TWO.found(answers(first, again, other))[0]
    assert found.shape == (DETECTIONS, 6)
    third, sixth = 1 / 3, 1 / 6
    score = torch.tensor([3.0, 2.0, -1.0]).sigmoid()
    expected = torch.tensor(
        [
            [1, 0, 0.5, 0, 1, float(score[0])],
            [0, sixth, 0.5, third, 1, float(score[1])],
            [0, 5 * sixth, 0.5, third, 1, float(score[2])],
        ]
    )
    torch.testing.assert_close(found[1:3], expected[1:])
    torch.testing.assert_close(found[0, [0, 2, 5]], expected[0, [0, 2, 5]])
    assert float(found[0, 1]) == pytest.approx(sixth, abs=0.02), "the second cell's"
    assert found[3:5, 5].max() < 1e-3, "other categories of the three cells"
    assert found[5:].tolist() == [[*NOTHING, 0.0]] * (DETECTIONS - 5), "six answers, one of which was there already"


def rows(*images: list[list[float]], most: int) -> Tensor:
    return torch.tensor([[*image, *[[*NOTHING, 0]] * (most - len(image))] for image in images])


def test_map50_by_hand() -> None:
    """One category, a box in each of two images. Found: right, wrong, right. Precision 1 up to recall 1/2, which is 51
    of 101 recalls, and 2/3 up to recall 1."""
    task = Detection(categories=1, most=1)
    box = [0.0, 0.5, 0.5, 0.2, 0.2]
    aside = [0.0, 0.5 + 0.2 * 0.32, 0.5, 0.2, 0.2]  # overlaps by .68 / 1.32 = .515
    far = [0.0, 0.5 + 0.2 * 0.35, 0.5, 0.2, 0.2]  # by .65 / 1.35 = .481
    found = rows([[*box, 0.9]], [[*far, 0.8], [*aside, 0.7]], most=DETECTIONS)
    targets = rows([[*box, 1.0]], [[*box, 1.0]], most=1)
    assert task.measure([torch.cat([found, targets], dim=1)]).values == {
        "map50": pytest.approx((51 + 50 * 2 / 3) / 101)
    }


def plain_map50(found: Tensor, wanted: Tensor, categories: int) -> float:
    values = []
    for category in range(categories):
        truth = [[row[1:5] for row in image.tolist() if row[0] == category] for image in wanted]
        total = sum(map(len, truth))
        if not total:
            continue
        listed = [
            (row[5], i, row[1:5]) for i, image in enumerate(found.tolist()) for row in image if row[0] == category
        ]
        taken: set[tuple[int, int]] = set()
        right = []
        for _, image, box in sorted(listed, key=lambda each: -each[0]):
            best, chosen = 0.5, None
            for j, other in enumerate(truth[image]):
                if (image, j) not in taken and plain_overlap(box, other) >= best:
                    best, chosen = plain_overlap(box, other), j
            right.append(chosen is not None)
            if chosen is not None:
                taken.add((image, chosen))
        hits = np.cumsum(right)
        points = [(hit / total, hit / (n + 1)) for n, hit in enumerate(hits)]
        steps = [max((p for r, p in points if r >= recall), default=0.0) for recall in np.linspace(0, 1, 101)]
        values.append(sum(steps) / 101)
    return sum(values) / len(values)


def plain_overlap(a: list[float], b: list[float]) -> float:
    width, height = (
        max(0.0, min(a[i] + a[i + 2] / 2, b[i] + b[i + 2] / 2) - max(a[i] - a[i + 2] / 2, b[i] - b[i + 2] / 2))
        for i in (0, 1)
    )
    return width * height / (a[2] * a[3] + b[2] * b[3] - width * height)


def test_map50_equals_plain_computation_on_random_cases() -> None:
    values = []
    for case in range(100):
        rng = np.random.default_rng(case)
        categories, images, most = int(rng.integers(1, 5)), int(rng.integers(1, 6)), 6
        task = Detection(categories, most)
        found, wanted = (torch.tensor([[*NOTHING, 0.0]]).repeat(images, n, 1) for n in (DETECTIONS, most))
        for image in range(images):
            held = int(rng.integers(image == 0, most + 1))
            centre, size = rng.uniform(0.2, 0.8, (held, 2)), rng.uniform(0.05, 0.3, (held, 2))
            category = rng.integers(0, categories, held)
            wanted[image, :held] = torch.tensor(np.column_stack([category, centre, size, np.ones(held)]))
            again = rng.integers(0, held, 12) if held else np.zeros(0, dtype=int)
            shifted = centre[again] + rng.normal(0, 0.25, (len(again), 2)) * size[again]
            named = np.where(rng.random(len(again)) < 0.8, category[again], rng.integers(0, categories, len(again)))
            scored = np.column_stack([named, shifted, size[again], rng.random(len(again))])
            found[image, : len(again)] = torch.tensor(scored[np.argsort(-scored[:, 5])].astype(np.float32))
        value = task.measure([torch.cat([found, wanted], dim=1)]).values["map50"]
        assert value == pytest.approx(plain_map50(found, wanted, categories), abs=1e-9), case
        values.append(value)
    assert np.std(values) > 0.1 and 0.2 < np.mean(values) < 0.8


def test_distillation_by_hand() -> None:
    """A teacher's score of 3/4, a student's of 1/2; their boxes are two cells apart."""
    student, teacher = answers([0.0, 0, 0, 0, 0]), answers([2.0, 0, 0, 0, math.log(3)])
    task = Detection(categories=1, most=1)
    divergence = task.divergence(task.softened(student, 1.0), teacher, 1.0).flatten()
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    torch.testing.assert_close(divergence, torch.tensor([0.75 * 4, 0, 0, 0, kl]))
    assert self_distillation(task, student, [teacher], 1.0).tolist() == [pytest.approx((3 + kl) / 5)]


@pytest.mark.parametrize(
    "y",
    [
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 5, dtype=torch.int64),
        torch.tensor([[NOTHING] * 3]),
        torch.tensor([[[2.0, 0.5, 0.5, 0.1, 0.1], NOTHING, NOTHING]]),
        torch.tensor([[[0.0, 0.9, 0.5, 0.3, 0.1], NOTHING, NOTHING]]),
        torch.tensor([[NOTHING, [0.0, math.nan, 0.5, 0.1, 0.1], NOTHING]]),
    ],
    ids=["shape", "integers", "no box", "category", "outside", "nan"],
)
def test_wrong_boxes_are_refused(y: Tensor) -> None:
    with pytest.raises(DataError):
        TWO.check(y, "set: train_y")
