"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 in 10 classes, from the four official idx files.

Xiao, Rasul and Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms,
2017 (arXiv:1708.07747). MIT licence. Files and checksums: https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.files import Remote, check_labels, download, parse_idx, read, require
from fl_engine.tasks import Classification

ABOUT = "Fashion-MNIST, 28x28 grey, 10 classes, 60,000 + 10,000; MIT licence; 31 MB"
FOLDER = "fashion-mnist"
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
REMOTES = tuple(Remote(f"{URL}/{name}", name, checksum) for name, checksum in CHECKSUMS.items())
FILES = tuple(f"{FOLDER}/{name}" for name in CHECKSUMS)
CLASSES = 10
SIDE = 28
MOST_BYTES = 16 + 60_000 * SIDE * SIDE
"""Of an unpacked file: its size is not to be believed before it is known."""

# Mean and standard deviation of the training images, in units of 255.
MEAN = (0.2860,)
STD = (0.3530,)


def load(root: Path, checksums: Mapping[str, str] = CHECKSUMS) -> Data:
    """The data set from `root`/fashion-mnist; a file without an entry in `checksums` is not checked.

    Raises DataError for a file that is missing, has another checksum, or is no idx file of 28 x 28 images or
    of as many labels 0..9.
    """
    require("fashion_mnist", root, FILES, f"{URL}/{{{','.join(CHECKSUMS)}}}")
    train_x, train_y = _part(root / FOLDER, "train", checksums)
    test_x, test_y = _part(root / FOLDER, "t10k", checksums)
    return Data("fashion_mnist", Classification(CLASSES), train_x, train_y, test_x, test_y, MEAN, STD)


def fetch(root: Path, remotes: Sequence[Remote] = REMOTES) -> None:
    """Downloads what is not there yet. Raises DataError as `files.download` does."""
    for remote in remotes:
        download(remote, root / FOLDER)


def _part(folder: Path, part: str, checksums: Mapping[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, 28, 28) uint8 and labels (N,) int64 of `train` or `t10k`."""
    images_path = folder / f"{part}-images-idx3-ubyte.gz"
    labels_path = folder / f"{part}-labels-idx1-ubyte.gz"
    images = _idx(images_path, 3, checksums)
    labels = _idx(labels_path, 1, checksums)
    height, width = images.shape[1:]
    if (height, width) != (SIDE, SIDE):
        raise DataError(f"{images_path}: expected images of {SIDE} x {SIDE}, found {height} x {width}; fetch it again")
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, one for each image in {images_path.name}, "
            f"found {len(labels)}; fetch both again"
        )
    check_labels(labels_path, labels, CLASSES)
    return torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64))


def _idx(path: Path, axes: int, checksums: Mapping[str, str]) -> NDArray[np.uint8]:
    try:
        with gzip.open(io.BytesIO(read(path, checksums.get(path.name)))) as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a gzip file ({error}); delete it and fetch again") from error
    return parse_idx(path, content, axes)
