"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32 x 32, in the official binary layout.

Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009. Layout and archives:
https://www.cs.toronto.edu/~kriz/cifar.html ("binary version"). A record has a label byte and 3,072 pixel bytes (red,
green and blue planes, stored row by row). CIFAR-100's records have two label bytes, of which the reader uses the second
(the fine label).

The archives must match their MD5 checksums, and CIFAR-10's training batches must match their SHA-1 checksums. No
checksums are published for the other files, so the reader checks their sizes and labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.downloads import RemoteFile, download_members
from fl_engine.data.files import check_labels, damaged, read, require
from fl_engine.data.transforms import as_tensors
from fl_engine.tasks import Classification

CHW = (3, 32, 32)


@dataclass(frozen=True)
class CifarSet:
    name: str
    about: str
    archive: RemoteFile
    files: tuple[str, ...]
    """Paths below the data root: the training files, which have equally many records, and the test file. The paths in
    the archive are the same without the first folder."""
    classes: int
    label_bytes: int
    mean: tuple[float, float, float]
    """Mean pixel value of each channel in the training images, divided by 255."""
    std: tuple[float, float, float]
    checksums: Mapping[str, str] = field(default_factory=dict)
    samples: tuple[int, int] = (50_000, 10_000)
    """Numbers of training and test images."""

    @property
    def url(self) -> str:
        return self.archive.url

    def load(self, root: Path) -> Data:
        """Load the files below `root`. Raises DataError if a file is missing, has a wrong checksum or size, or contains
        an invalid label."""
        require(self.name, root, self.files, self.url)
        train = self._read(root, self.files[:-1], self.samples[0] // (len(self.files) - 1))
        test = self._read(root, self.files[-1:], self.samples[1])
        return Data(self.name, Classification(self.classes), *as_tensors(*train, *test), self.mean, self.std)

    def fetch(self, root: Path) -> None:
        """Download the archive and unpack the files that do not exist. Raises the same errors as `download_members`."""
        members = {file.removeprefix(f"{self.name}/"): root / file for file in self.files}
        download_members(self.archive, root / self.name, members)

    def _read(self, root: Path, files: tuple[str, ...], records: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return uint8 images (N, 3, 32, 32) and int64 labels (N,). Every file must have exactly `records` records."""
        x, y, size = [], [], self.label_bytes + math.prod(CHW)
        for path in (root / file for file in files):
            content = read(path, self.checksums.get(path.name), most=records * size)
            if len(content) != records * size:
                raise damaged(path, f"{records} records of {size} bytes = {records * size} bytes", len(content))
            table = np.frombuffer(content, dtype=np.uint8).reshape(records, size)
            labels = table[:, self.label_bytes - 1]  # the finest label
            check_labels(path, labels, self.classes)
            x.append(table[:, self.label_bytes :].reshape(records, *CHW))
            y.append(labels)
        return np.concatenate(x), np.concatenate(y).astype(np.int64)


CIFAR10 = CifarSet(
    "cifar10",
    "CIFAR-10, 32x32 colour, 10 classes, 50,000 + 10,000; no licence stated, cite Krizhevsky 2009; 170 MB",
    RemoteFile("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    files=tuple(
        f"cifar10/cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    ),
    classes=10,
    label_bytes=1,
    mean=(0.491, 0.482, 0.447),  # FlexFL and AdaptiveFL use the same values
    std=(0.247, 0.243, 0.262),
    checksums={
        "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
    },
)
CIFAR100 = CifarSet(
    "cifar100",
    "CIFAR-100, 32x32 colour, 100 classes, 50,000 + 10,000; no licence stated, cite Krizhevsky 2009; 169 MB",
    RemoteFile("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),
    files=("cifar100/cifar-100-binary/train.bin", "cifar100/cifar-100-binary/test.bin"),
    classes=100,
    label_bytes=2,
    mean=(0.5071, 0.4867, 0.4408),
    std=(0.2675, 0.2565, 0.2761),
)
