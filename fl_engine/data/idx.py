"""Grey images and their labels from a pair of gzipped idx files: the format of MNIST and of data sets modelled on
it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fl_engine.core.errors import DataError
from fl_engine.data.files import read
from fl_engine.data.formats import check_labels, gunzip, parse_idx

HEADER = 16
"""Bytes of the header of an image file."""


def images_and_labels(
    images_path: Path, labels_path: Path, checksums: Mapping[str, str], most: int, side: int, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, side, side) uint8, row by row as in the file, and labels (N,) int64, with N at most `most`.

    A file without an entry in `checksums` is not checked. Raises DataError for a file that has another checksum or is
    not a gzipped idx file, for images of another size, for another number of labels than images, and for labels outside
    0 .. classes - 1.
    """
    most_bytes = HEADER + most * side * side  # the size that the file declares is not trusted

    def idx(path: Path, axes: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        return parse_idx(path, gunzip(path, read(path, checksums.get(path.name)), most_bytes), axes)

    images, labels = idx(images_path, 3), idx(labels_path, 1)
    height, width = images.shape[1:]
    if (height, width) != (side, side):
        raise DataError(f"{images_path}: expected images of {side} x {side}, found {height} x {width}; fetch it again")
    if len(images) != len(labels):
        raise DataError(
            f"{labels_path}: expected {len(images)} labels, one for each image in {images_path.name}, "
            f"found {len(labels)}; fetch both again"
        )
    check_labels(labels_path, labels, classes)
    return torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64))
