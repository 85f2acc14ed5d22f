"""The HDF5 files of TensorFlow Federated: a group `examples` with a group for each client, whose arrays have a row for
each sample. Needs h5py: `pip install 'flexfleet[hdf5]'`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_engine.core.errors import DataError, EnvironmentFailure


@contextmanager
def examples(path: Path, data_set: str) -> Iterator[Any]:
    """The group `examples` of a file, open as long as the context. Raises DataError for a file without it, and for all
    that h5py raises in the context; EnvironmentFailure if h5py is not installed."""
    try:
        import h5py  # heavy, and for these data sets alone
    except ImportError as error:
        raise EnvironmentFailure(f"{data_set} is read with h5py: pip install 'flexfleet[hdf5]'") from error
    try:  # h5py has errors of many kinds for a damaged file
        with h5py.File(path, "r") as file:
            found = file.get("examples")
            if not isinstance(found, h5py.Group):
                raise DataError(f"{path}: expected a group 'examples', as TensorFlow Federated has it; is it another?")
            yield found
    except (
        OSError,
        RuntimeError,
        KeyError,
        TypeError,
        ValueError,
        UnicodeError,
    ) as error:
        raise DataError(f"{path}: cannot be read as HDF5 ({error}); delete it and fetch again") from error


def arrays(who: str, client: Any, names: tuple[str, ...]) -> list[Any]:
    """These arrays of a client's group, not read yet. Raises DataError, which begins with `who`, if one is missing."""
    import h5py

    found = [client.get(name) if isinstance(client, h5py.Group) else None for name in names]
    if not all(isinstance(each, h5py.Dataset) for each in found):
        said = f"the arrays {' and '.join(names)}" if len(names) > 1 else f"the array {names[0]}"
        raise DataError(f"{who}: expected {said}; delete the file and fetch again")
    return found
