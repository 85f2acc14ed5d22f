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

from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.data.array_files import tff_arrays, tff_examples
from fl_engine.data.downloads import Remote, download, extract
from fl_engine.data.files import require
from fl_engine.data.moments import byte_statistics
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
"""The most samples of a writer in a file; the largest number in the set is some hundreds."""


def load(root: Path) -> Data:
    """The data set from `root`/femnist-tff. Mean and deviation are the training images' own.

    Raises DataError for a file that is missing, damaged or of another form, for other images or labels, and if the
    parts have different writers; EnvironmentFailure if h5py is not installed.
    """
    require("femnist_tff", root, FILES, ARCHIVE.url)
    (train_x, train_y, writers, counts), (test_x, test_y, others, _) = (_part(root / file) for file in FILES)
    if writers != others:
        odd = sorted(set(writers) ^ set(others))
        raise DataError(
            f"{root / FILES[1]}: expected the writers of {Path(FILES[0]).name}, each of which has samples in both; "
            f"{len(odd)} do not, such as {odd[0][:80]!r}: fetch both again"
        )
    mean, std = byte_statistics(train_x)
    return Data(
        "femnist_tff",
        Classification(CLASSES),
        torch.from_numpy(train_x),
        torch.from_numpy(train_y),
        torch.from_numpy(test_x),
        torch.from_numpy(test_y),
        mean,
        std,
        natural_client=torch.from_numpy(np.repeat(np.arange(len(writers)), counts)),
    )


def fetch(root: Path, archive: Remote = ARCHIVE) -> None:
    """Downloads the archive and unpacks the files that are not there yet. The archive stays.

    Raises what `downloads.download` and `downloads.extract` raise.
    """
    absent = {path.name: path for path in (root / file for file in FILES) if not path.exists()}
    if absent:
        extract(download(archive, root / FOLDER), absent)


def _part(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[str], list[int]]:
    """Images (N, 1, 28, 28), labels (N,), the writers, and how many samples each has."""
    found = list(_writers(path))
    if not found:
        raise DataError(f"{path}: no writer has a sample; delete it and fetch again")
    names, images, labels = zip(*found, strict=True)
    return np.concatenate(images), np.concatenate(labels), list(names), [len(each) for each in labels]


def _writers(path: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    with tff_examples(path, "femnist_tff") as examples:
        for name in sorted(examples):
            who = f"{path}: writer {name[:80]!r}"
            yield name, *_samples(who, *tff_arrays(who, examples.get(name), ("pixels", "label")))


def _samples(who: str, pixels: Any, label: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A writer's images and labels. The shapes and types that the file declares are checked before anything is read."""
    count = pixels.shape[0] if pixels.shape else 0
    if pixels.dtype.kind != "f" or pixels.shape != (count, SIDE, SIDE) or not 0 < count <= MOST_SAMPLES:
        raise DataError(
            f"{who}: expected pixels of floats, (n, {SIDE}, {SIDE}) with n from 1 to {MOST_SAMPLES}, found "
            f"{pixels.dtype} {pixels.shape}; delete the file and fetch again"
        )
    if label.dtype.kind not in "iu" or label.shape not in ((count,), (count, 1)):
        raise DataError(
            f"{who}: expected a label, an integer, of each of {count} images, found {label.dtype} {label.shape}; "
            "delete the file and fetch again"
        )
    images, labels = pixels[()], label[()].reshape(-1).astype(np.int64)
    wrong = np.flatnonzero((labels < 0) | (labels >= CLASSES))
    if wrong.size:
        raise DataError(
            f"{who}: expected labels 0..{CLASSES - 1}, found {labels[wrong[0]]} at sample {wrong[0]}; delete the file "
            "and fetch again"
        )
    low, high = images.min(), images.max()
    if not (low >= 0 and high <= 1):  # a NaN fails both
        raise DataError(f"{who}: expected pixels in 0..1, found {low:g} to {high:g}; fetch the file again")
    return (images * np.float32(255)).round().astype(np.uint8)[:, None], labels
