"""Tensors whose values stay in a file and are read when they are used, for data sets that do not fit into memory."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: without it, Linux refuses to map a file that is larger than the memory."""
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}


class FileSection(NamedTuple):
    """The part of a file that contains the values of a tensor, in C order and native byte order."""

    path: str
    dtype: str
    offset: int
    shape: tuple[int, ...]

    @staticmethod
    def of(array: np.memmap[Any, Any]) -> FileSection | None:
        """Return the section that contains the values of `array`. Return None if the values may differ from the file
        (copy-on-write, mode "c"), are not in C order, or have an unsupported type."""
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if (
            not isinstance(base, mmap.mmap)
            or array.filename is None
            or array.mode == "c"
            or not (array.flags.c_contiguous and array.dtype.isnative and array.dtype.name in DTYPES)
        ):
            return None
        mapped = np.frombuffer(base, np.uint8)
        begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # offset of `mapped` in the file
        offset = begins + array.ctypes.data - mapped.ctypes.data
        return FileSection(str(array.filename), array.dtype.name, offset, array.shape)

    def map(self) -> Tensor:
        """Return the values as a tensor. Changes to the tensor are not written to the file."""
        with open(self.path, "rb") as file:
            flags, access = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            whole = mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
        count = math.prod(self.shape)
        tensor = torch.frombuffer(whole, dtype=DTYPES[self.dtype], count=count, offset=self.offset).view(self.shape)
        tensor.file_section = self  # type: ignore[attr-defined]
        return tensor


def section_of(value: object) -> FileSection | None:
    """Return the section of a tensor that `FileSection.map` returned; None for other objects."""
    found: FileSection | None = getattr(value, "file_section", None)
    return found
