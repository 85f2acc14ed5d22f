"""What is given, as arrays of NumPy: arrays, tensors, lists of them, images of Pillow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError
from fl_engine.core.samples import need_no_mask

Array = NDArray[Any]
DEEP = ("I", "F")
"""How the names of Pillow's modes of more than 8 bits begin: I, I;16, I;16B, F."""


def array_of(value: Any, what: str, targets: bool = False) -> Array:
    """Return an array of numbers. Raises DataError, which names `what`."""
    read = readable(value, what)
    try:
        found = np.asarray(read)
    except ValueError as error:
        raise DataError(f"{what}: samples of different shapes cannot be one array: {error}") from error
    if found.dtype.kind not in "iufb":
        given = f"an array of {found.dtype}" if found.ndim else type(value).__name__
        words = targets and found.dtype.kind in ("USO" if found.ndim else "US")
        hint = ". Labels that are words: numpy.unique(y, return_inverse=True)[1]" if words else ""
        raise DataError(f"{what}: numbers are expected, got {given}{hint}")
    return found


def targets_of(y: Any, what: str) -> Array:
    """Like `array_of`, with integers as int64, because NumPy joins int64 and uint64 to floats."""
    found = array_of(y, what, targets=True)
    return as_int64(found, what, "class", "classes") if found.dtype.kind in "iu" else found


def as_int64(found: Array, what: str, one: str, several: str) -> Array:
    """Return integers as int64. Raises DataError for larger ones, which would become negative."""
    if found.dtype.kind == "u" and found.size and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"{what}: {found.max()} is no {one}: {several} are 0, 1, 2, ...")
    return found.astype(np.int64)


def readable(value: Any, what: str) -> Any:
    """Return what NumPy reads correctly: no tensors with a gradient, no masks, no palettes."""
    if isinstance(value, list | tuple):
        return [readable(each, what) if _is_read_here(each) else each for each in value]
    if _is_picture(value):
        return pixels(value, what)
    if isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            kind = f"{value.layout}, {value.dtype}".replace("torch.", "")
            raise DataError(f"{what}: a dense tensor of NumPy's types is expected, got one of {kind}") from error
    need_no_mask(value, what)
    return value


def pixels(picture: Any, what: str, size: tuple[int, int] | None = None) -> Array:
    """Return uint8 (H, W) of a grey or black and white image of Pillow, (3, H, W) of any other."""
    if picture.mode.startswith(DEEP):
        raise DataError(
            f"{what}: its pixels have more than 8 bits (mode {picture.mode}), which uint8 cannot hold. Give the pixels "
            "to from_arrays as floats in 0..1: numpy.asarray(image) / 65535 for 16 bits"
        )
    picture = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    if size is not None:
        high, wide = size
        picture = picture.resize((wide, high))
    found = np.array(picture, dtype=np.uint8)
    return found if found.ndim == 2 else np.moveaxis(found, 2, 0)


def _is_read_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ma.MaskedArray) or _is_picture(value)


def _is_picture(value: Any) -> bool:
    """Whether it is an image of Pillow, which need not be installed."""
    return hasattr(value, "getbands")
