"""FEMNIST: grey images (28 x 28) of handwritten characters in 62 classes, from LEAF's JSON files.

Caldas et al., LEAF: A Benchmark for Federated Settings, 2018 (arXiv:1812.01097). https://github.com/TalwalkarLab/leaf
creates data/femnist/data/all_data/all_data_0.json to all_data_35.json. Each file has at most 100 writers:

    {"users": [writer, ...], "num_samples": [n, ...], "user_data": {writer: {"x": [[784 numbers], ...], "y": [n]}}}.

Pixels are stored row by row as numbers in [0, 1], with black ink (0) on a white background (1). The reader multiplies
pixels by 255 to restore LEAF's bytes. Labels 0 to 9 are digits, 10 to 35 are upper-case letters, and 36 to 61 are
lower-case letters. Each writer is a natural client.

LEAF does not define a split. Here n // 10 of a writer's n samples are drawn as test samples, with a constant seed.
`femnist_tff` is TensorFlow Federated's version, which defines a split.

Reading JSON takes about four minutes, so `fl_engine.data.array_files` stores the arrays in femnist/packed (0.6 GB).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from fl_engine.core import seeds
from fl_engine.core.samples import Data
from fl_engine.data.array_files import cached
from fl_engine.data.files import damaged, each_once, expecting, read, require_by_hand
from fl_engine.data.transforms import byte_statistics
from fl_engine.tasks import Classification

ABOUT = (
    "FEMNIST by LEAF, 28x28 grey, 62 classes, about 725,000 + 80,000 of 3,550 writers; no licence stated, cite Caldas "
    "et al. 2018; 5 GB of JSON, made by LEAF's scripts"
)
FILES = tuple(f"femnist/all_data/all_data_{number}.json" for number in range(36))
URL = "https://github.com/TalwalkarLab/leaf"
HOW = (
    f"Get {URL}, run `./preprocess.sh -s niid --sf 1.0 -k 0 -t sample` in data/femnist, which downloads 2 GB, and copy "
    "its data/all_data there"
)
VERSION = 1
"""Version of the stored arrays. Increase the version if the code computes different arrays from the same files."""
CLASSES = 62
SIDE = 28
TEST_SHARE = 10
"""A writer with n samples gets n // TEST_SHARE test samples."""
MOST_BYTES = 2**30
"""Maximum size of a file in bytes. A file with 100 writers has about 150 MB."""


class _Samples(BaseModel, strict=True):
    x: list[Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=SIDE**2, max_length=SIDE**2)]]
    y: list[Annotated[int, Field(ge=0, lt=CLASSES)]]


class _Leaf(BaseModel, strict=True):
    users: list[Any]
    num_samples: list[int]
    user_data: dict[Any, _Samples]


def load(root: Path, files: Sequence[str] = FILES) -> Data:
    """Load `root`/femnist/all_data. Mean and standard deviation are computed from the training images.

    Raises DataError if a file is missing, is not JSON in LEAF's format, declares a wrong number of samples, or contains
    invalid images or labels. Also raises DataError if two files contain the same writer.
    """
    require_by_hand("femnist", root, files, HOW)
    paths = [root / file for file in files]
    arrays = cached(root / "femnist" / "packed", VERSION, paths, partial(_pack, paths))
    mean, std = byte_statistics(arrays["train_x"].numpy())
    return Data("femnist", Classification(CLASSES), mean=mean, std=std, **arrays)


def _pack(paths: Sequence[Path], folder: Path) -> None:
    found: dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]] = {}
    for path in paths:
        for writer, images, labels in _writers(path):
            if writer in found:
                raise damaged(path, "each writer once", f"{writer[:80]!r} twice")
            found[writer] = images, labels
    y = [labels for _, labels in found.values()]
    if max(map(len, y), default=0) < TEST_SHARE:
        raise damaged(paths[0], f"writers with at least {TEST_SHARE} samples", "none")
    source = np.repeat(np.arange(len(y)), [len(labels) for labels in y])
    test = np.concatenate([_test(len(labels), writer) for writer, (_, labels) in found.items()])
    images, labels = np.concatenate([images for images, _ in found.values()]), np.concatenate(y)
    del found
    for part, chosen in (("train", ~test), ("test", test)):
        np.save(folder / f"{part}_x.npy", images[chosen])
        np.save(folder / f"{part}_y.npy", labels[chosen])
    np.save(folder / "natural_client.npy", source[~test])


def _test(samples: int, writer: str) -> NDArray[np.bool_]:
    """Return a mask that is True for test samples. The mask does not depend on other writers."""
    chosen = np.zeros(samples, dtype=bool)
    chosen[seeds.rng(0, f"femnist/test/{writer!a}").permutation(samples)[: samples // TEST_SHARE]] = True
    return chosen


def _writers(path: Path) -> list[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """Return the name, images (n, 1, 28, 28) and labels (n,) of each writer, in the order of the file."""
    with expecting(path, "JSON as LEAF writes it"):
        leaf = _Leaf.model_validate(json.loads(read(path, most=MOST_BYTES), object_pairs_hook=each_once))
        if unlisted := sorted(leaf.user_data.keys() ^ leaf.users):
            raise ValueError(f"{unlisted[0][:80]!r} only in users or only in user_data")
        found = []
        for name, number in zip(leaf.users, leaf.num_samples, strict=True):
            x, y = leaf.user_data[name].x, leaf.user_data[name].y
            if not len(x) == len(y) == number:
                raise ValueError(f"{len(x)} images and {len(y)} labels of {name[:80]!r}, and {number} as num_samples")
            images = (np.array(x, dtype=np.float64) * 255).round().astype(np.uint8)
            found.append((name, images.reshape(number, 1, SIDE, SIDE), np.array(y, dtype=np.int64)))
    return found
