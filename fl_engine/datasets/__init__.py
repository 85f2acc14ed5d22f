"""The data sets, in plain sight. A new one is a file with `load` (and `fetch`) and a line in `DATASETS`.

`tests/conformance/test_datasets.py` then holds it to `fl_engine.testing.datasets.DatasetSuite`. A data set of
your own is a `Source` too, and need not live here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.samples import Data
from fl_engine.data.files import data_root, fingerprint, pad, subset
from fl_engine.datasets import cifar10, digits, fashion_mnist

__all__ = ["DATASETS", "Source", "data_root", "fingerprint", "pad", "subset"]


@dataclass(frozen=True)
class Source:
    """Where a data set comes from; paths are relative to the data root, which the functions take."""

    about: str
    """One line for lists: images, classes, samples, licence, size of the download."""

    load: Callable[[Path], Data]
    """Reads what is there, never the network. Raises DataError (missing, damaged) and what to do."""

    fetch: Callable[[Path], None] | None = None
    """Downloads what is missing; None where a package brings the data. Raises DataError."""

    files: tuple[str, ...] = ()
    """What `load` reads."""

    def missing(self, root: Path) -> tuple[Path, ...]:
        """The files that are not there; empty when `load` can start."""
        return tuple(root / file for file in self.files if not (root / file).is_file())


DATASETS: dict[str, Source] = {
    "digits": Source(digits.ABOUT, digits.load),
    "fashion_mnist": Source(fashion_mnist.ABOUT, fashion_mnist.load, fashion_mnist.fetch, fashion_mnist.FILES),
    "cifar10": Source(cifar10.ABOUT, cifar10.load, cifar10.fetch, cifar10.FILES),
}
