"""UCI-HAR: recognise 6 activities of 30 people from 2.56 seconds of motion data of a phone (50 Hz).

Anguita, Ghio, Oneto, Parra and Reyes-Ortiz, A Public Domain Dataset for Human Activity Recognition Using Smartphones,
ESANN 2013. A sample is a window of 128 readings of nine signals. Consecutive windows overlap by half. In the official
split, the training part has 21 people, and the test part has the other 9 people. The 561 features that the authors
computed from each window (`X_train.txt`) are not read. FedX pre-trains its network for motion data with this data set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.files import expecting, read_text, require_by_hand
from fl_engine.data.transforms import as_tensors, moments
from fl_engine.tasks import Classification

ABOUT = "UCI-HAR, 128x9 series, 6 activities, 30 people, 7,352 + 2,947; CC BY 4.0; 58 MB, by hand"
FOLDER = "uci_har/UCI HAR Dataset"
PARTS = ("train", "test")
SIGNALS = tuple(f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""Acceleration without gravity (g), angular velocity (rad/s) and acceleration with gravity (g)."""
FILES = tuple(
    f"{FOLDER}/{part}/{name}_{part}.txt"
    for part in PARTS
    for name in ("y", "subject", *(f"Inertial Signals/{signal}" for signal in SIGNALS))
)
URL = "https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones"
HOW = (
    f"Download {URL} (58 MB, CC BY 4.0, no form) and unpack its UCI HAR Dataset.zip, so that UCI HAR Dataset/ is in "
    "uci_har/"
)
ACTIVITIES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "lying")
SAMPLES = (7352, 2947)
WINDOW = 128
PEOPLE = 30
MOST_BYTES = 2**26
"""Maximum size of a file in bytes. The largest file has about 15 MB."""


def load(root: Path, samples: tuple[int, int] = SAMPLES) -> Data:
    """Load the windows (N, 128, 9) in `root`/uci_har/UCI HAR Dataset. `samples` are the expected numbers of training
    and test windows.

    `natural_client` is the person's number, 1 to 30. Raises DataError if a file is missing, or if a file does not
    have one line per window. Each line must have 128 finite numbers, or a known activity or person.
    """
    require_by_hand("uci_har", root, FILES, HOW)
    train, test = (_part(root / FOLDER / part, part, count) for part, count in zip(PARTS, samples, strict=True))
    tensors, people = as_tensors(*train[:2], *test[:2]), torch.from_numpy(train[2])
    return Data("uci_har", Classification(len(ACTIVITIES)), *tensors, *moments(train[0]), people)


def _part(folder: Path, part: str, samples: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the windows, the classes and the people of a part."""
    shape = (samples, WINDOW)
    signals = [_numbers(folder / "Inertial Signals" / f"{each}_{part}.txt", shape, np.float32) for each in SIGNALS]
    labels, people = (
        _numbers(folder / f"{name}_{part}.txt", (samples, 1), np.int64, most)[:, 0]
        for name, most in (("y", len(ACTIVITIES)), ("subject", PEOPLE))
    )
    return np.stack(signals, axis=-1), labels - 1, people


def _numbers(path: Path, shape: tuple[int, int], dtype: type[np.generic], most: int | None = None) -> NDArray[Any]:
    """Return the numbers in a file, which must be finite and from 1 to `most` if `most` is given."""
    form = "finite numbers" if most is None else f"integers from 1 to {most}"
    with expecting(path, f"{shape[0]} lines of {shape[1]} {form}"):
        found = np.array([line.split() for line in read_text(path, MOST_BYTES).splitlines()], dtype=dtype)
        if found.shape != shape:
            raise ValueError(f"{' x '.join(map(str, found.shape))} numbers")
        if not np.isfinite(found).all() or (most is not None and not ((found >= 1) & (found <= most)).all()):
            raise ValueError("other numbers")
    return found
