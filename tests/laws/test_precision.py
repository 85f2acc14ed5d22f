"""bf16: forward and backward passes in bfloat16, everything that is kept in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, SGD, Distillation, LocalTask
from fl_engine.core.widths import prefix
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import assert_same_bits
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import SINGLE, Numerics

FAMILY = SmallCNN((1, 8, 8), 4, width=0.5)
TASK = LocalTask(FULL, SGD(0.05, 0.5), epochs=6, batch_size=8, drop_last=True, seed=3)
HALF = Numerics(precision="bf16")
HALF_BATCHED = Numerics("batched", 8, "bf16")


def jobs(task: LocalTask, count: int = 3) -> list[Job]:
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(4, 1, 8, 8, generator=generator)
    y = torch.arange(24) % 4
    x = patterns[y] + 0.3 * torch.randn(24, 1, 8, 8, generator=generator)
    return [Job(replace(task, seed=i), initial_params(FAMILY, i), x, y) for i in range(count)]


@pytest.mark.parametrize("numerics", [HALF, HALF_BATCHED], ids=["single", "batched"])
def test_it_learns_as_well_and_keeps_float32(numerics: Numerics) -> None:
    plain, half = (
        train(FAMILY, Classification(FAMILY.outputs), jobs(TASK), SINGLE),
        train(FAMILY, Classification(FAMILY.outputs), jobs(TASK), numerics),
    )
    for a, b in zip(plain, half, strict=True):
        assert b.loss == pytest.approx(a.loss, rel=0.05)
        assert {t.dtype for t in b.params.values()} == {torch.float32}
        assert any(not torch.equal(a.params[name], b.params[name]) for name in a.params), "it made no difference"
        for name, start in initial_params(FAMILY, 0).items():
            assert b.params[name].shape == start.shape


def test_a_lane_has_the_same_bits_alone() -> None:
    teachers = Distillation((prefix(FAMILY.layout(), 0.5),), 10.0, 3.0)
    for task in (TASK, replace(TASK, distillation=teachers)):
        together = train(FAMILY, Classification(FAMILY.outputs), jobs(task, 5), HALF_BATCHED)
        for job, expected in zip(jobs(task, 5), together, strict=True):
            assert_same_bits(
                train(FAMILY, Classification(FAMILY.outputs), [job], HALF_BATCHED)[0].params, expected.params
            )
