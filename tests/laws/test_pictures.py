"""Augmentations of pictures whose targets are boxes: what the boxes hold before, they hold after."""

from __future__ import annotations

import colorsys
import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from fl_engine.core import boxes
from fl_engine.core.augmentation import Augmentation, Compress, Crop, Flip, Hsv, MixUp, Scale, Shear
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, LocalTask
from fl_engine.testing.kinds import KINDS
from fl_engine.training.local import TrainingJob, train

SIDE = 64
NOTHING = [-1.0, 0, 0, 0, 0]
TASK = LocalTask(FULL, SGD(0.1), epochs=2, batch_size=4, drop_last=True, seed=5)
MOVING = (Flip(share=1.0, vertical=1.0), Flip(share=0.5, vertical=0.5), Shear(degrees=20.0), Scale(change=0.4))


@dataclass(frozen=True)
class Own:
    """One's own, which does not know of boxes."""

    def check(self, x: Tensor) -> None:
        pass

    def apply(self, x_bchw: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return x_bchw, y


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(rectangles: list[tuple[int, int, int, int]]) -> tuple[Tensor, Tensor]:
    """A black picture each with one white rectangle, (left, top, width, height) in pixels, and its box."""
    x, y = torch.zeros(len(rectangles), 3, SIDE, SIDE), torch.tensor([[NOTHING, NOTHING]] * len(rectangles))
    for i, (left, top, width, height) in enumerate(rectangles):
        x[i, :, top : top + height, left : left + width] = 1
        box = torch.tensor([left + width / 2, top + height / 2, width, height]) / SIDE
        y[i, 1] = torch.cat([torch.tensor([3.0]), box])
    return x, y


rectangle = st.tuples(st.integers(16, 36), st.integers(16, 36), st.integers(4, 12), st.integers(4, 12))


@pytest.mark.parametrize("augmentation", MOVING, ids=str)
@given(rectangles=st.lists(rectangle, min_size=1, max_size=3), seed=st.integers(0, 999))
@settings(max_examples=15)
def test_a_box_is_around_its_rectangle_before_and_after(
    augmentation: Any, rectangles: list[tuple[int, int, int, int]], seed: int
) -> None:
    x, y = pictures(rectangles)
    before = x.clone(), y.clone()
    moved_x, moved_y = augmentation.apply(x, y, seeded(seed))
    assert torch.equal(x, before[0]) and torch.equal(y, before[1]), "samples are used again in the next epoch"
    assert torch.equal(moved_x, augmentation.apply(x, torch.zeros(len(x)), seeded(seed))[0]), (
        "pixels change alike with and without boxes"
    )
    assert (moved_y[:, 0] == torch.tensor(NOTHING)).all() and (moved_y[:, 1, 0] == 3).all()
    low, high = boxes.corners(moved_y[:, 1, 1:] * SIDE)
    for picture, (left, top), (right, bottom) in zip(moved_x, low.tolist(), high.tolist(), strict=True):
        down, across = (picture[0] > 0.02).nonzero().unbind(1)
        found = [int(across.min()), int(down.min()), int(across.max()) + 1, int(down.max()) + 1]
        assert np.abs(np.array(found) - [left, top, right, bottom]).max() <= 1.5, "but for the pixel at the edge"


def test_a_flip_of_boxes_by_hand() -> None:
    x, y = torch.zeros(1, 3, 4, 4), torch.tensor([[[0.0, 0.2, 0.3, 0.1, 0.1], NOTHING]])
    for flip, place in ((Flip(share=1.0), [0.8, 0.3]), (Flip(share=1.0, vertical=1.0), [0.8, 0.7])):
        _, found = flip.apply(x, y, seeded(0))
        torch.testing.assert_close(found, torch.tensor([[[0.0, *place, 0.1, 0.1], NOTHING]]))


def test_shear_moves_boxes_by_hand() -> None:
    """45 degrees to the right: a point moves right by its distance below the centre."""
    _, y = pictures([(28, 40, 8, 8)])
    matrices = torch.tensor([[[1.0, 1.0, -0.5], [0.0, 1.0, 0.0]]])
    assert torch.equal(boxes.moved(y, matrices)[0, 1, 1:] * SIDE, torch.tensor([32 + 12.0, 44.0, 16.0, 8.0]))


def test_compress_gives_the_pixels_of_a_jpeg() -> None:
    x = torch.rand(6, 3, 16, 16, generator=seeded(1))
    before, (found, _) = x.clone(), Compress(share=0.5, quality=30).apply(x, torch.zeros(6), seeded(2))
    assert torch.equal(x, before)
    draws = seeded(2)
    chosen, quality = torch.rand(6, generator=draws) < 0.5, torch.randint(30, 96, (6,), generator=draws)
    for i in range(6):
        file = io.BytesIO()
        Image.fromarray((x[i] * 255).round().byte().permute(1, 2, 0).numpy()).save(
            file, "JPEG", quality=int(quality[i])
        )
        read = torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255
        assert torch.equal(found[i], read if chosen[i] else x[i])


def test_hsv_changes_colours_as_the_standard_library_does() -> None:
    x = torch.rand(4, 3, 5, 6, generator=seeded(1))
    x[0, :, 0, 0], x[0, :, 0, 1], x[0, :, 0, 2] = 0.0, 1.0, 0.5
    hsv = Hsv(hue=0.2, saturation=0.7, value=0.4)
    found, drawn = hsv.apply(x, torch.zeros(4), seeded(3))[0], 2 * torch.rand(3, 4, generator=seeded(3)) - 1
    for i, row, column in np.ndindex(4, 5, 6):
        h, s, v = colorsys.rgb_to_hsv(*x[i, :, row, column].tolist())
        h, s = (h + 0.2 * float(drawn[0, i])) % 1, min(1.0, s * (1 + 0.7 * float(drawn[1, i])))
        wanted = colorsys.hsv_to_rgb(h, s, min(1.0, v * (1 + 0.4 * float(drawn[2, i]))))
        assert found[i, :, row, column].tolist() == pytest.approx(wanted, abs=1e-5), (i, row, column)
    still = Hsv(hue=0.0, saturation=0.0, value=0.0)
    torch.testing.assert_close(still.apply(x, torch.zeros(4), seeded(3))[0], x)


def test_mixup_blends_pictures_and_joins_boxes() -> None:
    x, y = pictures([(10, 10, 8, 8), (40, 40, 8, 8)])
    found, boxed = MixUp(share=1.0).apply(x, y, seeded(1))
    for i in range(2):
        weight = float(found[i, 0, 14, 14]) if i == 0 else float(found[i, 0, 44, 44])
        assert 0.3 < weight < 0.7
        torch.testing.assert_close(found[i], weight * x[i] + (1 - weight) * x[1 - i])
        assert torch.equal(boxed[i], torch.stack([y[i, 1], y[1 - i, 1]]))


def test_training_sees_the_boxes_where_they_have_gone() -> None:
    family, data = KINDS["detection"]
    x, y, start = data.normalise(data.train_x[:8]), data.train_y[:8], initial_params(family, 1)
    found = [
        train(family, data.task, [TrainingJob(replace(TASK, augment=each), start, *given)])[0].params["head.weight"]
        for each, given in (
            ((Flip(share=1.0),), (x, y)),
            ((), Flip(share=1.0).apply(x, y, seeded(0))),
            ((), (x, y)),
        )
    ]
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])


@pytest.mark.parametrize(("augmentation", "name"), [(Crop(), "crop"), (Own(), "Own")])
def test_what_does_not_say_where_boxes_go_is_refused(augmentation: Augmentation, name: str) -> None:
    family, data = KINDS["detection"]
    job = TrainingJob(
        replace(TASK, augment=(augmentation,)), initial_params(family, 1), data.train_x.float(), data.train_y
    )
    with pytest.raises(ModelError, match=name) as refused:
        train(family, data.task, [job])
    assert refused.value.path == "training.augment"
