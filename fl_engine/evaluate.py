"""Accuracy and loss of each pool model on held-out data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_engine import seeds
from fl_engine.slicing import runnable, take
from fl_engine.types import Data, ModelFamily, Params, Pool, SubmodelSpec


@dataclass(frozen=True)
class Score:
    """`accuracy` in [0, 1], `loss` the mean cross entropy."""

    accuracy: float
    loss: float


def evaluate(
    family: ModelFamily,
    params: Params,
    spec: SubmodelSpec,
    data: Data,
    x_nchw: Tensor,
    y_n: Tensor,
    device: str = "cpu",
    batch_size: int = 128,
) -> Score:
    """Scores one sub-model on uint8 images.

    Networks without running statistics normalise by the batch at hand in evaluation too, as the authors do; so
    that the figure is defined, batches have a fixed size and a fixed permutation. A last batch of one image
    joins the batch before it.
    """
    module = runnable(family, spec, {k: v.to(device) for k, v in take(params, family.layout(), spec).items()}).eval()
    order = torch.from_numpy(seeds.rng(0, "evaluate").permutation(len(y_n)))
    chunks = list(torch.split(order, batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    correct = torch.zeros((), dtype=torch.int64, device=device)
    loss = torch.zeros((), dtype=torch.float64, device=device)
    with torch.no_grad():
        for chunk in chunks:
            y = y_n[chunk].to(device)
            logits = module(data.normalise(x_nchw[chunk].to(device)))
            correct += (logits.argmax(1) == y).sum()
            loss += F.cross_entropy(logits, y, reduction="sum")
    return Score(int(correct) / len(y_n), float(loss) / len(y_n))


def evaluate_pool(
    family: ModelFamily,
    params: Params,
    pool: Pool,
    data: Data,
    devices: Sequence[str] = ("cpu",),
    batch_size: int = 128,
) -> dict[str, Score]:
    """Every reported pool model on the test images, by name, smallest first; spread over the devices."""
    reported = [m for m in pool if m.reported]

    def score(i: int) -> Score:
        device = devices[i % len(devices)]
        return evaluate(family, params, reported[i].spec, data, data.test_x, data.test_y, device, batch_size)

    with ThreadPoolExecutor(len(devices)) as threads:
        # The largest takes longest: it goes first.
        scores = dict(zip(reversed(reported), threads.map(score, reversed(range(len(reported)))), strict=True))
    return {m.name: scores[m] for m in reported}


def average_accuracy(scores: Mapping[str, Score]) -> float:
    """`avg` of the papers' tables: the mean over the reported models."""
    values: Sequence[float] = [s.accuracy for s in scores.values()]
    return sum(values) / len(values)
