"""Data of one's own, from arrays; from folders and the data sets of other libraries: `other_data`.

How samples are read:

    uint8 (N, H, W)            grey images: a channel is added
    (N, H, W, C), C 1, 3 or 4  images with the channel last, unless H is 1, 3 or 4: it is moved to the front
    float images in 0..1       made uint8 if all are k / 255 for whole k; others stay numbers, which are normalised
    uint8 (N, C, H, W)         images
    other floats (N, ...)      numbers: vectors, series, maps
    integers (N, ...)          tokens from 0 on

and targets: integers are classes 0..k-1 (k is the largest + 1), floats are numbers to predict (regression). Integers
are ids if one is negative, or if the largest is at least 1,000 and at most half of the numbers up to it occur. The
classes are then the different ids in ascending order, and `data.task.names` keeps the ids. `mean` and `std` normalise
per channel of images and maps, else per feature; those that are not given are measured on the training samples.
Whatever does not fit raises DataError.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fl_engine.core import seeds
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data, are_bytes
from fl_engine.core.task import Task
from fl_engine.data.moments import byte_statistics, moments
from fl_engine.data.transforms import stratified
from fl_engine.tasks import Classification, Regression
from flexfleet.api.to_numpy import Array, array_of, as_int64, readable, targets_of

log = logging.getLogger("flexfleet")

CHANNELS = (1, 3, 4)
PAIR = 2
IDS = 1000
"""Labels from this number on are ids if most of the smaller numbers do not occur."""


def from_arrays(
    x: Any,
    y: Any,
    *,
    test: float | tuple[Any, Any] = 0.2,
    clients: Any = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "arrays",
) -> Data:
    """Make data of arrays.

    Args:
        x: Samples (N, ...), NumPy arrays or tensors.
        y: Targets (N,) or (N, outputs).
        test: Share of the samples to test on, of each class alike, drawn with a constant seed; or (x, y) of the test
            part.
        clients: (N,): the owner of each sample. A run then has these clients, unless it sets another `partition_rule`.
        mean, std: A number for each channel or feature, by which samples are normalised; None: those of the training
            samples.

    Raises:
        DataError: The arrays are no samples and targets, or do not fit each other.

    Example:
        >>> data = flexfleet.from_arrays(x, y, test=(test_x, test_y))
    """
    x, y = array_of(x, f"{name}: x"), targets_of(y, f"{name}: y")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise DataError(f"{name}: x has the shape {x.shape}, y {y.shape}; one target is needed for each sample")
    owner = None if clients is None else _owners(clients, len(x), name)
    _check_test(test, name)
    if isinstance(test, tuple):
        train, (test_x, test_y) = np.arange(len(x)), _test_part(test, name)
    else:
        train, held = _split(y, test, name)
        test_x, test_y = x[held], y[held]
    own = None if owner is None else owner[train]
    if owner is not None and (lost := len(np.unique(owner)) - len(np.unique(owner[train]))):
        log.warning(
            "%s: %d of %d clients do not train, because all their samples are in the test part. Give a smaller test "
            "share, or a test part of its own",
            name, lost, len(np.unique(owner)),
        )  # fmt: skip
    return _data(name, x[train], y[train], test_x, test_y, own, mean, std)


def from_clients(
    parts: Iterable[tuple[Any, Any]],
    *,
    test: float | tuple[Any, Any] = 0.2,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "clients",
) -> Data:
    """Make data of one (x, y) for each client. A run then has these clients with these samples, unless it sets another
    `partition_rule`.

    Args:
        parts: Samples and targets of each client, as in `from_arrays`.
        test: Share of each client's samples to test on, or (x, y) of a common test part.

    Raises:
        DataError: As in `from_arrays`, or clients' samples or targets are not alike.

    Example:
        >>> data = flexfleet.from_clients([(x0, y0), (x1, y1)])
    """
    _check_test(test, name)
    pairs = [] if isinstance(parts, Mapping) or not isinstance(parts, Iterable) else list(parts)
    if any(not isinstance(pair, tuple | list) or len(pair) != PAIR for pair in pairs):
        raise DataError(f"{name}: one (x, y) for each client is expected")
    arrays = [
        (array_of(x, f"{name}: x of client {i}"), targets_of(y, f"{name}: y of client {i}"))
        for i, (x, y) in enumerate(pairs)
    ]
    if not arrays:
        raise DataError(f"{name}: no client has data; one (x, y) for each client is expected")
    kept: list[tuple[Array, Array]] = []
    held: list[tuple[Array, Array]] = []
    first_x, first_y = arrays[0]
    for i, (x, y) in enumerate(arrays):
        flat = x.ndim < 1 or y.ndim < 1 or len(x) != len(y)
        if flat or x.dtype != first_x.dtype or x.shape[1:] != first_x.shape[1:] or not _alike(y, first_y):
            raise DataError(
                f"{name}: client {i} has x {x.dtype} {x.shape} and y {y.dtype} {y.shape}, client 0 x {first_x.dtype} "
                f"{first_x.shape} and y {first_y.dtype} {first_y.shape}; all clients' samples and targets have to be "
                "alike, with a target for each sample"
            )
        if not len(x):
            raise DataError(f"{name}: client {i} has no sample: leave it out, the clients after it count one less")
        train, out = (np.arange(len(x)), np.arange(0)) if isinstance(test, tuple) else _split(y, test, f"{name}: {i}")
        kept.append((x[train], y[train]))
        held.append((x[out], y[out]))
    test_x, test_y = (
        _test_part(test, name)
        if isinstance(test, tuple)
        else (np.concatenate([pair[of] for pair in held]) for of in (0, 1))
    )
    owner = np.repeat(np.arange(len(kept)), [len(x) for x, _ in kept])
    x, y = (np.concatenate([pair[of] for pair in kept]) for of in (0, 1))
    return _data(name, x, y, test_x, test_y, owner, mean, std)


# ------------------------------------------------------------------------------------------------ putting together
def _data(
    name: str,
    x: Array,
    y: Array,
    test_x: Array,
    test_y: Array,
    owner: Array | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Data:
    task, y, test_y = _task(y, test_y, name)
    x, test_x = _channel_first(x), _channel_first(test_x)
    x, test_x = _samples(x, name), _samples(test_x, name)
    if (mean is None) != (std is None):
        raise DataError(f"{name}: mean and std go together: give both, or neither, and they are measured")
    mean, std = (each.tolist() if isinstance(each, np.ndarray | torch.Tensor) else each for each in (mean, std))
    if not all(each is None or isinstance(each, Sequence) for each in (mean, std)):
        raise DataError(f"{name}: mean and std have a number for each channel or feature, [0.5]; got {mean!r}, {std!r}")
    if mean is None or std is None:
        mean, std = _measured(x, name)
    own = None if owner is None else torch.from_numpy(np.ascontiguousarray(owner, dtype=np.int64))
    parts = {"train_x": x, "train_y": y, "test_x": test_x, "test_y": test_y}
    tensors = {part: torch.from_numpy(np.ascontiguousarray(values)) for part, values in parts.items()}
    return Data(name, task, **tensors, mean=tuple(mean), std=tuple(std), natural_client=own)


def _test_part(test: tuple[Any, Any], name: str) -> tuple[Array, Array]:
    x, y = test
    return array_of(x, f"{name}: test"), targets_of(y, f"{name}: test")


def _check_test(test: Any, name: str) -> None:
    if isinstance(test, tuple) and len(test) != PAIR:
        raise DataError(f"{name}: test is a share, or (x, y) of the test part, got {len(test)} things")


def _alike(a: Array, b: Array) -> bool:
    """Whether targets have one shape, and all are integers or all are floats."""
    kinds = ("i" if each.dtype.kind in "iu" else each.dtype.kind for each in (a, b))
    return len(set(kinds)) == 1 and a.shape[1:] == b.shape[1:]


def _owners(clients: Any, samples: int, name: str) -> Array:
    read = readable(clients, f"{name}: clients")
    try:
        listed = np.asarray(read)
    except ValueError as error:
        raise DataError(f"{name}: clients says whose each of {samples} samples is, (N,): {error}") from error
    if listed.shape != (samples,):
        raise DataError(f"{name}: clients says whose each of {samples} samples is, (N,); got the shape {listed.shape}")
    try:
        missing = sum(each is None or bool(each != each) for each in listed.tolist())  # NaN differs from itself
        if not missing:
            return np.unique(listed, return_inverse=True)[1]
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: clients must be all numbers or all texts: {error}") from error
    raise DataError(f"{name}: clients: {missing} of {samples} samples have no client. Leave them out, or name one")


def _split(y: Array, share: float, name: str) -> tuple[Array, Array]:
    """Return ascending positions of the training and the test part, with the classes in equal shares."""
    count = round(share * len(y)) if isinstance(share, float | int) and math.isfinite(share) else 0
    if not 1 <= count < len(y):
        given = share if isinstance(share, float | int) else f"a {type(share).__name__}"
        raise DataError(
            f"{name}: test = {given} of {len(y)} samples leaves one part empty: give a share between 0 and 1, or "
            "(x, y) of the test part"
        )
    labels = y if y.ndim == 1 and y.dtype.kind in "iu" else np.zeros(len(y), dtype=np.int64)
    held = stratified(labels.astype(np.int64), count, seeds.rng(0, "own/test"))
    return np.setdiff1d(np.arange(len(y)), held), held


def _task(y: Array, test_y: Array, name: str) -> tuple[Task, Array, Array]:
    """Return the task, and the targets of both parts in the form that it takes."""
    if not len(y) or not len(test_y):
        raise DataError(f"{name}: {len(y)} training and {len(test_y)} test samples; both parts need at least one")
    if not _alike(y, test_y):
        raise DataError(
            f"{name}: training targets are {y.dtype} {y.shape}, those to test on {test_y.dtype} {test_y.shape}: both "
            "have to be integers (classes) or both floats (numbers to predict), of one shape"
        )
    if y.dtype.kind in "iu":
        seen = np.union1d(y, test_y)
        largest = int(seen[-1])
        ids = seen[0] < 0 or (largest >= IDS and 2 * len(seen) <= largest)
        if len(seen) < 2 and (ids or largest == 0):
            raise DataError(f"{name}: all targets are {largest}: at least two classes are needed")
        if ids:
            log.warning(
                "%s: the labels are ids from %d to %d. They become the classes 0 to %d in ascending order, and "
                "task.names keeps the ids. If a label such as -1 marks samples without a class, leave them out",
                name, seen[0], largest, len(seen) - 1,
            )  # fmt: skip
            task = Classification(len(seen), names=tuple(map(str, seen.tolist())))
            return task, np.searchsorted(seen, y), np.searchsorted(seen, test_y)
        if len(seen) <= largest:
            first = next(i for i, each in enumerate([*seen, None]) if i != each)
            log.warning(
                "%s: the largest label is %d, but class %d has no sample (%d classes have samples). If your labels "
                "are not 0, 1, 2, ..., renumber them: numpy.unique(y, return_inverse=True)[1]",
                name, largest, first, len(seen),
            )  # fmt: skip
        return Classification(largest + 1), y, test_y
    if y.dtype.kind == "f":
        with np.errstate(over="ignore"):  # `Data` refuses numbers that are too large
            return Regression(1 if y.ndim == 1 else y.shape[1]), y.astype(np.float32), test_y.astype(np.float32)
    raise DataError(
        f"{name}: targets are integers (classes) or floats (numbers to predict), got {y.dtype}: y.astype(int)"
    )


def _channel_first(x: Array) -> Array:
    last = x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS
    return np.moveaxis(x, 3, 1) if last else x


def _feature_axis(x: Array) -> int:
    """Return the axis of which mean and std have a value for each entry."""
    return 1 if x.ndim == 4 else -1


def _samples(x: Array, name: str) -> Array:
    """Return samples in the form that the head of this file describes, with the channel in front."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim != 4:
        raise DataError(
            f"{name}: uint8 samples are images, (N, H, W), (N, C, H, W) or (N, H, W, C); got {x.shape}. Give "
            "measurements as floats, tokens as int64"
        )
    if x.dtype == np.bool_:
        raise DataError(f"{name}: samples are numbers, got bool: x.astype(numpy.float32)")
    if x.dtype.kind != "f":
        return x if x.dtype == np.uint8 else as_int64(x, f"{name}: x", "token", "tokens")
    with np.errstate(over="ignore"):  # what is too large is told below
        x = x.astype(np.float32)
    in_0_1 = x.ndim == 4 and x.size and np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1
    return np.rint(x * 255).astype(np.uint8) if in_0_1 and are_bytes(torch.from_numpy(x)) else x


def _measured(x: Array, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if x.dtype == np.uint8:
        return byte_statistics(x)
    if x.dtype.kind != "f":
        return (), ()
    if not np.isfinite(x).all():
        raise DataError(
            f"{name}: samples hold NaN or infinity, or more than float32 can hold: fill in or leave out what is "
            "missing, scale down what is too large"
        )
    mean, std = moments(x, _feature_axis(x))
    return mean, tuple(each or 1.0 for each in std)
