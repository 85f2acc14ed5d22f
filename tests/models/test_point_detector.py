"""point_detector: the shape of its outputs, and its slices."""

from __future__ import annotations

import pytest
import torch

from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.models.point_detector import PointDetector
from fl_engine.tasks import Detection


@pytest.mark.parametrize(("side", "points"), [((64, 96), (16, 24)), ((33, 50), (9, 13))])
def test_detector_has_an_output_at_every_fourth_pixel(side: tuple[int, int], points: tuple[int, int]) -> None:
    """Sides need not be multiples of 32."""
    family = PointDetector((3, *side), 7, width=0.1)
    out = runnable(family, FULL, initial_params(family, 0))(made_up(family, 2))
    assert out.shape == (2, 7, *points)
    task = Detection(categories=3, most=5)
    assert torch.isfinite(task.loss(out, task.examples(2, torch.Generator().manual_seed(1)))).all()


def test_output_depends_on_pixels_far_from_its_point() -> None:
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
