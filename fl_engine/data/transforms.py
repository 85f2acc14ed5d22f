"""Operations on data sets in memory: fingerprints, splits, subsets, padding, means and standard deviations."""

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
from fl_engine.core.samples import Data, rows_of_chunk
from fl_engine.core.task import VOID, has

LARGEST_SIDE = 1024
"""Maximum side length of a padded image in pixels."""
COUNTED = 4096
"""Number of images per chunk when pixel values are counted."""
SMALL = 1e-3
"""Standard deviations below this value are rounded to six significant digits instead of six decimals."""
EQUAL = 1e-6
"""Standard deviations below this fraction of the mean are treated as rounding errors of float32."""


def as_tensors(
    train_x: NDArray[Any], train_y: NDArray[Any], test_x: NDArray[Any], test_y: NDArray[Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return samples and targets as tensors that share the arrays' memory."""
    of = torch.from_numpy
    return of(train_x), of(train_y), of(test_x), of(test_y)


def fingerprint(data: Data) -> str:
    """Return the SHA-256 (hex) of the shapes, types, bytes, task and normalisation of a data set.

    Identical data have the same fingerprint everywhere. Caches use the fingerprint as a key, and partitions store it.
    """
    digest = hashlib.sha256(repr((data.task.identity, data.mean, data.std)).encode())
    sources = [data.natural_client] + ([] if data.natural_test_client is None else [data.natural_test_client])
    for tensor in (data.train_x, data.train_y, data.test_x, data.test_y, *sources):
        if tensor is None:
            digest.update(b"none")
            continue
        digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def random_split(samples: int, test_share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the ascending positions of training and of test samples, for a data set that is published without a split.

    The test part equals scikit-learn's `train_test_split(test_size=test_share, random_state=42)`, which published code
    often uses. NumPy guarantees that the stream of its legacy generator never changes.
    """
    drawn = np.random.RandomState(42).permutation(samples).astype(np.int64)
    test = math.ceil(test_share * samples)
    return np.sort(drawn[test:]), np.sort(drawn[:test])


def stratified(labels: NDArray[np.int64], samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw `samples` positions without replacement, stratified by `labels`, and return them in ascending order.

    Class sizes are rounded by the largest remainder method (ties: the lower label) in integer arithmetic, so that all
    machines get the same result. A class with fewer than about len(labels) / `samples` samples may be left out.
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
    """Return a smaller data set, stratified by label, in the original order. If the number of training or test samples
    is None, the whole part is used. If the task has no labels, samples are drawn uniformly. Raises DataError if a
    number is less than 1 or exceeds the size of its part."""
    train = _choose(data, "training", data.train_y, train_samples, seed)
    test = _choose(data, "test", data.test_y, test_samples, seed)
    return replace(
        data,
        train_x=data.train_x[train],
        train_y=data.train_y[train],
        test_x=data.test_x[test],
        test_y=data.test_y[test],
        natural_client=None if data.natural_client is None else data.natural_client[train],
        natural_test_client=None if data.natural_test_client is None else data.natural_test_client[test],
    )


def _choose(data: Data, part: str, targets: torch.Tensor, samples: int | None, seed: int) -> slice | torch.Tensor:
    if samples is None:
        return slice(None)
    if not 1 <= samples <= len(targets):
        raise DataError(f"{data.name}: expected 1 to {len(targets)} {part} samples, got {samples}")
    labels = data.task.labels(targets) if data.task.label_count else np.zeros(len(targets), dtype=np.int64)
    return torch.from_numpy(stratified(labels, samples, seeds.rng(seed, f"subset/{part}")))


def pad(data: Data, side: int) -> Data:
    """Centre all images on black squares of `side` x `side` pixels, for networks that require larger images (`min_hw`).

    If a margin is odd, the larger half is on the right or below. Boxes are moved with the image, and the margins of
    segmentation maps get the ignored label VOID. Raises DataError if samples are not images, images are larger than
    `side`, or `side` is larger than LARGEST_SIDE.
    """
    if not data.has_images:
        raise DataError(f"{data.name} does not contain images, so it cannot be padded. Set dataset.pad=none")
    _, height, width = data.input_shape
    down, right = side - height, side - width
    if down < 0 or right < 0 or side > LARGEST_SIDE:
        raise DataError(f"{data.name}: the padded side must be from {max(height, width)} to {LARGEST_SIDE}, got {side}")
    margins = (right // 2, right - right // 2, down // 2, down - down // 2)
    train_x, test_x = (torch.nn.functional.pad(x, margins) for x in (data.train_x, data.test_x))
    train_y, test_y = data.train_y, data.test_y
    if has(data.task, "boxes"):
        shares = torch.tensor([[width, 0, right // 2], [0, height, down // 2]], dtype=torch.float64) / side
        train_y, test_y = (boxes.moved(y.double(), shares.expand(len(y), 2, 3)).to(y) for y in (train_y, test_y))
    if has(data.task, "maps"):
        train_y, test_y = (torch.nn.functional.pad(y, margins, value=VOID) for y in (train_y, test_y))
    return replace(data, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def as_numbers(data: Data) -> Data:
    """Convert tokens to floats with a mean and std per position, for networks that do not accept tokens."""
    train_x, test_x = data.train_x.float(), data.test_x.float()
    mean, std = moments(train_x.numpy())
    return replace(data, train_x=train_x, test_x=test_x, mean=mean, std=tuple(each or 1.0 for each in std))


def byte_statistics(images: NDArray[np.uint8]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of each channel of `images / 255` (N, C, H, W).

    Values are rounded to four decimals. Sums are computed with integers, so that all machines get the same result. The
    standard deviation of a constant channel is replaced by 1.
    """
    mean, std = [], []
    for channel in range(images.shape[1]):
        # Count in chunks, because `bincount` converts its input to 8-byte integers.
        counts = np.zeros(256, dtype=np.int64)
        for at in range(0, len(images), COUNTED):
            counts += np.bincount(images[at : at + COUNTED, channel].ravel(), minlength=256)
        values = np.arange(256)
        number, total, squares = int(counts.sum()), int(counts @ values), int(counts @ values**2)
        deviation = math.sqrt(number * squares - total * total) / number / 255
        mean.append(round(total / number / 255, 4))
        std.append(round(deviation, 4) or 1.0)
    return tuple(mean), tuple(std)


def moments(x: NDArray[np.float32], axis: int = -1) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation for each index of `axis`. The values are rounded to six decimals, so
    that all machines get the same result. If a standard deviation is below SMALL, it is rounded to six significant
    digits, and the mean to as many decimals. A standard deviation that is a rounding error of float32 is set to 0."""
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean = x.mean(others, dtype=np.float64, keepdims=True)
    squares = np.zeros(x.shape[axis])
    step = rows_of_chunk(x.shape)
    for at in range(0, len(x), step):  # subtracting the mean from the whole array would allocate twice its memory
        part = x[at : at + step] - mean
        squares += np.square(part, out=part).sum(others)
    std = np.sqrt(squares / (x.size // x.shape[axis]))
    pairs = [_rounded(float(m), float(s)) for m, s in zip(mean.ravel(), std, strict=True)]
    return tuple(m for m, _ in pairs), tuple(s for _, s in pairs)


def _rounded(mean: float, std: float) -> tuple[float, float]:
    if min(5e-7, EQUAL * abs(mean)) < std < SMALL:
        decimals = 5 - math.floor(math.log10(std))
        return round(mean, decimals) + 0.0, round(std, decimals)
    return float(np.round(mean, 6)) + 0.0, float(np.round(std, 6))  # adding 0.0 removes the sign of a negative zero
