"""What a task owns: its loss, its metrics, its labels, its distillation; by hand, and however batches are cut."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.task import Task
from fl_engine.tasks import Classification, Detection, Multilabel, NextToken, Regression, Segmentation

TASKS = {
    Classification(4): (),
    Classification(7, top5=True): (),
    Regression(): (),
    Regression(outputs=3): (),
    NextToken(5, length=4, padding=0, masked=(3, 4)): (4,),
    Detection(categories=2, most=3): (4, 4),
    Multilabel(3): (),
    Segmentation(3): (4, 4),
}
"""The shape of a sample's outputs behind their number."""


def test_r2_and_the_mean_absolute_error_by_hand() -> None:
    """Targets 1, 2, 3, 6 (mean 3, squares about it 14), errors 1, 0, -1, 2: squares 6, absolute 4."""
    y = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    f = y + torch.tensor([[1.0], [0.0], [-1.0], [2.0]])
    task = Regression()
    found = task.measure([task.observe(f[:3], y[:3]), task.observe(f[3:], y[3:])]).values
    assert found == {"r2": pytest.approx(1 - 6 / 14), "mae": 1.0}
    assert task.loss(f, y).tolist() == [1.0, 0.0, 1.0, 4.0] and float(task.loss(f, y).sum()) == 6.0
    assert task.metric.higher_is_better and not task.error.higher_is_better


def test_top5_accuracy_by_hand() -> None:
    """Seven classes. The order of the first sample's is 6, 5, ..., 0: class 2 is the fifth, class 1 the sixth. The
    second one's logits are all equal: its first five are 0 to 4. The third one's 0 to 3 are equal, behind 4 and 5."""
    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5, 6], [1.0] * 7, [2.0, 2, 2, 2, 9, 8, 1]])
    task = Classification(7, top5=True)
    hits = {0: [2, 3, 4, 5, 6], 1: [0, 1, 2, 3, 4], 2: [0, 1, 2, 4, 5]}
    for sample, expected in hits.items():
        y = torch.arange(7)
        seen = task.observe(logits[sample].expand(7, 7), y)
        assert [int(c) for c in y if seen[1, c]] == expected
    y = torch.tensor([2, 5, 4])
    parts = [task.observe(logits[:1], y[:1]), task.observe(logits[1:], y[1:])]
    found = task.measure(parts)
    plain = Classification(7)
    # Taken for 6, 0 and 4: rows are classes, columns what they were taken for.
    assert found.confusion.nonzero().tolist() == [[2, 6], [4, 4], [5, 0]]
    assert found.values == {"accuracy": 1 / 3, "top5": 2 / 3}
    assert torch.equal(found.confusion, plain.measure([plain.observe(logits, y)]).confusion)
    assert plain.measure([plain.observe(logits, y)]).values == {"accuracy": 1 / 3}
    masked = torch.full((1, 7), -torch.inf)
    masked[0, 5:] = torch.tensor([1.0, 2.0])
    hidden = task.observe(masked.expand(7, 7), torch.arange(7))[1]
    assert hidden.tolist() == [1, 1, 1, 0, 0, 1, 1], "masked classes are equal, behind the others"
    assert task.identity == plain.identity, "the data are the same"


def test_f1_by_hand() -> None:
    """Label 0 is found in 1 of 2 samples, label 1 is predicted twice and right once, label 2 does not occur."""
    y = torch.tensor([[1.0, 0, 0], [1, 1, 0]])
    logits = torch.tensor([[3.0, 2, -1], [-1, 1, -1]])
    task = Multilabel(3)
    found = task.measure([task.observe(logits[:1], y[:1]), task.observe(logits[1:], y[1:])])
    assert found.values == {"f1": pytest.approx(2 * 2 / (3 + 3)), "macro_f1": pytest.approx((2 / 3 + 2 / 3) / 2)}
    assert task.labels(torch.tensor([[0.0, 1, 1], [0, 0, 0]])).tolist() == [1, 3]


def test_mean_iou_by_hand() -> None:
    """One map of 2 x 3 pixels. Category 2 is neither a target nor predicted, and one pixel is ignored."""
    y = torch.tensor([[[0, 0, 1], [1, 1, 255]]], dtype=torch.uint8)
    predicted = torch.tensor([[[0, 1, 1], [1, 0, 2]]])
    logits = torch.nn.functional.one_hot(predicted, 3).permute(0, 3, 1, 2).float()
    task = Segmentation(3)
    found = task.measure([task.observe(logits, y)])
    assert found.values == {"miou": pytest.approx((1 / 3 + 2 / 4) / 2), "accuracy": pytest.approx(3 / 5)}
    assert found.confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 0, 0]]
    assert task.loss(logits, y)[0] == pytest.approx(
        float(-logits.log_softmax(1).gather(1, y.long()[:, None].clamp(max=2))[0, 0].flatten()[:5].mean())
    )


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e7])
def test_r2_keeps_its_digits_where_targets_are_far_from_0(offset: float) -> None:
    generator, task = torch.Generator().manual_seed(0), Regression()
    y = (2 * torch.randn(1000, 1, generator=generator, dtype=torch.float64) + offset).float().double()
    f = y + torch.randn(1000, 1, generator=generator, dtype=torch.float64)
    found = task.measure([task.observe(*pair) for pair in zip(f.split(300), y.split(300), strict=True)]).values
    assert found["r2"] == pytest.approx(float(1 - (f - y).square().sum() / (y - y.mean()).square().sum()), rel=1e-9)


def test_equal_targets_have_no_r2() -> None:
    """Which log(50) is no float, and the sum of its squares less the square of its sum not 0."""
    task, y = Regression(), torch.full((7, 1), 50.0).log()
    for parts in ((y,), (y[:3], y[3:])):
        found = task.measure([task.observe(part + 0.1, part) for part in parts]).values
        assert math.isnan(found["r2"]) and found["mae"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=str)
@given(cuts=st.lists(st.integers(1, 29), max_size=4), seed=st.integers(0, 99))
@settings(max_examples=15)
def test_metrics_do_not_depend_on_how_batches_are_cut(task: Task, cuts: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    y, outputs = task.examples(30, generator), torch.randn(30, task.outputs, *TASKS[task], generator=generator)
    ends = [0, *sorted(set(cuts)), 30]
    parts = [task.observe(outputs[a:b], y[a:b]) for a, b in pairwise(ends)]
    whole, cut = task.measure([task.observe(outputs, y)]), task.measure(parts)
    assert cut.values == pytest.approx(dict(whole.values), rel=1e-12, abs=1e-12, nan_ok=True)
    assert torch.equal(whole.confusion, cut.confusion)


def test_quantile_bins_are_even_and_keep_equal_targets() -> None:
    y = torch.from_numpy(np.random.default_rng(1).permutation(100)).float()[:, None]
    labels = Regression(bins=5).labels(y)
    assert np.bincount(labels).tolist() == [20] * 5
    assert (labels == y[:, 0].numpy() // 20).all()
    same = Regression(bins=5).labels(torch.tensor([[0.0]] * 8 + [[1.0], [2.0]]))
    assert len(set(same[:8].tolist())) == 1 and same.max() == 4
