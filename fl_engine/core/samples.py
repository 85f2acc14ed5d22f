"""Data sets in memory: samples, targets and normalisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.task import Task, label_word, unfit

IMAGE_AXES = 4
"""Axes of images, (N, C, H, W)."""
BYTE = 255
NEAR = 1e-3
"""The largest distance of 255 times a float image from whole numbers. float32 is much more exact."""
CHECKED = 4096
"""Number of samples checked at a time."""


def said(x: Tensor) -> str:
    """Return the type and shape of one sample."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}"


def tensor_of(value: object, what: str) -> Tensor:
    """Return a dense tensor. Raises DataError for a value that is neither a dense tensor nor an array of numbers."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise DataError(f"{what} must be a dense tensor, got {value.layout}. Give x.to_dense()")
        return value.detach()
    if not isinstance(value, np.ndarray):
        raise DataError(f"{what} must be a tensor or a NumPy array, got {type(value).__name__}")
    need_no_mask(value, what)
    if value.dtype.kind not in "iuf":
        raise DataError(f"{what} must be numbers, got a NumPy array of {value.dtype}")
    if value.dtype != np.uint8:
        with np.errstate(over="ignore"):  # infinite values are refused later
            value = value.astype(np.float32 if value.dtype.kind == "f" else np.int64, copy=False)
    # torch supports neither negative strides nor read-only tensors.
    return torch.from_numpy(np.require(value, requirements=("C", "W")))


def need_no_mask(value: object, what: str) -> None:
    """Raise DataError for a masked array with masked values."""
    if isinstance(value, np.ma.MaskedArray) and (masked := int(np.sum(value.mask))):
        raise DataError(f"{what}: {masked} values are masked. Fill them in with x.filled(...)")


def samples_of(x: Tensor, what: str) -> Tensor:
    """Return the samples as `Data` stores them. Raises DataError if they are of none of its kinds."""
    if x.dim() < 2:
        raise DataError(f"{what} must have at least two axes, (N, F), got {tuple(x.shape)}")
    if len(x) and not x.numel():
        raise DataError(f"{what} must not have empty samples, got {tuple(x.shape)}")
    if x.dtype == torch.uint8:
        if x.dim() != IMAGE_AXES:
            raise DataError(
                f"{what}: uint8 samples must be images (N, C, H, W), got {tuple(x.shape)}. Give grey images a channel, "
                "x[:, None], measurements as float32, tokens as int64"
            )
        return x
    if x.dtype == torch.bool or x.is_complex():
        raise DataError(f"{what} must be uint8, floats or integers, got {x.dtype}")
    if x.is_floating_point():
        x = x.float()
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(x, CHECKED)):
            where = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten()
            raise DataError(f"{what} must be finite floats, sample {int(where[0])} is not ({len(where)} such samples)")
        return x
    x = x.long()  # torch has no minimum of uint16, uint32 and uint64
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    if x.dim() == IMAGE_AXES:
        largest = (1 << max(16, high.bit_length())) - 1  # dividing by less would lose bits of 16-bit images
        cure = "x.to(torch.uint8)" if low >= 0 and high <= BYTE else "floats" if low < 0 else f"x / {largest}"
        raise DataError(f"{what}: images and maps must be uint8 or floats, got integers {low}..{high}. Give {cure}")
    if low < 0:
        raise DataError(f"{what}: integers must be tokens from 0 on, got {low}. Give measurements as floats")
    return x


def numbers_of(value: object, what: str) -> tuple[float, ...]:
    """Return a list, an array or a tensor of finite numbers as a tuple."""
    listed = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(listed, Sequence) or not all(
        isinstance(n, int | float | np.integer | np.floating) and math.isfinite(n) for n in listed
    ):
        raise DataError(f"{what} must be finite numbers, one for each channel or feature, e.g. (0.5,), got {value!r}")
    return tuple(float(n) for n in listed)


def check_normalisation(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raise DataError if mean and std do not fit the samples."""
    images = x.dtype == torch.uint8
    if x.dtype == torch.int64:
        if mean or std:
            raise DataError(f"{name}: tokens are not normalised. Leave out mean and std")
        return
    wanted = _features(x)
    for what, values in (("mean", mean), ("std", std)):
        if len(values) != wanted and (images or mean or std):
            raise DataError(f"{name}: {what} must have {wanted} values, one for each feature, got {len(values)}")
        if images and any(abs(value) > 1 for value in values):
            raise DataError(f"{name}: {what} of images must be in units of 255, at most 1, got {values}")
    if any(value <= 0 for value in std):
        raise DataError(f"{name}: std must be above 0, got {min(std):g}. Leave out features that never change")
    if not images and not mean and x.dim() == IMAGE_AXES and float(x.min()) >= 0 and float(x.max()) <= 1:
        raise DataError(
            f"{name}: float samples {tuple(x.shape[1:])} in 0..1 look like images that are not normalised. Give mean "
            "and std, or uint8: (x * 255).round().to(torch.uint8)"
        )


def are_bytes(x: Tensor) -> bool:
    """Return whether all numbers, in 0..1, are k / 255, so that uint8 keeps their values."""
    return bool(((x * BYTE).round() - x * BYTE).abs().max() <= NEAR)


def sources_of(name: str, value: object, samples: int) -> Tensor:
    """Return `Data.natural_client` checked. Raises DataError unless it has an integer for each training sample."""
    sources = tensor_of(value, f"{name}: natural_client")
    if (
        sources.is_floating_point()
        or sources.is_complex()
        or sources.dtype == torch.bool
        or sources.shape != (samples,)
    ):
        raise DataError(
            f"{name}: natural_client must be integers ({samples},), one for each training sample, got {sources.dtype} "
            f"{tuple(sources.shape)}"
        )
    return sources.long()


def _features(x: Tensor) -> int:
    """Return the length of the axis to which mean and std belong."""
    return x.shape[1] if x.dim() == IMAGE_AXES else x.shape[-1]


# ------------------------------------------------------------------------------------------------------ data
@dataclass(frozen=True)
class Data:
    """A data set in memory. NumPy arrays become tensors. The task defines the targets.

    Samples (N, ...) are of one of three kinds:

        images    uint8 (N, C, H, W); a network gets `(x / 255 - mean) / std`, per channel
        floats    of any shape: vectors (N, F), series (N, T, F), maps (N, C, H, W); a network gets `(x - mean) / std`,
                  per feature (the last axis, or the channel of maps), or x without mean and std
        tokens    integers from 0 on, of any shape; a network gets them unchanged

    `natural_client` (N_train,) is the source of each training sample (a writer, a user), for the natural partition.
    Raises DataError for other samples, for numbers that are not finite, and for fields that do not fit each other.
    """

    name: str
    task: Task
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    natural_client: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise DataError(f"a data set's name must be a word, got {self.name!r}")
        if isinstance(self.task, type) or not isinstance(self.task, Task):
            raise DataError(f"{self.name}: task must be one of fl_engine.tasks, e.g. Regression(), got {self.task!r}")
        if wrong := unfit(self.task.metric.name):
            raise DataError(f"{self.name}: {type(self.task).__name__} decides by {self.task.metric.name!r}: {wrong}")
        if not self.task.metric.higher_is_better:
            raise DataError(
                f"{self.name}: the first metric of a task must be better when higher, got {self.task.metric.name}"
            )
        label_word(self.task)
        checked: dict[str, Any] = {"mean": numbers_of(self.mean, f"{self.name}: mean")}
        checked["std"] = numbers_of(self.std, f"{self.name}: std")
        for part in ("train", "test"):
            x, y = (tensor_of(getattr(self, f"{part}_{of}"), f"{self.name}: {part}_{of}") for of in "xy")
            x = samples_of(x, f"{self.name}: {part}_x")
            if not len(x):
                raise DataError(f"{self.name}: {part}_x must have at least one sample")
            if y.dim() == 0 or len(x) != len(y):
                raise DataError(
                    f"{self.name}: {part}_y must have one target for each of the {len(x)} samples of {part}_x, got "
                    f"{len(y) if y.dim() else 'none'}"
                )
            checked |= {f"{part}_x": x, f"{part}_y": self.task.check(y, f"{self.name}: {part}_y")}
        train, test = checked["train_x"], checked["test_x"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(f"{self.name}: training and test samples must be alike, got {said(train)} and {said(test)}")
        check_normalisation(self.name, train, checked["mean"], checked["std"])
        if self.natural_client is not None:
            checked["natural_client"] = sources_of(self.name, self.natural_client, len(train))
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """Return one line without the samples."""
        return (
            f"<Data {self.name}: {len(self.train_x)} training and {len(self.test_x)} test samples, "
            f"{said(self.train_x)}, {self.task}>"
        )

    def part(self, train: Tensor, test: Tensor) -> Data:
        """Return the training samples at these positions, and those at `test` as test samples. They are not checked
        again: a part need not have what the whole must have, such as an image with a box."""
        found = copy.copy(self)
        of = {"train_x": self.train_x[train], "train_y": self.train_y[train]}
        if test is train:
            of |= {"test_x": of["train_x"], "test_y": of["train_y"]}
        else:
            of |= {"test_x": self.train_x[test], "test_y": self.train_y[test]}
        for name, value in {**of, "natural_client": None}.items():
            object.__setattr__(found, name, value)
        return found

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def has_images(self) -> bool:
        return self.train_x.dtype == torch.uint8

    @property
    def has_tokens(self) -> bool:
        return self.train_x.dtype == torch.int64

    def normalise(self, x: Tensor) -> Tensor:
        """Return samples (B, ...) as a network expects them, on their device: float32, or int64 tokens."""
        if not self.mean:
            return x
        shape = _feature_view(x)
        mean = torch.tensor(self.mean, device=x.device).view(shape)
        std = torch.tensor(self.std, device=x.device).view(shape)
        # In place, since all samples of a client are normalised at once, and results between would lie in memory too.
        centred = x.float().div_(255).sub_(mean) if x.dtype == torch.uint8 else x - mean
        return centred.div_(std)


def batch_layout(x: Tensor) -> Tensor:
    """Return a batch in the memory layout of networks: maps channels last, anything else contiguous."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == IMAGE_AXES else torch.contiguous_format)


def outputs_of(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of all exits, the last one last. `out` is a tensor if the network has no early exits."""
    return out if isinstance(out, tuple) else (out,)


def split(x: Tensor, batch_size: int, answer: Callable[[Tensor], object]) -> Sequence[Tensor]:
    """Return samples (N, ...) in batches for evaluation by `answer`. A last batch of one sample joins the one before if
    the network cannot process it, as batch norm without running statistics."""
    parts = torch.split(x, batch_size)
    if len(parts) == 1 or len(parts[-1]) > 1:
        return parts
    try:
        with torch.no_grad():
            answer(parts[-1])
    except ValueError:
        return (*parts[:-2], x[-batch_size - 1 :])
    return parts


def _feature_view(x: Tensor) -> tuple[int, ...]:
    """Return the shape in which a value per feature is broadcast over samples."""
    return (1, -1, 1, 1) if x.dim() == IMAGE_AXES else (*[1] * (x.dim() - 1), -1)
