"""Tiny ImageNet: 100,000 + 10,000 colour images of 64 x 64 in 200 classes, from the official folders.

Le and Yang, Tiny ImageNet Visual Recognition Challenge, Stanford CS231n 2015. Layout of tiny-imagenet-200.zip:

`wnids.txt` contains one class per line, such as n01443537.
`train/<wnid>/images/<wnid>_<number>.JPEG` are the 500 training images of each class.
`val/images/val_<number>.JPEG` are the 50 validation images of each class.
`val/val_annotations.txt` contains the file, the class and the box of one image per line, separated by tabs.

The official test images have no labels, so the validation images are the test part. Classes are numbered in the order
of their names. A class without a folder in train/ is left out, so users can try out a part of the set. The archive must
match the SHA-256 checksum in TensorFlow Datasets.

Pillow, which is installed with Matplotlib, decodes the images. Mean and standard deviation are computed from the
training images.
"""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import RemoteFile, download, extract
from fl_engine.data.files import absent, damaged, expecting, open_jpeg, read_text, require
from fl_engine.data.transforms import byte_statistics
from fl_engine.tasks import Classification

ABOUT = "Tiny ImageNet, 64x64 colour, 200 classes, 100,000 + 10,000; ImageNet's terms: research only; 248 MB"
FOLDER = "tiny-imagenet-200"
"""Name of the folder in the archive."""
ARCHIVE = RemoteFile(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
)
URL = ARCHIVE.url
WNIDS, ANNOTATIONS, TRAIN, VALIDATION = (
    f"{FOLDER}/{name}" for name in ("wnids.txt", "val/val_annotations.txt", "train", "val/images")
)
FILES = (WNIDS, ANNOTATIONS, f"{TRAIN}/*/images/*.JPEG", f"{VALIDATION}/*.JPEG")
MEMBER = re.compile(
    rf"{FOLDER}/(wnids\.txt|val/val_annotations\.txt|val/images/val_\d+\.JPEG|train/n\d{{8}}/images/n\d{{8}}_\d+\.JPEG)"
)
WNID = re.compile(r"n\d{8}", re.ASCII)
PICTURE = re.compile(r"val_\d{1,8}\.JPEG", re.ASCII)
SIDE = 64
LISTED = 200
MOST_TEXT = 2**22
"""Maximum size of a text file in bytes. The official files have at most 0.3 MB."""
MOST_PICTURE = 2**18
"""Maximum size of an image file in bytes. The official images have a few kilobytes."""

log = logging.getLogger(__name__)


def load(root: Path) -> Data:
    """Load `root`/tiny-imagenet-200, with the classes that have a folder in train/.

    Raises DataError if files are missing or damaged, an image is not 64 x 64, classes have different numbers of images,
    or a listed image is missing. Raises EnvironmentFailure if Pillow is not installed.
    """
    require("tiny_imagenet", root, FILES, ARCHIVE.url)
    wnids = _classes(root)
    train = [
        (path, label)
        for label, wnid in enumerate(wnids)
        for path in sorted((root / TRAIN / wnid / "images").glob("*.JPEG"))
    ]
    _check_counts(root / TRAIN, train, len(wnids))
    test = _annotated(root, wnids)
    _check_counts(root / ANNOTATIONS, test, len(wnids))
    if len(wnids) < LISTED:
        log.warning("tiny_imagenet: using only the %d of %d classes that have a folder in train/", len(wnids), LISTED)
    (train_x, train_y), (test_x, test_y) = _read(train), _read(test)
    mean, std = byte_statistics(train_x.numpy())
    return Data("tiny_imagenet", Classification(len(wnids)), train_x, train_y, test_x, test_y, mean, std)


def fetch(root: Path, archive: RemoteFile = ARCHIVE) -> None:
    """Download the archive, keep it, and unpack missing files. Do nothing if the folders exist but the archive does
    not. Raises the same errors as `downloads.download` and `extract`.
    """
    # An existing archive may have been unpacked only partially.
    if not absent(root, FILES) and not (root / archive.filename).exists():
        return
    packed = download(archive, root)
    with expecting(packed, "a zip file"), zipfile.ZipFile(packed) as members:
        names = [name for name in members.namelist() if MEMBER.fullmatch(name)]
    extract(packed, {name: root / name for name in names if not (root / name).exists()})


def _classes(root: Path) -> list[str]:
    path = root / WNIDS
    listed = [line.strip() for line in read_text(path, MOST_TEXT).splitlines()]
    if len(set(listed)) != LISTED or len(listed) != LISTED or not all(map(WNID.fullmatch, listed)):
        raise damaged(path, f"{LISTED} different classes such as n01443537", f"{len(set(listed))} names")
    here = sorted(folder.name for folder in (root / TRAIN).glob("*") if folder.is_dir())
    if strange := sorted({*here} - {*listed}):
        raise damaged(root / TRAIN, f"folders that {path.name} lists", f"{strange[0][:80]!r}")
    if len(here) < 2:
        raise damaged(root / TRAIN, "folders of at least 2 classes", len(here))
    return here


def _annotated(root: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    """Return the paths and labels of the validation images, in the order of the annotations."""
    path = root / ANNOTATIONS
    found: dict[str, int] = {}
    label = {wnid: at for at, wnid in enumerate(wnids)}
    for number, line in enumerate(read_text(path, MOST_TEXT).splitlines(), 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if not PICTURE.fullmatch(name) or not WNID.fullmatch(wnid) or name in found:
            raise damaged(f"{path}: line {number}", "the name of another image and its class", f"{line[:80]!r}")
        found[name] = label.get(wnid, -1)
    return [(root / VALIDATION / name, label) for name, label in found.items() if label >= 0]


def _check_counts(where: Path, pictures: list[tuple[Path, int]], classes: int) -> None:
    counts = np.bincount([label for _, label in pictures], minlength=classes)
    if not 0 < counts.min() == counts.max():
        raise damaged(where, "the same number of images for every class", f"{counts.min()} to {counts.max()}")


def _read(pictures: list[tuple[Path, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uint8 images (N, 3, 64, 64) and int64 labels (N,). Grey images are converted to three channels."""
    x = np.empty((len(pictures), 3, SIDE, SIDE), dtype=np.uint8)
    for at, (path, _) in enumerate(pictures):
        with open_jpeg(path, MOST_PICTURE) as image:
            if image.size != (SIDE, SIDE):  # only the header is read at this point
                raise damaged(path, f"{SIDE} x {SIDE} pixels", image.size)
            x[at] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    return torch.from_numpy(x), torch.tensor([label for _, label in pictures])
