"""Reads arrays from NumPy's files, without unpickling anything."""

from __future__ import annotations

import math
from pathlib import Path
from tokenize import TokenError

import numpy as np
from numpy.typing import NDArray

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers of the header, by the format's version. Version 3.0 is for named fields, which arrays of numbers do not
have."""

DAMAGE = (
    OSError, ValueError, TypeError, LookupError, SyntaxError, TokenError, MemoryError, RecursionError, OverflowError,
)  # fmt: skip
"""What a file that is no array makes NumPy raise."""


def mapped(path: Path) -> NDArray[np.generic]:
    """The numbers of a .npy file, mapped into memory: they stay on disk until they are used, so a false size in the
    header allocates nothing. Raises ValueError, which says what was found instead of numbers."""
    try:
        with path.open("rb") as file:
            shape, fortran, dtype = HEADERS[np.lib.format.read_magic(file)](file)
            start = file.tell()
        if dtype.kind not in "iuf":
            raise ValueError(f"{dtype} of {' x '.join(map(str, shape))}")
        if (size := path.stat().st_size - start) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{size} bytes of numbers")
        return np.memmap(path, dtype, "r", start, shape, "F" if fortran else "C")
    except DAMAGE as error:
        raise ValueError(str(error)[:300]) from error
