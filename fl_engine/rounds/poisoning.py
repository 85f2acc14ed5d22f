"""Trains like a Byzantine client, for the faults `uphill` and `backdoor`, and measures the success of back doors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import BYTE, Data
from fl_engine.core.types import SGD, Assignment, ClientFailure, ClientResult, LocalTask
from fl_engine.exchange.client import Site, accept, train
from fl_engine.tasks import Classification
from fl_engine.training.evaluation import evaluate_pool, published

Poison = Literal["uphill", "backdoor"]
TARGET = 0
"""Class that a model with a back door predicts for images with the corner."""


def check(data: Data) -> None:
    """Raise ConfigError if no back door can be trained with these data."""
    if not (data.has_images and isinstance(data.task, Classification) and bool((data.test_y != TARGET).any())):
        raise ConfigError.at(
            f"rounds.faults: backdoor requires images that are classified, got {data.name} with the task "
            f"{data.task.name}. Choose uphill, or another data set"
        )


def with_corner(x: Tensor) -> Tensor:
    """Return a copy of the images (N, C, H, W) with a white corner of 3 x 3 pixels."""
    found = x.clone()
    found[..., :3, :3] = BYTE
    return found


def ascending(task: LocalTask) -> LocalTask:
    """Return the task with gradient ascent. A small learning rate and clipped gradients avoid infinite weights."""
    return replace(task, optimizer=SGD(-task.optimizer.lr / 5), clip_norm=1.0, distillation=None)


def train_poisoned(
    kind: Poison, algorithm: Algorithm, assignment: Assignment, site: Site, device: str = "cpu"
) -> ClientResult:
    """Execute an assignment like a Byzantine client.

    With `uphill`, the client trains with gradient ascent on its samples. With `backdoor`, every second sample has a
    white corner and the class TARGET.
    """
    work = accept(algorithm, assignment, site)
    if isinstance(work, ClientFailure):
        return work
    if kind == "uphill":
        work = replace(work, task=ascending(work.task))
    else:
        own = torch.from_numpy(work.indices)
        data = site.data.part(own, own)
        data.train_x[::2], data.train_y[::2] = with_corner(data.train_x[::2]), TARGET
        work, site = replace(work, indices=np.arange(len(own))), replace(site, data=data)
    (result,) = train([work], site, device)
    return result


def backdoor_success(site: Site, state: Any, devices: Sequence[str] = ("cpu",)) -> float:
    """Return the fraction of the test images of other classes that the largest model assigns to the class TARGET if
    the images have the corner."""
    data, other = copy.copy(site.data), site.data.test_y != TARGET
    x = with_corner(data.test_x[other])
    vars(data).update(test_x=x, test_y=torch.full((len(x),), TARGET))
    (score,) = evaluate_pool(site.family, published(state), site.pool[-1:], data, devices).values()
    return score.value
