"""UT-HAR: recognise 7 activities from Wi-Fi amplitudes (250 packets, 3 antennas, 30 subcarriers per antenna).

Yousefi et al., A Survey on Behavior Recognition Using WiFi Channel State Information, IEEE Communications Magazine
55(10), 2017. SenseFi (Yang et al., Patterns 4(3), 2023) cut the recordings into samples and defined the split.
SenseFi's files are NumPy arrays, although their names end in .csv. As in FedAIoT (Alam, Michigan State University 2023,
section 2.2.2.1), the validation part is not used.

Departs from the paper, whose text describes samples of 3 x 30 x 250. Here, as in the paper's published code, samples
are 1 x 250 x 90, with the 30 subcarriers of all 3 antennas on one axis. The published code evaluates the test samples
with the validation labels. Here they are evaluated with the test labels. The published code scales each part to [0, 1]
by the part's minimum and maximum. Here both parts are normalised with the mean and std of the training part.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_files import map_npy
from fl_engine.data.files import damaged, expecting, require_by_hand
from fl_engine.data.transforms import as_tensors, moments
from fl_engine.tasks import Classification

ABOUT = "UT-HAR, 1x250x90 maps of a Wi-Fi signal, 7 activities, 3,977 + 500; no licence stated; 854 MB, by hand"
FOLDER = "uthar/UT_HAR"
FILES = tuple(f"{FOLDER}/{what}_{part}.csv" for what in ("data/X", "label/y") for part in ("train", "test"))
URL = "https://github.com/xyanchen/WiFi-CSI-Sensing-Benchmark"
HOW = (
    f"Download UT_HAR from the processed data sets of {URL} (854 MB, no form) and unpack it, so that UT_HAR/ is "
    "in uthar/"
)
ACTIVITIES = ("lie down", "fall", "walk", "pick up", "run", "sit down", "stand up")
SAMPLES = (3977, 500)
PACKETS, CARRIERS = 250, 90


def load(root: Path, samples: tuple[int, int] = SAMPLES) -> Data:
    """Load `root`/uthar/UT_HAR as maps (N, 1, 250, 90). `samples` are the expected numbers of training and test
    samples.

    Raises DataError if a file is missing or is not an array of this shape, a number is not finite, or a label is
    outside 0 to 6.
    """
    require_by_hand("uthar", root, FILES, HOW)
    train, test = (_part(root / FOLDER, part, count) for part, count in zip(("train", "test"), samples, strict=True))
    return Data("uthar", Classification(len(ACTIVITIES)), *as_tensors(*train, *test), *moments(train[0], axis=1))


def _part(folder: Path, part: str, samples: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x_path, y_path = folder / "data" / f"X_{part}.csv", folder / "label" / f"y_{part}.csv"
    x = _array(x_path, (samples, PACKETS, CARRIERS)).astype(np.float32)
    labels = _array(y_path, (samples,))
    if not np.isin(labels, range(len(ACTIVITIES))).all():
        raise damaged(y_path, f"labels 0..{len(ACTIVITIES) - 1}", "other labels")
    if not np.isfinite(x).all():
        raise damaged(x_path, "finite numbers", "NaN or infinity")
    return x[:, None], labels.astype(np.int64)


def _array(path: Path, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return the array in a .npy file, reshaped to `shape`. Raises DataError if the number of samples or the total
    number of values differs from `shape`."""
    with expecting(path, f"a NumPy array (.npy) of {' x '.join(map(str, shape))} numbers"):
        found = map_npy(path)
        if found.shape[:1] != shape[:1] or found.size != math.prod(shape):
            raise ValueError(f"{found.dtype} of {' x '.join(map(str, found.shape))}")
        return found.reshape(shape)
