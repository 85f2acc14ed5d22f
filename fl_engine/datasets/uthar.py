"""UT-HAR: the amplitude of a Wi-Fi signal over 250 packets, 3 antennas of 30 subcarriers; 7 activities of a person.

Yousefi et al., A Survey on Behavior Recognition Using WiFi Channel State Information, IEEE Communications Magazine
55(10), 2017, cut into samples and split by SenseFi (Yang et al., Patterns 4(3), 2023), whose files are read: NumPy
arrays, though they are named .csv. FedAIoT (Alam, Michigan State University 2023, section 2.2.2.1) takes its training
part and its test part; the validation part is not read.

Departs from the paper, whose text says 3 x 30 x 250 (`antennas` gives that form); here, as in its published code,
samples are 1 x 250 x 90. That code pairs the test samples with the validation labels; here they have their own labels.
It scales each part to 0..1 by the part's own extremes; here mean and deviation are those of the training part.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_files import map_npy
from fl_engine.data.files import damaged, require_by_hand
from fl_engine.data.moments import moments
from fl_engine.data.transforms import as_tensors
from fl_engine.tasks import Classification

ABOUT = "UT-HAR, 1x250x90 maps of a Wi-Fi signal, 7 activities, 3,977 + 500; no licence stated; 854 MB, by hand"
ABOUT_ANTENNAS = (
    "UT-HAR, 3x30x250, an antenna is a channel, 7 activities, 3,977 + 500; no licence stated; 854 MB, files of uthar"
)
FOLDER = "uthar/UT_HAR"
FILES = tuple(f"{FOLDER}/{what}_{part}.csv" for what in ("data/X", "label/y") for part in ("train", "test"))
URL = "https://github.com/xyanchen/WiFi-CSI-Sensing-Benchmark"
HOW = (
    f"Download UT_HAR from the processed data sets of {URL} (854 MB, no form) and unpack it, so that UT_HAR/ lies "
    "in uthar/"
)
ACTIVITIES = ("lie down", "fall", "walk", "pick up", "run", "sit down", "stand up")
SAMPLES = (3977, 500)
PACKETS, ANTENNAS, SUBCARRIERS = 250, 3, 30


def load(root: Path, antennas: bool = False, samples: tuple[int, int] = SAMPLES) -> Data:
    """Load `root`/uthar/UT_HAR, with so many training and test samples: maps (N, 1, 250, 90), or with `antennas`
    (N, 3, 30, 250).

    Raises DataError for a file that is missing or not an array of this shape, for numbers that are not finite, and for
    labels outside 0 to 6.
    """
    name = "uthar_antennas" if antennas else "uthar"
    require_by_hand(name, root, FILES, HOW)
    parts = [_part(root / FOLDER, part, count) for part, count in zip(("train", "test"), samples, strict=True)]
    (train_x, train_y), (test_x, test_y) = parts
    if antennas:
        train_x, test_x = by_antenna(train_x), by_antenna(test_x)
    mean, std = moments(train_x, axis=1)
    train, test = as_tensors(train_x, train_y), as_tensors(test_x, test_y)
    return Data(name, Classification(len(ACTIVITIES)), *train, *test, mean, std)


def by_antenna(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn (N, 1, 250, 90) into (N, 3, 30, 250). The last axis of the input has each antenna's 30 subcarriers side by
    side."""
    return np.ascontiguousarray(x.reshape(len(x), PACKETS, ANTENNAS, SUBCARRIERS).transpose(0, 2, 3, 1))


def _part(folder: Path, part: str, samples: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    x_path, y_path = folder / "data" / f"X_{part}.csv", folder / "label" / f"y_{part}.csv"
    x = _array(x_path, (samples, PACKETS, ANTENNAS * SUBCARRIERS)).astype(np.float32)
    labels = _array(y_path, (samples,))
    if not np.isin(labels, range(len(ACTIVITIES))).all():
        raise damaged(y_path, f"labels 0..{len(ACTIVITIES) - 1}", "others")
    if not np.isfinite(x).all():
        raise damaged(x_path, "finite numbers", "NaN or infinity")
    return x[:, None], labels.astype(np.int64)


def _array(path: Path, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """The numbers of a .npy file, reshaped to `shape`; in the file, a sample may have other axes. Raises DataError."""
    try:
        found = map_npy(path)
        if found.shape[:1] != shape[:1] or found.size != math.prod(shape):
            raise ValueError(f"{found.dtype} of {' x '.join(map(str, found.shape))}")
        return found.reshape(shape)
    except ValueError as error:
        raise damaged(path, f"an array of NumPy (.npy) of {' x '.join(map(str, shape))} numbers", error) from error
