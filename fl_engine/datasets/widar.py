"""Widar3.0: recognise 9 gestures from body velocity profiles (22 time steps of 20 x 20 values) of Wi-Fi signals.

Zheng et al., Zero-Effort Cross-Domain Gesture Recognition with Wi-Fi, MobiSys 2019. SenseFi (Yang et al., Patterns
4(3), 2023) publishes the profiles with a folder for each gesture, such as `1-Push&Pull`. Each sample is a file such as
`user3-...csv` with 22 lines of 400 numbers. Widar's own .mat files are not used, because reading them would require
SciPy. The data are prepared as in FedAIoT (Alam, Michigan State University 2023, section 2.2.3.2). Only the nine
gestures that more than three users performed are used. Values are normalised with FedAIoT's mean and std. Users are
sorted by number of samples, fewest first. The fifth to the fifteenth user are training users, and the others are test
users.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.core.text import need_plain
from fl_engine.data.files import damaged, expecting, read, require_by_hand, warn_of_other_counts
from fl_engine.tasks import Classification

ABOUT = "Widar3.0, 22x20x20 velocity profiles, 9 gestures, 11,372 + 5,222; CC BY-NC 4.0; 3.3 GB, by hand"
FOLDER = "widar/Widardata"
FILES = (f"{FOLDER}/*/*/user*.csv",)
URL = "https://github.com/xyanchen/WiFi-CSI-Sensing-Benchmark"
HOW = (
    f"Download Widardata from the processed data sets of {URL} (3.3 GB, CC BY-NC 4.0, no form) and unpack it, so "
    "that Widardata/ lies in widar/"
)
GESTURES = (1, 4, 8, 11, 13, 15, 16, 17, 20)
"""Gesture numbers in the folder names, in the order of the classes. Other gestures are not used."""
TRAINS = range(4, 15)
"""Ranks of the training users. Users are ranked by their number of samples of all 22 gestures, fewest first."""
SHAPE = (22, 20, 20)
PUBLISHED = (11_372, 5_222)
"""Numbers of training and test samples."""
CENTRE, SPREAD = 0.0025, 0.0119
"""Mean and standard deviation of all profile values, as in SenseFi and FedAIoT."""

_GESTURE = re.compile(r"([0-9]{1,3})-.*", re.DOTALL)
_USER = re.compile(r"user([0-9]{1,3})-.*", re.DOTALL)


class Sample(NamedTuple):
    gesture: int
    user: int
    path: Path


def load(root: Path) -> Data:
    """Load the scaled profiles (N, 22, 20, 20) from `root`/widar/Widardata. `natural_client` is the user.

    Raises DataError if files are missing or do not have 22 lines of 400 finite numbers. Also raises DataError if there
    are fewer than five users, because the training part would be empty.
    """
    require_by_hand("widar", root, FILES, HOW)
    every = list(listed(root / FOLDER))
    counts = Counter(sample.user for sample in every)
    users = sorted(counts, key=lambda user: (counts[user], user))
    trains = {users[place] for place in TRAINS if place < len(users)}
    if not trains:
        raise DataError(
            f"widar: {root / FOLDER} must have files of at least {TRAINS.start + 1} users, got {len(users)}. {HOW}"
        )
    kept = [sample for sample in every if sample.gesture in GESTURES]
    train, test = ([s for s in kept if (s.user in trains) is train] for train in (True, False))
    source = torch.tensor([sample.user for sample in train], dtype=torch.int64)
    data = Data("widar", Classification(len(GESTURES)), *_read(train), *_read(test), natural_client=source)
    return warn_of_other_counts(data, *PUBLISHED)


def listed(folder: Path) -> Iterator[Sample]:
    """Yield the samples of all gestures, sorted by path. Raises DataError for an unexpected folder or file name."""
    for path in sorted(folder.glob("*/*/*.csv")):
        gesture, user = _GESTURE.fullmatch(path.parent.name), _USER.fullmatch(path.name)
        if gesture is None or user is None:
            raise damaged(path, "a folder `<number>-<gesture>` and a file `user<number>-....csv`", "other names")
        yield Sample(int(gesture[1]), int(user[1]), path)


def _read(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    x = np.empty((len(samples), *SHAPE), dtype=np.float32)
    for of_one, sample in zip(x, samples, strict=True):
        of_one[:] = (profile(sample.path) - CENTRE) / SPREAD
    labels = torch.tensor([GESTURES.index(sample.gesture) for sample in samples], dtype=torch.int64)
    return torch.from_numpy(x), labels


def profile(path: Path) -> NDArray[np.float32]:
    """Read a profile (22, 20, 20) from 22 lines of 400 numbers. Raises DataError if the file is damaged."""
    with expecting(path, "22 lines of 400 numbers"):
        lines = [line.split(",") for line in read(path).decode("ascii").splitlines()]
        if [len(line) for line in lines] != [SHAPE[1] * SHAPE[2]] * SHAPE[0]:
            raise ValueError(f"{len(lines)} lines with {sum(map(len, lines))} numbers in total")
        need_plain(number for line in lines for number in line)
        with np.errstate(over="ignore"):  # the next check rejects infinite values
            values = np.array([float(number) for line in lines for number in line]).astype(np.float32)
        if not np.isfinite(values).all():
            raise ValueError("a value that is NaN or infinite")
    return values.reshape(SHAPE)
