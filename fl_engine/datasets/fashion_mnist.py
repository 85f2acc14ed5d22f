"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28 in 10 classes, from the four official idx files.

Xiao, Rasul and Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms,
2017 (arXiv:1708.07747). MIT licence. Files and checksums: https://github.com/zalandoresearch/fashion-mnist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download
from fl_engine.data.files import require
from fl_engine.data.image_files import images_and_labels
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
MOST_SAMPLES = 60_000
MEAN, STD = (0.2860,), (0.3530,)
"""Mean and deviation of the training images, in units of 255."""


def load(root: Path, checksums: Mapping[str, str] = CHECKSUMS) -> Data:
    """Load `root`/fashion-mnist. Raises DataError for a file that is missing, has another checksum than in `checksums`,
    or is not an idx file of 28 x 28 images or of as many labels 0..9."""
    require("fashion_mnist", root, FILES, f"{URL}/{{{','.join(CHECKSUMS)}}}")
    images_train, labels_train, images_test, labels_test = (root / file for file in FILES)
    train = images_and_labels(images_train, labels_train, checksums, MOST_SAMPLES, SIDE, CLASSES)
    test = images_and_labels(images_test, labels_test, checksums, MOST_SAMPLES, SIDE, CLASSES)
    return Data("fashion_mnist", Classification(CLASSES), *train, *test, MEAN, STD)


def fetch(root: Path, remotes: Sequence[Remote] = REMOTES) -> None:
    """Download the files that do not exist. Raises as `downloads.download` does."""
    for remote in remotes:
        download(remote, root / FOLDER)
