"""WISDM: recognise 12 activities of 51 people from ten seconds of motion data of a watch or phone (20 Hz).

Weiss, Yoneda and Hayajneh, Smartphone and Smartwatch-Based Biometrics Using Activities of Daily Living, IEEE Access 7,
2019. The data are prepared as in FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial
Intelligence of Things, Michigan State University 2023, sections 2.2.1 and 2.2.3.2). Readings of the accelerometer and
the gyroscope are joined by time. For each activity, windows of 200 readings begin at readings 200, 300 and so on. As in
FedAIoT's text, eating soup, chips, pasta or a sandwich is one class. The published code uses only sandwiches.

Departs from FedAIoT's text, which uses 45 people for training and 6 for testing. The numbers of samples in the text
(16,569 and 4,103 for the watch, 13,714 and 4,073 for the phone) match the published code, which uses a fifth of the
people for testing. Here 40 of the 51 people are used for training. The published code draws the people without a seed.
Here the same people are always used for testing. The published code normalises with statistics of all people. Here mean
and standard deviation are computed from the training part.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.files import damaged, expecting, read, require_by_hand
from fl_engine.data.transforms import as_tensors, moments
from fl_engine.tasks import Classification

RAW = "wisdm/wisdm-dataset/raw"
URL = "https://archive.ics.uci.edu/dataset/507/wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset"
HOW = (
    f"Download {URL} (about 300 MB, CC BY 4.0, no form) and unpack its wisdm-dataset.zip, so that wisdm-dataset/ is "
    "in wisdm/"
)
SUBJECTS = range(1600, 1651)
SENSORS = ("accel", "gyro")
ACTIVITIES = (
    "walking", "jogging", "stairs", "sitting", "standing", "typing", "brushing teeth", "eating", "drinking", "writing",
    "clapping", "folding",
)  # fmt: skip
CLASSES = {letter: label for label, letter in enumerate("ABCDEFGLKQRS")} | dict.fromkeys("HIJ", 7)
"""Maps the letter of each activity to its class. H, I, J and L are meals. Other letters are not used."""
LETTERS = b"ABCDEFGHIJKLMOPQRS"
WINDOW = 200
STEP = 100
TRAIN_SHARE = 0.8
MOST_REPEATS = 2
"""Maximum number of joined rows (all pairs of rows with equal times), divided by the rows of the longer sensor file."""

LINE = np.dtype([("subject", "i4"), ("activity", "S2"), ("time", "i8"), ("x", "f4"), ("y", "f4"), ("z", "f4")])

Windows = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Readings (N, 200, 6) and classes (N,). A reading is x, y, z of the accelerometer (m/s^2) and the gyroscope
(rad/s)."""


def about(device: str) -> str:
    return f"WISDM, {device}, 200x6 series, 12 activities, 51 people; CC BY 4.0; about 300 MB, by hand"


def files(device: str) -> tuple[str, ...]:
    """Return a file pattern for each sensor. Each pattern must match the file of at least one person."""
    return tuple(f"{RAW}/{device}/{sensor}/data_*_{sensor}_{device}.txt" for sensor in SENSORS)


def load(root: Path, device: str) -> Data:
    """Load the windows (N, 200, 6) of all people from `root`/wisdm/wisdm-dataset/raw. The device is watch or phone.

    `natural_client` is the person's number, 1600 to 1650. Raises DataError if fewer than two people have windows, the
    file of one sensor of a person is missing, or a line is malformed.
    """
    name = f"wisdm_{device}"
    require_by_hand(name, root, files(device), HOW)
    folder = root / RAW / device
    found: dict[int, Windows] = {}
    for subject in SUBJECTS:
        paths = [folder / sensor / f"data_{subject}_{sensor}_{device}.txt" for sensor in SENSORS]
        if any(path.exists() for path in paths):
            x, y = windows(*(read_lines(path, subject) for path in paths))
            if len(y):
                found[subject] = x, y
    if len(found) < 2:
        raise DataError(f"{name}: {folder} must have windows of at least 2 people, got {len(found)}. {HOW}")
    order = seeds.rng(0, f"wisdm/{device}/test").permutation(list(found))
    trains = set(order[: int(TRAIN_SHARE * len(order))].tolist())
    train, test = ([s for s in found if (s in trains) is part] for part in (True, False))
    train_x, test_x = (np.concatenate([found[s][0] for s in part]) for part in (train, test))
    train_y, test_y = (np.concatenate([found[s][1] for s in part]) for part in (train, test))
    people = np.repeat(np.array(train, dtype=np.int64), [len(found[s][1]) for s in train])
    tensors = as_tensors(train_x, train_y, test_x, test_y)
    return Data(name, Classification(len(ACTIVITIES)), *tensors, *moments(train_x), torch.from_numpy(people))


def windows(accel: NDArray[np.void], gyro: NDArray[np.void]) -> Windows:
    """Return all windows of one person, sorted by activity in the order of CLASSES. The windows of an activity begin at
    its readings 200, 300, ... and do not extend beyond its last reading."""
    activity, values = joined(accel, gyro)
    x, y = [], []
    for letter, label in CLASSES.items():
        readings = values[activity == letter.encode()]
        for start in range(WINDOW, len(readings) - WINDOW + 1, STEP):
            x.append(readings[start : start + WINDOW])
            y.append(label)
    return np.array(x, np.float32).reshape(len(x), WINDOW, values.shape[1]), np.array(y, np.int64)


def joined(accel: NDArray[np.void], gyro: NDArray[np.void]) -> tuple[NDArray[np.bytes_], NDArray[np.float32]]:
    """Return the activities (N,) and the values of both sensors (N, 6) at all times that occur in both files, sorted by
    time. The activities are from the accelerometer's file. All pairs of readings with the same time are joined."""
    a, g = np.argsort(accel["time"], kind="stable"), np.argsort(gyro["time"], kind="stable")
    times = gyro["time"][g]
    first = np.searchsorted(times, accel["time"][a], side="left")
    partners = np.searchsorted(times, accel["time"][a], side="right") - first
    total = int(partners.sum())
    if total > MOST_REPEATS * max(len(a), len(g)):
        who = f"the files of person {accel['subject'][0]}"
        raise damaged(who, f"{len(a)} and {len(g)} readings at different times", f"{total} pairs of equal times")
    before = np.cumsum(partners) - partners
    left = a[np.repeat(np.arange(len(a)), partners)]
    right = g[np.arange(total) - np.repeat(before - first, partners)]
    columns = [accel[axis][left] for axis in "xyz"] + [gyro[axis][right] for axis in "xyz"]
    return accel["activity"][left], np.stack(columns, axis=1)


def read_lines(path: Path, subject: int) -> NDArray[np.void]:
    """Return the parsed lines of one file. A line has the form
    `1600,A,90426708196641,7.091625,-0.5916671,8.195502;`."""
    form = f"lines `{subject},A,90426708196641,7.1,-0.6,8.2;` of person, activity, time and three numbers"
    with expecting(path, form):
        text = read(path).decode("ascii").splitlines()
        lines = {number: line for number, line in enumerate(map(str.strip, text), 1) if line}
        if not lines:
            raise ValueError("an empty file")
        # If a line does not end with a semicolon, its last number may be truncated.
        if odd := [number for number, line in lines.items() if line.find(";") != len(line) - 1]:
            raise ValueError(f"{lines[odd[0]][:100]!r} in line {odd[0]}")
        whole = io.StringIO("\n".join(line[:-1] for line in lines.values()))
        table = np.loadtxt(whole, LINE, delimiter=",", comments=None, ndmin=1)
        wrong = (table["subject"] != subject) | ~np.isin(table["activity"], [bytes([letter]) for letter in LETTERS])
        for axis in "xyz":
            wrong |= ~np.isfinite(table[axis])
        if wrong.any():
            raise ValueError(f"{table[wrong][0].item()} in line {list(lines)[int(wrong.argmax())]}")
    return table
