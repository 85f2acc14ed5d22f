"""Tiny ImageNet: 100,000 + 10,000 colour images of 64 x 64 in 200 classes, from the official folders.

Le and Yang, Tiny ImageNet Visual Recognition Challenge, Stanford CS231n 2015. Layout of tiny-imagenet-200.zip:

    wnids.txt                                     a class, n01443537, a line
    train/<wnid>/images/<wnid>_<number>.JPEG      500 of each class
    val/images/val_<number>.JPEG                  50 of each class, listed in
    val/val_annotations.txt                       file, class and a box a line, with tabs between

The official test images have no labels, so the validation images are the test part. Classes are numbered in the order
of their names. Of the folders in train/ some may be absent: their classes are then left out, with their validation
images, so that a part of the set can be used for trials. The archive must match the SHA-256 in TensorFlow Datasets.

Pillow, which is installed with Matplotlib, decodes the images. Mean and deviation are the training images' own.
"""

from __future__ import annotations

import logging
import re
import zipfile
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.samples import Data
from fl_engine.data.downloads import DAMAGE, Remote, download, extract
from fl_engine.data.files import absent, damaged, read, require
from fl_engine.data.image_files import open_jpeg
from fl_engine.data.moments import byte_statistics
from fl_engine.tasks import Classification

ABOUT = "Tiny ImageNet, 64x64 colour, 200 classes, 100,000 + 10,000; ImageNet's terms: research only; 248 MB"
FOLDER = "tiny-imagenet-200"
"""The archive's own folder."""
ARCHIVE = Remote(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "tiny-imagenet-200.zip",
    "sha256:6198c8ae015e2b3e007c7841da39ec069199b9aa3bfa943a462022fe5e43c821",
)
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
"""The most bytes of a list. The official one has 0.3 MB."""
MOST_PICTURE = 2**18
"""The most bytes of an image file. Those of the set have some kilobytes."""

log = logging.getLogger(__name__)


def load(root: Path) -> Data:
    """Load `root`/tiny-imagenet-200, with the classes that have a folder in train/.

    Raises DataError if files are missing or damaged, an image is not 64 x 64, classes have different numbers of images,
    or a listed image is missing; EnvironmentFailure without Pillow.
    """
    require("tiny_imagenet", root, FILES, ARCHIVE.url)
    wnids = _classes(root)
    train = [(path, label) for label, wnid in enumerate(wnids) for path in _pictures(root / TRAIN / wnid / "images")]
    _check_counts(root / TRAIN, train, wnids)
    test = _annotated(root, wnids)
    _check_counts(root / ANNOTATIONS, test, wnids)
    if len(wnids) < LISTED:
        log.warning("tiny_imagenet: %d of %d classes have a folder; the others are left out", len(wnids), LISTED)
    (train_x, train_y), (test_x, test_y) = _read(train), _read(test)
    mean, std = byte_statistics(train_x.numpy())
    return Data("tiny_imagenet", Classification(len(wnids)), train_x, train_y, test_x, test_y, mean, std)


def fetch(root: Path, archive: Remote = ARCHIVE) -> None:
    """Download the archive, unless the folders exist without it, and unpack what does not exist. The archive is kept.

    Raises as `downloads.download` and `downloads.extract` do.
    """
    # If the archive exists, it may have been unpacked only in part.
    if not absent(root, FILES) and not (root / archive.filename).exists():
        return
    packed = download(archive, root)
    try:
        with zipfile.ZipFile(packed) as members:
            names = [name for name in members.namelist() if MEMBER.fullmatch(name)]
    except DAMAGE as error:
        raise damaged(packed, "a zip file", error) from error
    extract(packed, {name: root / name for name in names if not (root / name).exists()})


def _lines(path: Path) -> list[str]:
    try:
        return read(path, most=MOST_TEXT).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise damaged(path, "plain text", error) from error


def _classes(root: Path) -> list[str]:
    """The names of the classes that have a folder, sorted."""
    path = root / WNIDS
    listed = [line.strip() for line in _lines(path)]
    if len(set(listed)) != LISTED or len(listed) != LISTED or not all(map(WNID.fullmatch, listed)):
        raise damaged(path, f"{LISTED} different classes as n01443537", f"{len(set(listed))} names")
    here = sorted(folder.name for folder in (root / TRAIN).glob("*") if folder.is_dir())
    if strange := sorted({*here} - {*listed}):
        raise damaged(root / TRAIN, f"folders that {path.name} lists", f"{strange[0][:80]!r}")
    if len(here) < 2:
        raise damaged(root / TRAIN, "folders of at least 2 classes", len(here))
    return here


def _pictures(folder: Path) -> list[Path]:
    """The images of a folder, sorted by name, so that the order is the same on every file system."""
    found = sorted(folder.glob("*.JPEG"))
    if not found:
        raise damaged(folder, "pictures (*.JPEG)", "none")
    return found


def _annotated(root: Path, wnids: list[str]) -> list[tuple[Path, int]]:
    """The validation pictures of these classes, in the order of the list."""
    path = root / ANNOTATIONS
    found: dict[str, int] = {}
    label = {wnid: at for at, wnid in enumerate(wnids)}
    for number, line in enumerate(_lines(path), 1):
        name, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if not PICTURE.fullmatch(name) or not WNID.fullmatch(wnid) or name in found:
            raise damaged(f"{path}: line {number}", "a new picture and its class", f"{line[:80]!r}")
        found[name] = label.get(wnid, -1)
    return [(root / VALIDATION / name, label) for name, label in found.items() if label >= 0]


def _check_counts(where: Path, pictures: list[tuple[Path, int]], wnids: list[str]) -> None:
    """Raise DataError unless all classes have the same number of images, as they do in the published set."""
    counts = np.bincount([label for _, label in pictures], minlength=len(wnids))
    if counts.min() != counts.max():
        few, many = int(counts.argmin()), int(counts.argmax())
        raise damaged(
            where,
            "as many pictures of every class",
            f"{counts[few]} of {wnids[few]} and {counts[many]} of {wnids[many]}",
        )


def _read(pictures: list[tuple[Path, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 64, 64) uint8 and labels (N,) int64. Grey images, of which there are some, get three channels."""
    x = np.empty((len(pictures), 3, SIDE, SIDE), dtype=np.uint8)
    for at, (path, _) in enumerate(pictures):
        with open_jpeg(path, MOST_PICTURE) as image:
            if image.size != (SIDE, SIDE):  # of the header: nothing is decoded yet
                raise damaged(path, f"{SIDE} x {SIDE} pixels", image.size)
            x[at] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    return torch.from_numpy(x), torch.tensor([label for _, label in pictures])
