"""Digits: 1,797 grey images of 8 x 8 pixels in 10 classes. The data come with scikit-learn, so nothing is downloaded.

The images are the test part of Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998.

The data have no published split. Here 20 % of each class, 359 samples in total, are drawn as test samples with a
constant seed. Pixel values are scaled from [0, 16] to [0, 255].
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from fl_engine.core import seeds
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data.files import DAMAGE
from fl_engine.data.transforms import as_tensors, stratified
from fl_engine.storage.store import sha256
from fl_engine.tasks import Classification

ABOUT = "Digits, 8x8 grey, 10 classes, 1,438 + 359; licence CC BY 4.0; comes with scikit-learn"
URL = "https://archive.ics.uci.edu/dataset/80/optical+recognition+of+handwritten+digits"
TEST_SAMPLES = 359
CHECKSUM = "e10b10289c0d9d8a1b3e6b7dfe998949029a89056e0e06dfb989924a36d75a3c"
"""SHA-256 of the table (1797, 65), stored as little-endian int64."""
MEAN, STD = (0.3054,), (0.3762,)
"""Mean and standard deviation of the pixels in the 1,438 training images, divided by 255."""


def load(root: Path) -> Data:
    """Load the data set; `root` is ignored. Raises EnvironmentFailure if scikit-learn is missing or damaged."""
    # Read the file directly, because importing scikit-learn takes 2 s. A row has 64 pixels and a label.
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise EnvironmentFailure("digits requires scikit-learn, which is not installed. Run `pip install scikit-learn`")
    path = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path) as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.int64)
        if sha256(table.astype("<i8").tobytes()) != CHECKSUM:
            raise ValueError("other values")
    except DAMAGE as error:
        raise EnvironmentFailure(f"{path} must contain the digits data ({error}). Reinstall scikit-learn") from error
    # Scale the pixels from [0, 16] to [0, 255]. Integer arithmetic gives the same pixels on all machines.
    images = ((table[:, :64].reshape(-1, 1, 8, 8) * 255 + 8) // 16).astype(np.uint8)
    labels = table[:, 64].copy()
    test = np.zeros(len(labels), dtype=bool)
    test[stratified(labels, TEST_SAMPLES, seeds.rng(0, "digits/test"))] = True
    tensors = as_tensors(images[~test], labels[~test], images[test], labels[test])
    return Data("digits", Classification(10), *tensors, MEAN, STD)
