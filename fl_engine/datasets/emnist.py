"""EMNIST: handwritten digits and letters, grey images of 28 x 28, from NIST's idx files: two of its splits.

Cohen, Afshar, Tapson and van Schaik, EMNIST: an Extension of MNIST to Handwritten Letters, 2017 (arXiv:1702.05373).

    balanced   47 classes, 112,800 + 18,800: letters whose two cases look alike are one class, all classes equally large
    byclass    62 classes, 697,932 + 116,323: digits (0 to 9), upper case (10 to 35), lower case (36 to 61)

The files hold images column by column; here they are transposed to stand upright, like MNIST's. The archive must match
the MD5 in torchvision. No checksums of single files are published, so their sizes and labels are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.downloads import Remote, download_members
from fl_engine.data.files import require
from fl_engine.data.image_files import images_and_labels
from fl_engine.data.moments import byte_statistics
from fl_engine.tasks import Classification

FOLDER = "emnist"
INNER = "gzip"
"""The archive's own folder."""
ARCHIVE = Remote(
    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "gzip.zip", "md5:58c8d27c78d21e728a6bc7b3cc06412e"
)
SIDE = 28


@dataclass(frozen=True)
class Split:
    """A split of EMNIST."""

    name: str
    published: str
    """The publisher's name of the split, which file names contain."""
    classes: int
    train: int
    """Images."""
    test: int

    @property
    def about(self) -> str:
        return (
            f"EMNIST {self.published}, 28x28 grey, {self.classes} classes, {self.train:,} + {self.test:,}; no licence "
            "stated, cite Cohen et al. 2017; 562 MB with the other splits"
        )

    @property
    def files(self) -> tuple[str, ...]:
        kinds = ("train-images-idx3", "train-labels-idx1", "test-images-idx3", "test-labels-idx1")
        return tuple(f"{FOLDER}/{INNER}/emnist-{self.published}-{kind}-ubyte.gz" for kind in kinds)


BALANCED = Split("emnist", "balanced", 47, 112_800, 18_800)
BYCLASS = Split("emnist_byclass", "byclass", 62, 697_932, 116_323)


def load(root: Path, split: Split = BALANCED) -> Data:
    """Load `root`/emnist/gzip. Mean and deviation are those of the training images.

    Raises DataError for a file that is missing, or is not an idx file with the split's number of 28 x 28 images or
    labels.
    """
    require(split.name, root, split.files, ARCHIVE.url)
    images_train, labels_train, images_test, labels_test = (root / file for file in split.files)
    train_x, train_y = _part(images_train, labels_train, split.train, split.classes)
    test_x, test_y = _part(images_test, labels_test, split.test, split.classes)
    mean, std = byte_statistics(train_x.numpy())
    return Data(split.name, Classification(split.classes), train_x, train_y, test_x, test_y, mean, std)


def fetch(root: Path, split: Split = BALANCED, archive: Remote = ARCHIVE) -> None:
    """Download the archive and unpack the split's files that do not exist. Raises as `download_members` does."""
    download_members(archive, root / FOLDER, {f"{INNER}/{Path(file).name}": root / file for file in split.files})


def _part(images: Path, labels: Path, samples: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = images_and_labels(images, labels, {}, samples, SIDE, classes)
    if len(x) != samples:
        raise DataError(f"{images}: expected {samples} images, found {len(x)}. Delete it and fetch it again")
    return x.transpose(2, 3).contiguous(), y
