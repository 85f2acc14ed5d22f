"""point_detector: its counts, by hand; the shape of its answers; what a narrower one has."""

from __future__ import annotations

import pytest
import torch

from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.models.point_detector import PointDetector
from fl_engine.tasks import Detection

WHOLE = PointDetector((3, 224, 224), 16)
STAGES = ((32, 48, 2, 56), (48, 96, 2, 28), (96, 192, 2, 14), (192, 256, 1, 7))
"""Channels before and in each stage, blocks, pixels a side."""


def test_its_parameters_by_hand() -> None:
    """3x3 convolutions without bias, two numbers of a norm for each channel."""

    def unit(c_in: int, c_out: int, pixels: int) -> int:
        return c_in * c_out * pixels + 2 * c_out

    total = unit(3, 32, 9)
    for c_in, c_out, blocks, _ in STAGES:
        total += unit(c_in, c_out, 9) + (2 * blocks - 1) * unit(c_out, c_out, 9) + unit(c_in, c_out, 1)
        total += unit(c_out, 64, 1)
    total += unit(64, 96, 9) + unit(96, 96, 9) + 96 * 16 + 16
    assert count_params(WHOLE) == total == 2_817_872


def test_its_multiply_adds_by_hand() -> None:
    """Of a convolution its kernel once for each number that it puts out; of a norm 4 for each."""

    def unit(c_in: int, c_out: int, pixels: int, side: int) -> int:
        return side**2 * c_out * (c_in * pixels + 4)

    total = unit(3, 32, 9, 112)
    for c_in, c_out, blocks, side in STAGES:
        total += (
            unit(c_in, c_out, 9, side) + (2 * blocks - 1) * unit(c_out, c_out, 9, side) + unit(c_in, c_out, 1, side)
        )
        total += unit(c_out, 64, 1, side)
    total += unit(64, 96, 9, 56) + unit(96, 96, 9, 56) + 56**2 * 96 * 16
    assert count_macs(WHOLE) == total


@pytest.mark.parametrize(("side", "points"), [((64, 96), (16, 24)), ((33, 50), (9, 13))])
def test_it_answers_at_every_fourth_pixel(side: tuple[int, int], points: tuple[int, int]) -> None:
    """Sides need not be multiples of 32."""
    family = PointDetector((3, *side), 7, width=0.1)
    out = runnable(family, FULL, initial_params(family, 0))(made_up(family, 2))
    assert out.shape == (2, 7, *points)
    task = Detection(categories=3, most=5)
    assert torch.isfinite(task.loss(out, task.examples(2, torch.Generator().manual_seed(1)))).all()


def test_an_answer_sees_far_around_its_point() -> None:
    """Through the coarsest map of the pyramid: an object may be as large as the image."""
    family = PointDetector((3, 128, 128), 5, width=0.2, norm="static")
    network = runnable(family, FULL, initial_params(family, 0)).eval()
    x = made_up(family, 1, torch.Generator().manual_seed(1)).requires_grad_()
    network(x)[0, :, 0, 0].sum().backward()
    assert x.grad is not None and (x.grad[0].abs().sum(0)[100:, 100:] > 0).any()


def test_pyramid_slice_has_the_same_channels_of_every_stage() -> None:
    family = PointDetector((3, 40, 40), 5, width=0.1)
    params = {f"lateral.stage{s}.conv.weight": torch.arange(6).view(6, 1, 1, 1).repeat(1, 30, 1, 1) for s in (1, 4)}
    params = {name: t[:, : family.layout().groups[name.split(".")[1]]] for name, t in params.items()}
    params["merged.conv.weight"] = torch.arange(6).view(1, 6, 1, 1).repeat(9, 1, 3, 3)
    cut = take(params, family.layout(), SubmodelSpec.of({"pyramid": [1, 4], "stage4": 3}))
    assert cut["lateral.stage1.conv.weight"][:, 0].flatten().tolist() == [1, 4]
    assert cut["lateral.stage4.conv.weight"].shape == (2, 3, 1, 1)
    assert cut["merged.conv.weight"][0, :, 0, 0].tolist() == [1, 4]
