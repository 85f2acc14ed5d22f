"""MNIST: 60,000 + 10,000 grey images of 28 x 28, handwritten digits, from the four official idx files.

LeCun, Bottou, Bengio and Haffner, Gradient-Based Learning Applied to Document Recognition, Proceedings of the IEEE
1998. Format: http://yann.lecun.com/exdb/mnist. Files come from torchvision's mirror and must match
the MD5 checksums in torchvision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download
from fl_engine.data.files import require
from fl_engine.data.image_files import images_and_labels
from fl_engine.tasks import Classification

ABOUT = "MNIST, 28x28 grey, 10 classes, 60,000 + 10,000; licence CC BY-SA 3.0; 12 MB"
FOLDER = "mnist"
URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
CHECKSUMS = {
    "train-images-idx3-ubyte.gz": "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "md5:d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "md5:9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "md5:ec29112dd5afa0611ce80d1b7f02629c",
}
REMOTES = tuple(Remote(f"{URL}/{name}", name, checksum) for name, checksum in CHECKSUMS.items())
FILES = tuple(f"{FOLDER}/{name}" for name in CHECKSUMS)
CLASSES = 10
SIDE = 28
MOST_SAMPLES = 60_000
MEAN, STD = (0.1307,), (0.3081,)
"""Mean and deviation of the training images, in units of 255."""


def load(root: Path, checksums: Mapping[str, str] = CHECKSUMS) -> Data:
    """Load `root`/mnist. Raises DataError for a file that is missing, has another checksum than in `checksums`, or is
    not an idx file of 28 x 28 images or of as many labels 0..9."""
    require("mnist", root, FILES, f"{URL}/{{{','.join(CHECKSUMS)}}}")
    images_train, labels_train, images_test, labels_test = (root / file for file in FILES)
    train = images_and_labels(images_train, labels_train, checksums, MOST_SAMPLES, SIDE, CLASSES)
    test = images_and_labels(images_test, labels_test, checksums, MOST_SAMPLES, SIDE, CLASSES)
    return Data("mnist", Classification(CLASSES), *train, *test, MEAN, STD)


def fetch(root: Path, remotes: Sequence[Remote] = REMOTES) -> None:
    """Download the files that do not exist. Raises as `downloads.download` does."""
    for remote in remotes:
        download(remote, root / FOLDER)
