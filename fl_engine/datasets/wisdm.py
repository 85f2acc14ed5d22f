"""WISDM: accelerometer and gyroscope of a watch or a phone at 20 Hz; 51 people, 12 activities, windows of ten seconds.

Weiss, Yoneda and Hayajneh, Smartphone and Smartwatch-Based Biometrics Using Activities of Daily Living, IEEE Access 7,
2019. Prepared as for FedAIoT (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things,
Michigan State University 2023, sections 2.2.1 and 2.2.3.2): both sensors' readings are joined at equal times; in each
activity a window of 200 readings begins every 100 readings, without the first window. Soup, chips, pasta and sandwich
are one class, eating, as in the text; its published code keeps only the sandwich (`code_key`).

Departs from the text in who tests: there 6 people do and 45 train, but the printed samples (16,569 and 4,103 of the
watch, 13,714 and 4,073 of the phone) are divided as when a fifth of the people tests, which is what the published code
does, and so it is here: of all 51 people 40 train and 11 test. That code draws them without a seed; here they are
always the same. It normalises over everybody; here it is over the training part. If the files of some of the 51 people
are missing, the test part is the last fifth of each activity of each person, and no window crosses the cut.
"""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.files import damaged, read, require_by_hand
from fl_engine.data.moments import moments
from fl_engine.data.transforms import as_tensors
from fl_engine.tasks import Classification

RAW = "wisdm/wisdm-dataset/raw"
URL = "https://archive.ics.uci.edu/dataset/507/wisdm+smartphone+and+smartwatch+activity+and+biometrics+dataset"
HOW = (
    f"Download {URL} (about 300 MB, CC BY 4.0, no form) and unpack its wisdm-dataset.zip, so that wisdm-dataset/ lies "
    "in wisdm/"
)
SUBJECTS = range(1600, 1651)
SENSORS = ("accel", "gyro")
ACTIVITIES = (
    "walking", "jogging", "stairs", "sitting", "standing", "typing", "brushing teeth", "eating", "drinking", "writing",
    "clapping", "folding",
)  # fmt: skip
CODE_KEY = {letter: label for label, letter in enumerate("ABCDEFGLKQRS")}
"""Maps each activity's letter to its class. Other letters are left out. L is the sandwich."""
TEXT_KEY = CODE_KEY | dict.fromkeys("HIJ", CODE_KEY["L"])
"""As CODE_KEY, but soup, chips and pasta are eating too."""
LETTERS = b"ABCDEFGHIJKLMOPQRS"
WINDOW = 200
STEP = 100
TRAIN_SHARE = 0.8
TRAIN, TEST, ACROSS = 0, 1, 2
"""The side of the cut in time of a window."""
MOST_REPEATS = 2
"""The most joined readings per reading. Readings with a repeated time are joined with each other."""

LINE = np.dtype([("subject", "i4"), ("activity", "S2"), ("time", "i8"), ("x", "f4"), ("y", "f4"), ("z", "f4")])

log = logging.getLogger(__name__)


class Windows(NamedTuple):
    """The windows of one person."""

    x: NDArray[np.float32]
    """(N, 200, 6): x, y, z of the accelerometer (m/s^2), then of the gyroscope (rad/s)."""
    y: NDArray[np.int64]
    side: NDArray[np.int64]
    """TRAIN, TEST or ACROSS."""


def about(device: str, code_key: bool = False) -> str:
    eating = "sandwiches alone" if code_key else "all meals"
    return (
        f"WISDM, {device}, 200x6 series, 12 activities (eating: {eating}), 51 people; CC BY 4.0; about 300 MB, by hand"
    )


def files(device: str) -> tuple[str, ...]:
    """Return the files that `load` reads, for at least one person."""
    return tuple(f"{RAW}/{device}/{sensor}/data_*_{sensor}_{device}.txt" for sensor in SENSORS)


def load(root: Path, device: str, code_key: bool = False) -> Data:
    """Load the windows (N, 200, 6) of all people in `root`/wisdm/wisdm-dataset/raw/`device`, watch or phone.

    `natural_client` is the person's number, 1600 to 1650. Raises DataError if all files are missing, or those of one
    sensor of a person, or if lines have another form.
    """
    name = f"wisdm_{device}_code" if code_key else f"wisdm_{device}"
    require_by_hand(name, root, files(device), HOW)
    folder = root / RAW / device
    there = [subject for subject in SUBJECTS if any(_path(folder, device, s, subject).exists() for s in SENSORS)]
    key = CODE_KEY if code_key else TEXT_KEY
    found: dict[int, Windows] = {}
    for subject in there:
        accel, gyro = (_read(_path(folder, device, sensor, subject), subject) for sensor in SENSORS)
        of_one = windows(accel, gyro, key)
        if len(of_one.y):
            found[subject] = of_one
    if len(there) == len(SUBJECTS):
        order = seeds.rng(0, f"wisdm/{device}/test").permutation(list(found))
        trains = set(order[: int(TRAIN_SHARE * len(order))].tolist())
        side = {subject: np.full(len(each.y), TRAIN if subject in trains else TEST) for subject, each in found.items()}
    else:
        log.info("%s: files of %d of %d people; the last fifth of each activity tests", name, len(there), len(SUBJECTS))
        side = {subject: each.side for subject, each in found.items()}
    if not found:
        raise DataError(f"{name}: no window of {WINDOW} readings in the files of {len(there)} people under {folder}")
    train_x, test_x = (np.concatenate([each.x[side[s] == part] for s, each in found.items()]) for part in (TRAIN, TEST))
    train_y, test_y = (np.concatenate([each.y[side[s] == part] for s, each in found.items()]) for part in (TRAIN, TEST))
    clients = np.concatenate([np.full(int((side[s] == TRAIN).sum()), s, dtype=np.int64) for s in found])
    mean, std = moments(train_x) if len(train_x) else ((), ())
    train, test = as_tensors(train_x, train_y), as_tensors(test_x, test_y)
    return Data(name, Classification(len(ACTIVITIES)), *train, *test, mean, std, torch.from_numpy(clients))


def windows(accel: NDArray[np.void], gyro: NDArray[np.void], key: dict[str, int]) -> Windows:
    """Return all windows of one person, activity by activity in the order of `key`.

    In n readings of an activity, windows begin at 200, 300, ... and end at n or before. The cut is after 80 % of them.
    """
    activity, values = joined(accel, gyro)
    x, y, side = [], [], []
    for letter, label in key.items():
        of_one = values[activity == letter.encode()]
        cut = int(TRAIN_SHARE * len(of_one))
        for start in range(WINDOW, len(of_one) - WINDOW + 1, STEP):
            x.append(of_one[start : start + WINDOW])
            y.append(label)
            side.append(TRAIN if start + WINDOW <= cut else TEST if start >= cut else ACROSS)
    shape = (len(x), WINDOW, values.shape[1])
    return Windows(np.array(x, np.float32).reshape(shape), np.array(y, np.int64), np.array(side, np.int64))


def joined(accel: NDArray[np.void], gyro: NDArray[np.void]) -> tuple[NDArray[np.bytes_], NDArray[np.float32]]:
    """Return the activity (N,), from the accelerometer's file, and both sensors' values (N, 6) at the times that both
    files have, in order. If a time repeats, all pairs of its readings are joined."""
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


def _path(folder: Path, device: str, sensor: str, subject: int) -> Path:
    return folder / sensor / f"data_{subject}_{sensor}_{device}.txt"


def _read(path: Path, subject: int) -> NDArray[np.void]:
    """The lines of one file, each `1600,A,90426708196641,7.091625,-0.5916671,8.195502;`."""
    try:
        text = read(path).decode("ascii").splitlines()
        lines = {number: line for number, line in enumerate(map(str.strip, text), 1) if line}
        if not lines:
            raise ValueError("an empty file")
        # A line without its end may be one whose last number was cut.
        if odd := [number for number, line in lines.items() if line.find(";") != len(line) - 1]:
            raise ValueError(f"{lines[odd[0]][:100]!r} in line {odd[0]}")
        whole = io.StringIO("\n".join(line[:-1] for line in lines.values()))
        table = np.loadtxt(whole, LINE, delimiter=",", comments=None, ndmin=1)
        wrong = (table["subject"] != subject) | ~np.isin(table["activity"], [bytes([letter]) for letter in LETTERS])
        for axis in "xyz":
            wrong |= ~np.isfinite(table[axis])
        if wrong.any():
            raise ValueError(f"{table[wrong][0].item()} in line {list(lines)[int(wrong.argmax())]}")
    except (ValueError, OverflowError) as error:
        form = f"lines `{subject},A,90426708196641,7.1,-0.6,8.2;` of person, activity, time and three numbers"
        raise damaged(path, form, error) from error
    return table
