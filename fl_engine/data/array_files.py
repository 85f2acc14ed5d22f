"""Arrays from NumPy's .npy files, and from the HDF5 files of TensorFlow Federated. Nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.data.files import damaged

HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
"""Readers of the header, by the format's version. Version 3.0 is for named fields, which are not numbers."""

DAMAGE = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    SyntaxError,
    TokenError,
    MemoryError,
    RecursionError,
    OverflowError,
)
"""What NumPy raises for a file that is not an array."""


def map_npy(path: Path) -> NDArray[np.generic]:
    """Map the numbers of a .npy file into memory. They stay on disk until they are used, so a false size in the header
    allocates nothing. Raises ValueError, which says what was found instead of numbers."""
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


@contextmanager
def tff_examples(path: Path, data_set: str) -> Iterator[Any]:
    """Open a file of TensorFlow Federated and yield its group `examples`, which has a group for each client.

    Raises DataError for a file without this group and for what h5py raises in the context, EnvironmentFailure if h5py
    is not installed.
    """
    try:
        import h5py
    except ImportError as error:
        raise EnvironmentFailure(f"{data_set} is read with h5py: pip install 'flexfleet[hdf5]'") from error
    try:
        with h5py.File(path, "r") as file:
            found = file.get("examples")
            if not isinstance(found, h5py.Group):
                raise damaged(path, "a group 'examples', as TensorFlow Federated writes it", "none")
            yield found
    except (OSError, RuntimeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as HDF5 ({error}). Delete the file and fetch it again") from error


def tff_arrays(who: str, client: Any, names: tuple[str, ...]) -> list[Any]:
    """Return these arrays of a client's group, not read yet. Raises DataError, which begins with `who`, if one is
    missing."""
    import h5py

    found = [client.get(name) if isinstance(client, h5py.Group) else None for name in names]
    if not all(isinstance(each, h5py.Dataset) for each in found):
        raise damaged(who, f"the arrays {', '.join(names)}", "none")
    return found
