"""CIFAR-10: 50,000 + 10,000 colour images of 32 x 32 in 10 classes, in the official binary layout.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Layout and archive:
https://www.cs.toronto.edu/~kriz/cifar.html ("binary version"): per record 1 label byte, then 3,072 bytes: the
red, green and blue plane, each row by row.

The training batches must match their SHA-1. No checksum of `test_batch.bin` is published, so its structure is checked,
and the archive's MD5.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download_members
from fl_engine.data.files import read, require
from fl_engine.data.image_files import check_labels, parse_records
from fl_engine.data.transforms import as_tensors
from fl_engine.tasks import Classification

ABOUT = "CIFAR-10, 32x32 colour, 10 classes, 50,000 + 10,000; no licence stated, cite Krizhevsky 2009; 170 MB"
FOLDER = "cifar10"
BATCHES = "cifar-10-batches-bin"
ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    "cifar-10-binary.tar.gz",
    "md5:c32a1d4ab5d03f1284b67883e8d87530",
)
CHECKSUMS = {
    "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
}
TRAIN = tuple(CHECKSUMS)
TEST = ("test_batch.bin",)
FILES = tuple(f"{FOLDER}/{BATCHES}/{name}" for name in TRAIN + TEST)
RECORDS = 10_000
CLASSES = 10
MEAN, STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
"""Mean and deviation of the training images, as in FlexFL and AdaptiveFL."""


def load(root: Path, checksums: Mapping[str, str] = CHECKSUMS, records: int = RECORDS) -> Data:
    """Load `root`/cifar10/cifar-10-batches-bin, with `records` records in each batch.

    Raises DataError for a file that is missing, has another checksum than in `checksums`, another size, or a label
    outside 0..9.
    """
    require("cifar10", root, FILES, ARCHIVE.url)
    folder = root / FOLDER / BATCHES
    train_x, train_y = _batches(folder, TRAIN, checksums, records)
    test_x, test_y = _batches(folder, TEST, checksums, records)
    return Data("cifar10", Classification(CLASSES), train_x, train_y, test_x, test_y, MEAN, STD)


def fetch(root: Path, archive: Remote = ARCHIVE, checksums: Mapping[str, str] = CHECKSUMS) -> None:
    """Download the archive and unpack the batches that do not exist. Raises as `download_members` does, and DataError
    for an existing batch with another checksum."""
    paths = [root / file for file in FILES]
    for path in paths:
        if path.exists():
            read(path, checksums.get(path.name))
    download_members(archive, root / FOLDER, {f"{BATCHES}/{path.name}": path for path in paths})


def _batches(
    folder: Path, names: tuple[str, ...], checksums: Mapping[str, str], records: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 32, 32) uint8 and labels (N,) int64 of the named files, one after the other."""
    x = np.empty((len(names) * records, 3, 32, 32), dtype=np.uint8)
    y = np.empty(len(names) * records, dtype=np.int64)
    for i, name in enumerate(names):
        path = folder / name
        images, labels = parse_records(path, read(path, checksums.get(name)), records, (3, 32, 32))
        check_labels(path, labels, CLASSES)
        part = slice(i * records, (i + 1) * records)
        x[part], y[part] = images, labels
    return as_tensors(x, y)
