"""Parsers of image files: gzip, idx (MNIST and data sets modelled on it), the binary records of CIFAR, and JPEG."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.data.downloads import DAMAGE
from fl_engine.data.files import damaged, read

HEADER = 16
"""Bytes of the header of an idx file of images."""
BILINEAR = 2
"""Pillow's `Image.Resampling.BILINEAR`."""


def gunzip(path: Path, content: bytes, most: int) -> bytes:
    """Unpack `content`, that of a gzip file, but at most `most` + 1 bytes, because the declared size is not trusted.
    Raises DataError, which names `path`."""
    try:
        with gzip.open(io.BytesIO(content)) as file:
            return file.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, "a gzip file", error) from error


def parse_idx(path: Path, content: bytes, axes: int) -> NDArray[np.uint8]:
    """Return the array of an idx file of unsigned bytes (format: http://yann.lecun.com/exdb/mnist) with `axes` axes.

    Bytes 0-1 are zero, byte 2 is 8 (unsigned byte), byte 3 the number of axes; then one big-endian uint32 for each
    axis; then the values. Raises DataError for another magic number, no values, or a length that contradicts the
    header.
    """
    magic, start = bytes((0, 0, 8, axes)), 4 + 4 * axes
    if content[:4] != magic:
        raise damaged(path, f"the idx magic number 0x{magic.hex()}", f"0x{content[:4].hex()}")
    if len(content) < start:
        raise damaged(path, f"an idx header of {start} bytes", f"{len(content)} bytes")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    expected = start + math.prod(shape)
    if expected == start or len(content) != expected:
        raise damaged(path, f"{' x '.join(map(str, shape))} values, so {expected} bytes", f"{len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def parse_records(
    path: Path, content: bytes, records: int, chw: tuple[int, int, int], label_bytes: int = 1
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return images (N, C, H, W) and labels (N,) of a CIFAR binary file. A record is its label bytes, of which the last
    one, the finest label, is used, then the colour planes. Raises DataError unless the file has `records` records."""
    size = label_bytes + chw[0] * chw[1] * chw[2]
    if len(content) != records * size:
        raise damaged(path, f"{records} records of {size} bytes = {records * size} bytes", len(content))
    table = np.frombuffer(content, dtype=np.uint8).reshape(records, size)
    return table[:, label_bytes:].reshape(records, *chw), table[:, label_bytes - 1]


def check_labels(where: Path | str, labels: NDArray[np.integer], classes: int) -> None:
    """Raise DataError for a label outside 0 .. classes - 1."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise damaged(where, f"labels 0..{classes - 1}", f"{labels[wrong[0]]} at sample {wrong[0]}")


def images_and_labels(
    images_path: Path, labels_path: Path, checksums: Mapping[str, str], most: int, side: int, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a pair of gzipped idx files: images (N, 1, side, side) uint8 and labels (N,) int64, with N at most `most`.

    Files without an entry in `checksums` are not checked. Raises DataError for a file that has another checksum or is
    not a gzipped idx file, for images of another size, for another number of labels than images, and for labels outside
    0 .. classes - 1.
    """
    most_bytes = HEADER + most * side * side

    def idx(path: Path, axes: int) -> NDArray[np.uint8]:
        return parse_idx(path, gunzip(path, read(path, checksums.get(path.name)), most_bytes), axes)

    images, labels = idx(images_path, 3), idx(labels_path, 1)
    height, width = images.shape[1:]
    if (height, width) != (side, side):
        raise damaged(images_path, f"images of {side} x {side}", f"{height} x {width}")
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: expected a label for each of {len(images)} images, found {len(labels)}")
    check_labels(labels_path, labels, classes)
    return torch.from_numpy(images[:, None].copy()), torch.from_numpy(labels.astype(np.int64))


@contextmanager
def open_jpeg(path: Path, most: int) -> Iterator[Any]:
    """Open a JPEG file of at most `most` bytes as Pillow's image. Raises DataError for a damaged one, also if it is
    decoded in the context; EnvironmentFailure without Pillow, which is installed with Matplotlib."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("JPEG files are read with Pillow: pip install pillow") from error
    content = read(path, most=most)
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            yield image
    except (*DAMAGE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise damaged(path, "a JPEG file", error) from error
