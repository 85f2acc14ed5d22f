"""Opens JPEG files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_engine.core.errors import EnvironmentFailure
from fl_engine.data.downloads import DAMAGE
from fl_engine.data.files import damaged, read

BILINEAR = 2
"""Pillow's `Image.Resampling.BILINEAR`."""


@contextmanager
def open_jpeg(path: Path, most: int) -> Iterator[Any]:
    """Open a JPEG file of at most `most` bytes as a Pillow image. Raises EnvironmentFailure if Pillow (installed with
    Matplotlib) is missing, and DataError if the file is damaged, even if the damage is found inside the `with`
    block."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("Pillow is required to read JPEG files. Run `pip install pillow`") from error
    content = read(path, most=most)
    try:
        with Image.open(io.BytesIO(content), formats=("JPEG",)) as image:
            yield image
    except (*DAMAGE, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise damaged(path, "a JPEG file", error) from error
