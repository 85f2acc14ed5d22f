"""What samples, their normalisation and their sources may be, and what is wrong where they are not (`samples.Data`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_engine.core.errors import DataError

IMAGE_AXES = 4
"""(N, C, H, W)"""
BYTE = 255
NEAR = 1e-3
"""The largest distance of 255 times a float image from whole numbers: float32 holds k / 255 much closer."""
CHECKED = 4096
"""Samples whose numbers are checked at a time."""


def said(x: Tensor) -> str:
    """The type and shape of one of the samples."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape[1:])}"


def tensor_of(value: object, what: str) -> Tensor:
    """Raises DataError for what is neither a dense tensor nor an array of numbers."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            kind = str(value.layout).removeprefix("torch.")
            raise DataError(f"{what}: a dense tensor is expected, got {kind}: x.to_dense()")
        return value.detach()
    if not isinstance(value, np.ndarray):
        raise DataError(f"{what} is a tensor or a NumPy array, got {type(value).__name__}")
    need_no_mask(value, what)
    if value.dtype.kind not in "iuf":
        raise DataError(f"{what}: numbers are expected, got a NumPy array of {value.dtype}")
    if value.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what becomes infinite is refused later, by its sample
            value = value.astype(np.float32 if value.dtype.kind == "f" else np.int64, copy=False)
    # torch has neither negative strides nor tensors that must not be written.
    return torch.from_numpy(np.require(value, requirements=("C", "W")))


def need_no_mask(value: object, what: str) -> None:
    """Raises DataError for a masked array that masks something: what lies below the mask is no datum."""
    if isinstance(value, np.ma.MaskedArray) and (masked := int(np.sum(value.mask))):
        raise DataError(f"{what}: {masked} values are masked; fill them in (x.filled(...)), or leave out their samples")


def samples_of(x: Tensor, what: str) -> Tensor:
    """Samples as `Data` holds them. Raises DataError where they are of none of its kinds."""
    if x.dim() < 2:
        raise DataError(f"{what}: samples have at least one axis besides their number, (N, F); got {tuple(x.shape)}")
    if len(x) and not x.numel():
        raise DataError(f"{what}: a sample has no entries, shape {tuple(x.shape)}")
    if x.dtype == torch.uint8:
        if x.dim() != IMAGE_AXES:
            raise DataError(
                f"{what}: uint8 samples are images (N, C, H, W), got {tuple(x.shape)}; give grey images a channel, "
                "x[:, None], measurements as float32, tokens as int64"
            )
        return x
    if x.dtype == torch.bool or x.is_complex():
        raise DataError(f"{what}: samples are uint8, float or integers, got {str(x.dtype).removeprefix('torch.')}")
    if x.is_floating_point():
        x = x.float()
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(x, CHECKED)):
            where = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten()
            raise DataError(
                f"{what}: sample {int(where[0])} holds NaN, infinity or more than float32 can hold ({len(where)} such "
                "samples); fill in or leave out what is missing"
            )
        return x
    if x.dim() == IMAGE_AXES:
        raise DataError(f"{what}: {_cure_of_integers(x)}")
    x = x.long()  # torch has no minimum of uint16, uint32 and uint64
    if x.numel() and int(x.min()) < 0:
        raise DataError(f"{what}: integers are tokens from 0 on, found {int(x.min())}; give measurements as floats")
    return x


def _cure_of_integers(x: Tensor) -> str:
    """What is wrong with integers (N, C, H, W) that are not uint8, and the conversion that keeps their values apart."""
    kind, x = str(x.dtype).removeprefix("torch."), x.long()
    low, high = (int(x.min()), int(x.max())) if x.numel() else (0, 0)
    found = f"images and maps must be uint8 or floats, got {kind} {tuple(x.shape)} from {low} to {high}. "
    if low < 0:
        return found + "Give them as floats"
    if high <= BYTE:
        return found + "Give them as uint8: x.to(torch.uint8)"
    return found + f"Divide them by the largest possible value, which gives floats in 0..1: x / {_most(high)}"


def _most(value: int) -> int:
    """The largest number of 16 bits, or of as many as the value takes."""
    return (1 << max(16, value.bit_length())) - 1


def numbers_of(value: object, what: str) -> tuple[float, ...]:
    """A list, an array or a tensor of numbers as a tuple."""
    listed = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    if not isinstance(listed, Sequence) or not all(_is_number(n) for n in listed):
        raise DataError(f"{what} is a tuple with a number for each channel or feature, e.g. (0.5,), got {value!r}")
    numbers = tuple(float(n) for n in listed)
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{what} is a tuple of finite numbers, got {numbers!r}")
    return numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def check_normalisation(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    """Raises DataError where mean and std do not fit the samples."""
    images, tokens = x.dtype == torch.uint8, x.dtype == torch.int64
    if tokens:
        if mean or std:
            raise DataError(f"{name}: integer samples are tokens, which are not normalised: leave out mean and std")
        return
    unit = "channel" if x.dim() == IMAGE_AXES else "feature"
    wanted = _features(x)
    for what, values in (("mean", mean), ("std", std)):
        if len(values) != wanted and (images or mean or std):
            hint = "" if images else ", or give neither mean nor std"
            raise DataError(f"{name}: {what} has {len(values)} values for {wanted} {unit}s; give one for each{hint}")
        if images and any(abs(value) > 1 for value in values):
            raise DataError(f"{name}: {what} of images is in units of 255, so at most 1; got {values}: divide by 255")
    if any(value <= 0 for value in std):
        raise DataError(f"{name}: std is positive, got {min(std):g}; leave out {unit}s that never change")
    if not images and not mean and x.dim() == IMAGE_AXES and float(x.min()) >= 0 and float(x.max()) <= 1:
        bytes_ = all(are_bytes(part) for part in torch.split(x, CHECKED))
        cure = "as uint8, (x * 255).round().to(torch.uint8), or " if bytes_ else ""
        raise DataError(
            f"{name}: float samples {tuple(x.shape[1:])} in 0..1 look like images that are not normalised: give them "
            f"{cure}with their mean and std"
        )


def are_bytes(x: Tensor) -> bool:
    """Whether all numbers, in 0..1, are k / 255 for whole k, so that uint8 keeps their values."""
    return bool(((x * BYTE).round() - x * BYTE).abs().max() <= NEAR)


def sources_of(name: str, value: object, samples: int) -> Tensor:
    """`Data.natural_client`. Raises DataError unless it has an integer for each training sample."""
    sources = tensor_of(value, f"{name}: natural_client")
    if sources.is_floating_point() or sources.is_complex() or sources.dtype == torch.bool:
        raise DataError(f"{name}: natural_client holds integers, got {str(sources.dtype).removeprefix('torch.')}")
    if sources.shape != (samples,):
        raise DataError(
            f"{name}: natural_client names the source of each of {samples} training samples, (N,); got the shape "
            f"{tuple(sources.shape)}"
        )
    return sources.long()


def _features(x: Tensor) -> int:
    """The length of the axis that mean and std are per."""
    return x.shape[1] if x.dim() == IMAGE_AXES else x.shape[-1]
