"""What is done with a data set in memory: its fingerprint, splits and smaller subsets, and images padded with black."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import boxes, seeds
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.core.task import has_boxes

LARGEST_SIDE = 1024
"""The largest side of a padded image, in pixels."""


def as_tensors(x: NDArray[Any], y: NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and targets as tensors that share the arrays' memory."""
    return torch.from_numpy(x), torch.from_numpy(y)


def fingerprint(data: Data) -> str:
    """Return the SHA-256 (hex) over everything that a result depends on: shapes, types, bytes, task, normalisation.

    Equal data have equal fingerprints on every machine. Caches use it as a key, and a partition names its data by it.
    """
    digest = hashlib.sha256(repr((data.task.identity, data.mean, data.std)).encode())
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y, data.natural_client):
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def random_split(samples: int, test_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return ascending positions of the training and the test part, for a data set that is published without a split.

    The test part is that of scikit-learn's `train_test_split(test_size=test_share, random_state=42)`, as published code
    often splits. It uses NumPy's legacy generator, whose stream is guaranteed never to change.
    """
    drawn = np.random.RandomState(42).permutation(samples).astype(np.int64)
    test = math.ceil(test_share * samples)
    return np.sort(drawn[test:]), np.sort(drawn[:test])


def stratified(labels: NDArray[np.int64], samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `samples` positions without replacement, with the classes in the same shares as in `labels`; ascending.

    Shares are rounded by largest remainder (ties: the lower label) in integers, so that all machines agree. A class
    with fewer than about n / samples members may get none.
    """
    values, counts = np.unique(labels, return_counts=True)
    shares, remainders = np.divmod(counts * samples, len(labels))
    missing = samples - int(shares.sum())
    shares[np.argsort(-remainders, kind="stable")[:missing]] += 1
    chosen = [
        rng.permutation(np.flatnonzero(labels == value))[:share] for value, share in zip(values, shares, strict=True)
    ]
    return np.sort(np.concatenate(chosen)).astype(np.int64)


def subset(data: Data, train_samples: int | None, test_samples: int | None, seed: int) -> Data:
    """Return a smaller data set, stratified by label, in the original order; None keeps a part whole. If the task has
    no labels, samples are drawn uniformly. Raises DataError for a number outside 1 to the number of samples."""
    train = _choose(data, "training", data.train_y, train_samples, seed)
    test = _choose(data, "test", data.test_y, test_samples, seed)
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.test_x[test],
        test_y=data.test_y[test],
        natural_client=None if data.natural_client is None else data.natural_client[train],
    )


def _choose(data: Data, part: str, targets: torch.Tensor, samples: int | None, seed: int) -> slice | torch.Tensor:
    if samples is None:
        return slice(None)
    if not 1 <= samples <= len(targets):
        raise DataError(f"{data.name}: expected 1 to {len(targets)} {part} samples, got {samples}")
    labels = data.task.labels(targets) if data.task.label_count else np.zeros(len(targets), dtype=np.int64)
    return torch.from_numpy(stratified(labels, samples, seeds.rng(seed, f"subset/{part}")))


def pad(data: Data, side: int) -> Data:
    """Centre all images on black squares of side x side, for networks that need larger images (`TakesImages.min_hw`).

    If a margin is odd, the larger half is right or below. Boxes are moved with their objects. Raises DataError for
    samples that are not images, for images larger than `side`, and for a side above LARGEST_SIDE.
    """
    if not data.has_images:
        raise DataError(f"{data.name} has no images, and only images can be padded. Set dataset.pad=none")
    _, height, width = data.input_shape
    down, right = side - height, side - width
    if down < 0 or right < 0 or side > LARGEST_SIDE:
        raise DataError(
            f"{data.name}: images of {height} x {width} cannot be padded to {side} x {side} "
            f"(at most {LARGEST_SIDE} x {LARGEST_SIDE})"
        )
    margins = (right // 2, right - right // 2, down // 2, down - down // 2)
    train_x, test_x = (torch.nn.functional.pad(x, margins) for x in (data.train_x, data.test_x))
    train_y, test_y = data.train_y, data.test_y
    if has_boxes(data.task):
        shares = torch.tensor([[width, 0, right // 2], [0, height, down // 2]], dtype=torch.float64) / side
        train_y, test_y = (boxes.moved(y.double(), shares.expand(len(y), 2, 3)).to(y) for y in (train_y, test_y))
    return replace(data, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)
