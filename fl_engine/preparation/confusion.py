"""Measure the confusion matrix Q of a centrally trained network, for label noise in `data.partition` (FedAIoT, section
2.2.3.5; arXiv:2310.00109).

The thesis does not specify which samples are used for Q. Here Q is measured on a held-out fifth of the training data,
because a network makes hardly any mistakes on its own training samples, and test samples must not affect training.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, Adam, LocalTask
from fl_engine.tasks import Classification
from fl_engine.training.central import train_centrally

log = logging.getLogger("flexfleet")

HELD_OUT = 0.2


def check_classes(task: Task, name: str) -> None:
    if not isinstance(task, Classification):
        raise ConfigError.at(f"noise.labels must be 0 for {name}, because the targets of {task.name} are not classes")


def measure_confusion(
    family: ModelFamily, data: Data, seed: int, epochs: int, lr: float, batch_size: int, device: str = "cpu"
) -> NDArray[np.int64]:
    """Train on four fifths of the training samples, and return the confusion matrix of the remaining fifth. Entry
    [i, j] is the number of held-out samples of class i that were classified as class j."""
    order = seeds.rng(seed, "confusion").permutation(len(data.train_y))
    cut = round(HELD_OUT * len(order))
    if cut < 1:
        raise ConfigError(
            f"noise.labels requires at least 3 training samples, got {len(order)}. Increase dataset.train_samples, or "
            "set noise.labels=0",
            path="dataset.train_samples",
        )
    test, train = (torch.from_numpy(np.sort(part)) for part in (order[:cut], order[cut:]))
    own = data.part(train, test)
    task = LocalTask(FULL, Adam(lr), epochs, batch_size, drop_last=False, seed=seeds.derive(seed, "confusion"))
    start = initial_params(family, seeds.derive(seed, "confusion/init"))
    log.info("label noise: training on %d samples for %d epochs to measure confusion", len(train), epochs)
    for epoch in train_centrally(family, own, task, {k: v.to(device) for k, v in start.items()}, device=device):
        confusion: NDArray[np.int64] = epoch.score.confusion.numpy()
    return confusion
