"""Digits: 1,797 grey images of 8 x 8 in 10 classes, as part of scikit-learn; nothing to download.

Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998 (its test part).

scikit-learn offers no split, so this one is fixed: 20 % of every class (359 samples) are for testing, drawn with a
constant seed. Values 0..16 become 0..255.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data.transforms import stratified
from fl_engine.storage.store import sha256
from fl_engine.tasks import Classification

ABOUT = "Digits, 8x8 grey, 10 classes, 1,438 + 359; licence CC BY 4.0; comes with scikit-learn"
URL = "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits"
TEST_SAMPLES = 359

MOST_BYTES = 2**20
CHECKSUM = "e10b10289c0d9d8a1b3e6b7dfe998949029a89056e0e06dfb989924a36d75a3c"
"""sha256 of the table (1797, 65) as little-endian int64. It is of the values, so it does not depend on the file's
format."""

# Mean and standard deviation of the 1,438 training images, in units of 255.
MEAN = (0.3054,)
STD = (0.3762,)


def _file() -> Path:
    """The path of the file, with 64 pixels and a label per line. Importing scikit-learn to read it would take 2 s in
    every pod."""
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise EnvironmentFailure("digits come with scikit-learn, which is missing: pip install scikit-learn")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise EnvironmentFailure(f"scikit-learn should bring {path}, which is missing: install it again")
    return path


def _table() -> NDArray[np.int64]:
    path = _file()
    try:
        with gzip.open(path) as file:
            table = np.loadtxt(io.BytesIO(file.read(MOST_BYTES)), delimiter=",", dtype=np.int64)
        if (found := sha256(table.astype("<i8").tobytes())) != CHECKSUM:
            raise ValueError(f"{' x '.join(map(str, table.shape))} other values, of sha256 {found}")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise EnvironmentFailure(
            f"{path} does not hold the digits of scikit-learn ({error}): install scikit-learn again"
        ) from error
    return table


def load(root: Path) -> Data:
    """The data set; `root` is ignored. Raises EnvironmentFailure if scikit-learn is missing or damaged."""
    table = _table()
    # Integer arithmetic, rounding half up: 16 becomes 255, and all machines agree.
    images = ((table[:, :64].reshape(-1, 1, 8, 8) * 255 + 8) // 16).astype(np.uint8)
    labels = table[:, 64].copy()
    test = np.zeros(len(labels), dtype=bool)
    test[stratified(labels, TEST_SAMPLES, seeds.rng(0, "digits/test"))] = True
    return Data(
        name="digits",
        task=Classification(10),
        train_x=torch.from_numpy(images[~test]),
        train_y=torch.from_numpy(labels[~test]),
        test_x=torch.from_numpy(images[test]),
        test_y=torch.from_numpy(labels[test]),
        mean=MEAN,
        std=STD,
    )
