"""MNIST, Fashion-MNIST and EMNIST: grey images of 28 x 28 pixels. Each data set has four gzipped idx files.

`mnist` contains handwritten digits (LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998). The
files and checksums are the same as in torchvision. `fashion_mnist` contains images of clothes (Xiao et al., 2017,
arXiv:1708.07747; https://github.com/zalandoresearch/fashion-mnist).

`emnist` is the balanced split of EMNIST, with 47 classes of equal size. Upper and lower case of a letter are one class
if they look alike. `emnist_byclass` has digits (0 to 9), upper-case letters (10 to 35) and lower-case letters (36 to
61). Cohen et al., EMNIST: an Extension of MNIST to Handwritten Letters, 2017 (arXiv:1702.05373). EMNIST's files store
images column by column, so the reader transposes the images. EMNIST's archive must match the MD5 checksum in
torchvision. No checksums of unpacked files are published, so the reader checks sizes and labels.
"""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.downloads import RemoteFile, download, download_members
from fl_engine.data.files import check_labels, damaged, expecting, read, require
from fl_engine.data.transforms import as_tensors, byte_statistics
from fl_engine.tasks import Classification

SIDE = 28


@dataclass(frozen=True)
class IdxSet:
    name: str
    about: str
    files: tuple[str, ...]
    """Paths of training images, training labels, test images and test labels, relative to the data root."""
    classes: int
    samples: tuple[int, int]
    """Numbers of training and test images."""
    url: str
    """URL of the archive, or of the folder with the files."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Maps file names to checksums. If `archive` is None, every file must have a checksum."""
    archive: RemoteFile | None = None
    by_columns: bool = False
    """True if the files store images column by column."""

    def load(self, root: Path) -> Data:
        """Load the files below `root`. Mean and standard deviation are computed from the training images.

        Raises DataError if a file is missing, has a wrong checksum, or is not an idx file with the expected number of
        28 x 28 images or labels.
        """
        require(self.name, root, self.files, self.url)
        train = self._read(root, self.files[:2], self.samples[0])
        test = self._read(root, self.files[2:], self.samples[1])
        return Data(self.name, Classification(self.classes), *as_tensors(*train, *test), *byte_statistics(train[0]))

    def fetch(self, root: Path) -> None:
        """Download missing files. Raises the same errors as `downloads.download` and `download_members`."""
        paths = [root / file for file in self.files]
        if self.archive is not None:
            download_members(self.archive, root / FOLDER, {f"{INNER}/{path.name}": path for path in paths})
            return
        for path in paths:
            download(RemoteFile(f"{self.url}/{path.name}", self.checksums[path.name]), path.parent)

    def _read(self, root: Path, files: tuple[str, ...], samples: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return uint8 images (N, 1, 28, 28) and int64 labels (N,) from a pair of files."""
        images_path, labels_path = (root / file for file in files)
        images = self._idx(images_path, (samples, SIDE, SIDE))
        labels = self._idx(labels_path, (samples,))
        check_labels(labels_path, labels, self.classes)
        upright = images.transpose(0, 2, 1) if self.by_columns else images
        return upright[:, None].copy(), labels.astype(np.int64)

    def _idx(self, path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the array in a gzipped idx file of unsigned bytes (format: http://yann.lecun.com/exdb/mnist).

        Bytes 0 and 1 are zero, byte 2 is 8 (unsigned byte), and byte 3 is the number of axes. The axis sizes
        (big-endian uint32) and the values follow. At most one byte more than expected is unpacked, even if the declared
        size is larger.
        """
        header = bytes((0, 0, 8, len(shape))) + np.array(shape, dtype=">u4").tobytes()
        size = len(header) + math.prod(shape)
        packed = io.BytesIO(read(path, self.checksums.get(path.name)))
        with expecting(path, "a gzip file"), gzip.open(packed) as file:
            content = file.read(size + 1)
        if not content.startswith(header) or len(content) != size:
            expected = f"an idx file of {' x '.join(map(str, shape))} bytes with the header 0x{header.hex()}"
            raise damaged(path, expected, f"{len(content)} bytes with the header 0x{content[: len(header)].hex()}")
        return np.frombuffer(content, dtype=np.uint8, offset=len(header)).reshape(shape)


MNIST = IdxSet(
    "mnist",
    "MNIST, 28x28 grey, 10 classes, 60,000 + 10,000; licence CC BY-SA 3.0; 12 MB",
    tuple(f"mnist/{part}-ubyte.gz" for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3",
                                                "t10k-labels-idx1")),
    10,
    (60_000, 10_000),
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    {
        "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
    },
)  # fmt: skip
FASHION_MNIST = IdxSet(
    "fashion_mnist",
    "Fashion-MNIST, 28x28 grey, 10 classes, 60,000 + 10,000; MIT licence; 31 MB",
    tuple(file.replace("mnist/", "fashion-mnist/") for file in MNIST.files),
    10,
    (60_000, 10_000),
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    {
        "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
    },
)

FOLDER = "emnist"
INNER = "gzip"
"""Name of the folder in EMNIST's archive."""


def _emnist(name: str, split: str, classes: int, train: int, test: int) -> IdxSet:
    url = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
    parts = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
    return IdxSet(
        name,
        f"EMNIST {split}, 28x28 grey, {classes} classes, {train:,} + {test:,}; no licence stated, cite Cohen et al. "
        "2017; 562 MB with the other splits",
        tuple(f"{FOLDER}/{INNER}/emnist-{split}-{part}-ubyte.gz" for part in parts),
        classes,
        (train, test),
        url,
        archive=RemoteFile(url, "md5:58c8d27c78d21e728a6bc7b3cc06412e"),
        by_columns=True,
    )


EMNIST_BALANCED = _emnist("emnist", "balanced", 47, 112_800, 18_800)
EMNIST_BYCLASS = _emnist("emnist_byclass", "byclass", 62, 697_932, 116_323)
