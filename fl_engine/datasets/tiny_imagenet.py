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

import io
import logging
import re
import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.data.downloads import DAMAGE, Remote, download, extract
from fl_engine.data.files import absent, read, require
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
"""The most bytes of a list; the official one has 0.3 MB."""
MOST_PICTURE = 2**18
"""The most bytes of an image file; those of the set have some kilobytes."""

log = logging.getLogger(__name__)


def load(root: Path) -> Data:
    """The data set from `root`/tiny-imagenet-200, with the classes that have a folder in train/.

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
        log.warning("tiny_imagenet: %d of %d classes are there; the others are left out", len(wnids), LISTED)
    (train_x, train_y), (test_x, test_y) = _read(train), _read(test)
    mean, std = byte_statistics(train_x.numpy())
    return Data("tiny_imagenet", Classification(len(wnids)), train_x, train_y, test_x, test_y, mean, std)


def fetch(root: Path, archive: Remote = ARCHIVE) -> None:
    """Downloads the archive, unless the folders exist without it, and unpacks what does not exist yet. The archive
    stays.

    Raises what `downloads.download` and `downloads.extract` raise.
    """
    # If the archive is there too, it may have been unpacked only in part.
    if not absent(root, FILES) and not (root / archive.filename).exists():
        return
    packed = download(archive, root)
    try:
        with zipfile.ZipFile(packed) as members:
            names = [name for name in members.namelist() if MEMBER.fullmatch(name)]
    except DAMAGE as error:
        raise DataError(f"{packed}: cannot be unpacked ({error}); delete the archive and fetch again") from error
    extract(packed, {name: root / name for name in names if not (root / name).exists()})


def _lines(path: Path) -> list[str]:
    try:
        return read(path, most=MOST_TEXT).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected plain text ({error}); it is damaged: delete it and fetch again") from error


def _classes(root: Path) -> list[str]:
    """The names of the classes that have a folder, sorted."""
    path = root / WNIDS
    listed = [line.strip() for line in _lines(path)]
    wrong = [line for line in listed if not WNID.fullmatch(line)]
    if len(set(listed)) != LISTED or len(listed) != LISTED or wrong:
        raise DataError(
            f"{path}: expected {LISTED} different classes as n01443537, found {len(set(listed))}"
            f"{f', among them {wrong[0][:80]!r}' if wrong else ''}; it is damaged: delete it and fetch again"
        )
    here = sorted(folder.name for folder in (root / TRAIN).glob("*") if folder.is_dir())
    if strange := sorted({*here} - {*listed}):
        raise DataError(f"{path}: does not list the folder {strange[0][:80]!r} of {TRAIN}; delete both and fetch again")
    if len(here) < 2:
        raise DataError(f"{root / TRAIN}: expected folders of at least 2 classes of {path.name}, found {len(here)}")
    return here


def _pictures(folder: Path) -> list[Path]:
    """The images of a folder, sorted by name, so that the order is the same on every file system."""
    found = sorted(folder.glob("*.JPEG"))
    if not found:
        raise DataError(f"{folder}: expected pictures (*.JPEG), found none; delete the folder and fetch again")
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
            raise DataError(
                f"{path}: line {number}: expected a picture that is new and its class, val_0.JPEG and n03444034 with a "
                f"tab between, found {line[:80]!r}; it is damaged: delete it and fetch again"
            )
        found[name] = label.get(wnid, -1)
    return [(root / VALIDATION / name, label) for name, label in found.items() if label >= 0]


def _check_counts(where: Path, pictures: list[tuple[Path, int]], wnids: list[str]) -> None:
    """Raises DataError unless all classes have the same number of images, as they do in the published set."""
    counts = np.bincount([label for _, label in pictures], minlength=len(wnids))
    if counts.min() != counts.max():
        few, many = int(counts.argmin()), int(counts.argmax())
        raise DataError(
            f"{where}: expected as many pictures of every class, found {counts[few]} of {wnids[few]} and "
            f"{counts[many]} of {wnids[many]}; some are missing: fetch again, or unpack the archive again"
        )


def _read(pictures: list[tuple[Path, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 64, 64) uint8 and labels (N,) int64."""
    x = np.empty((len(pictures), 3, SIDE, SIDE), dtype=np.uint8)
    for at, (path, _) in enumerate(pictures):
        x[at] = _picture(path)
    return torch.from_numpy(x), torch.tensor([label for _, label in pictures])


def _picture(path: Path) -> NDArray[np.uint8]:
    """(3, 64, 64); grey images, of which there are some, get three equal channels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("Tiny ImageNet needs Pillow to read JPEG: pip install pillow") from error
    content = read(path, most=MOST_PICTURE)
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            if image.size != (SIDE, SIDE):  # from the header: nothing is decoded yet
                width, height = image.size
                raise DataError(f"{path}: expected {SIDE} x {SIDE} pixels, found {height} x {width}; fetch it again")
            return np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    except (*DAMAGE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"{path}: cannot be read as JPEG ({error}); delete it and fetch again") from error
