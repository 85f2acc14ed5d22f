"""Parsers of image files: gzip, idx (MNIST and data sets modelled on it), and the binary records of CIFAR."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError
from fl_engine.data.files import read


def gunzip(path: Path, content: bytes, most: int) -> bytes:
    """Unpacks `content`, that of a gzip file. The declared size is not trusted: at most `most` + 1 bytes are unpacked,
    and the format's parser refuses what is too long. Raises DataError, which names `path`."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            return file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: expected a gzip file ({error}); delete it and fetch again") from error


def parse_idx(path: Path, content: bytes, axes: int) -> NDArray[np.uint8]:
    """An idx file of unsigned bytes (format: http://yann.lecun.com/exdb/mnist) with `axes` axes.

    Bytes 0-1 are zero, byte 2 is 8 (unsigned byte), byte 3 the number of axes; then one big-endian uint32 for each
    axis; then the values. Raises DataError for another magic number, no values, or a length that contradicts the
    header.
    """
    magic = bytes((0, 0, 8, axes))
    if content[:4] != magic:
        raise DataError(
            f"{path}: expected the idx magic number 0x{magic.hex()} (unsigned bytes, {axes} axes), "
            f"found 0x{content[:4].hex()}; is it another file?"
        )
    start = 4 + 4 * axes
    if len(content) < start:
        raise DataError(f"{path}: expected an idx header of {start} bytes, found {len(content)} bytes; fetch it again")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    expected = start + math.prod(shape)
    if expected == start:
        raise DataError(f"{path}: the header says {' x '.join(map(str, shape))}, which is no values; fetch it again")
    if len(content) != expected:
        raise DataError(
            f"{path}: the header says {' x '.join(map(str, shape))} values, so {expected} bytes; "
            f"found {len(content)}: truncated or damaged, delete it and fetch again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def parse_records(
    path: Path, content: bytes, records: int, chw: tuple[int, int, int], label_bytes: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Images (N, C, H, W) and labels (N,) of a CIFAR binary file. A record is its label bytes, of which the last one,
    the finest label, is used, then the colour planes.

    Raises DataError unless the file has exactly `records` records.
    """
    size = label_bytes + chw[0] * chw[1] * chw[2]
    if len(content) != records * size:
        raise DataError(
            f"{path}: expected {records} records of {size} bytes = {records * size} bytes, found "
            f"{len(content)}: truncated or damaged, delete it and fetch again"
        )
    table = np.frombuffer(content, dtype=np.uint8).reshape(records, size)
    return table[:, label_bytes:].reshape(records, *chw), table[:, label_bytes - 1]


def check_labels(path: Path, labels: NDArray[np.uint8], classes: int) -> None:
    """Raises DataError for a label outside 0 .. classes - 1."""
    wrong = np.flatnonzero(labels >= classes)
    if wrong.size:
        raise DataError(
            f"{path}: expected labels 0..{classes - 1}, found {labels[wrong[0]]} at sample {wrong[0]} "
            f"({wrong.size} such samples); the file is damaged, delete it and fetch again"
        )


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
