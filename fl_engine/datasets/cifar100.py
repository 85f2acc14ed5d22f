"""CIFAR-100: 50,000 + 10,000 colour images of 32 x 32 in 100 classes, in the official binary layout.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Layout and archive:
https://www.cs.toronto.edu/~kriz/cifar.html ("binary version"): per record a coarse label (of 20) and a fine label (of
100), a byte each, then 3,072 bytes: the red, green and blue plane, each row by row. The fine labels are used.

The archive must match the MD5 on its page. No checksums of its two files are published, so their sizes and labels are
checked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download_members
from fl_engine.data.files import read, require
from fl_engine.data.image_files import check_labels, parse_records
from fl_engine.tasks import Classification

ABOUT = "CIFAR-100, 32x32 colour, 100 classes, 50,000 + 10,000; no licence stated, cite Krizhevsky 2009; 169 MB"
FOLDER = "cifar100"
INNER = "cifar-100-binary"
"""The archive's own folder."""
ARCHIVE = Remote(
    "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    "cifar-100-binary.tar.gz",
    "md5:03b5dce01913d631647c71ecec9e9cb8",
)
FILES = (f"{FOLDER}/{INNER}/train.bin", f"{FOLDER}/{INNER}/test.bin")
RECORDS = (50_000, 10_000)
CHW = (3, 32, 32)
CLASSES = 100
MEAN, STD = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
"""Mean and deviation of the training images, in units of 255."""


def load(root: Path, records: tuple[int, int] = RECORDS) -> Data:
    """Load `root`/cifar100/cifar-100-binary. `records` are the training and the test samples.

    Raises DataError for a file that is missing, has another size, or has a fine label outside 0..99.
    """
    require("cifar100", root, FILES, ARCHIVE.url)
    train, test = (_part(root / file, number) for file, number in zip(FILES, records, strict=True))
    return Data("cifar100", Classification(CLASSES), *train, *test, MEAN, STD)


def fetch(root: Path, archive: Remote = ARCHIVE) -> None:
    """Download the archive and unpack the files that do not exist. Raises as `download_members` does."""
    download_members(archive, root / FOLDER, {f"{INNER}/{Path(file).name}": root / file for file in FILES})


def _part(path: Path, records: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 32, 32) uint8 and fine labels (N,) int64."""
    most = records * (2 + CHW[0] * CHW[1] * CHW[2])
    images, labels = parse_records(path, read(path, most=most), records, CHW, label_bytes=2)
    check_labels(path, labels, CLASSES)
    return torch.from_numpy(images.copy()), torch.from_numpy(labels.astype(np.int64))
