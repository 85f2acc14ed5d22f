"""FEMNIST as published by TensorFlow Federated: the characters of `femnist`, with a split, in two HDF5 files.

https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/emnist/load_data (only_digits=False): 3,400
writers with at least two samples, 671,585 + 77,483 images, with at least one image of each writer in both parts. The
archive must match the SHA-256 in TensorFlow Federated. fed_emnist_train.h5 and fed_emnist_test.h5 hold for each writer:

    examples/<writer>/pixels float32 (n, 28, 28), 0..1, white background (1), black ink examples/<writer>/label int32
    (n,), digits (0 to 9), upper case (10 to 35), lower case (36 to 61)

Pixels are bytes divided by 255, and are turned back into bytes. A writer is the natural client; writers are sorted by
name. Needs h5py: `pip install 'flexfleet[hdf5]'`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.samples import Data
from fl_engine.data.array_files import tff_arrays, tff_examples
from fl_engine.data.downloads import Remote, download_members
from fl_engine.data.files import damaged, require
from fl_engine.data.image_files import check_labels
from fl_engine.data.moments import byte_statistics
from fl_engine.data.transforms import as_tensors
from fl_engine.datasets.femnist import CLASSES, SIDE
from fl_engine.tasks import Classification

ABOUT = (
    "FEMNIST by TensorFlow Federated, 28x28 grey, 62 classes, 671,585 + 77,483 of 3,400 writers; no licence stated, "
    "cite Caldas et al. 2018; 170 MB; needs h5py"
)
FOLDER = "femnist-tff"
ARCHIVE = Remote(
    "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2",
    "fed_emnist.tar.bz2",
    "sha256:fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0",
)
FILES = (f"{FOLDER}/fed_emnist_train.h5", f"{FOLDER}/fed_emnist_test.h5")
MOST_SAMPLES = 10_000
"""The most samples of a writer in a file. The largest number in the set is some hundreds."""


def load(root: Path) -> Data:
    """Load `root`/femnist-tff. Mean and deviation are those of the training images.

    Raises DataError for a file that is missing, damaged or of another form, for other images or labels, and if the
    parts have different writers; EnvironmentFailure if h5py is not installed.
    """
    require("femnist_tff", root, FILES, ARCHIVE.url)
    (train_x, train_y, writers, counts), (test_x, test_y, others, _) = (_part(root / file) for file in FILES)
    if odd := sorted(set(writers) ^ set(others)):
        raise damaged(
            root / FILES[1], f"the writers of {Path(FILES[0]).name}", f"{len(odd)} others, {odd[0][:80]!r} first"
        )
    mean, std = byte_statistics(train_x)
    train, test = as_tensors(train_x, train_y), as_tensors(test_x, test_y)
    source = torch.from_numpy(np.repeat(np.arange(len(writers)), counts))
    return Data("femnist_tff", Classification(CLASSES), *train, *test, mean, std, source)


def fetch(root: Path, archive: Remote = ARCHIVE) -> None:
    """Download the archive and unpack the files that do not exist. Raises as `download_members` does."""
    download_members(archive, root / FOLDER, {Path(file).name: root / file for file in FILES})


def _part(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str], list[int]]:
    """Images (N, 1, 28, 28), labels (N,), the writers, and how many samples each has."""
    found = list(_writers(path))
    if not found:
        raise damaged(path, "writers with samples", "none")
    names, images, labels = zip(*found, strict=True)
    return np.concatenate(images), np.concatenate(labels), list(names), [len(each) for each in labels]


def _writers(path: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    with tff_examples(path, "femnist_tff") as examples:
        for name in sorted(examples):
            who = f"{path}: writer {name[:80]!r}"
            yield name, *_samples(who, *tff_arrays(who, examples.get(name), ("pixels", "label")))


def _samples(who: str, pixels: Any, label: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A writer's images and labels. The declared shapes and types are checked before anything is read."""
    count = pixels.shape[0] if pixels.shape else 0
    if pixels.dtype.kind != "f" or pixels.shape != (count, SIDE, SIDE) or not 0 < count <= MOST_SAMPLES:
        raise damaged(who, f"pixels of floats, (1 to {MOST_SAMPLES}, {SIDE}, {SIDE})", f"{pixels.dtype} {pixels.shape}")
    if label.dtype.kind not in "iu" or label.shape not in ((count,), (count, 1)):
        raise damaged(who, f"{count} labels, integers", f"{label.dtype} {label.shape}")
    images, labels = pixels[()], label[()].reshape(-1).astype(np.int64)
    check_labels(who, labels, CLASSES)
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):  # false for NaN
        raise damaged(who, "pixels in 0..1", f"{low:g} to {high:g}")
    return (images * np.float32(255)).round().astype(np.uint8)[:, None], labels
