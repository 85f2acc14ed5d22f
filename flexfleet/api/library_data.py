"""Data of one's own from folders of images, and from the data sets of other libraries."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.core.seeds import drawn
from fl_engine.core.text import path_of
from fl_engine.data.files import MOST_NAMED
from fl_engine.tasks import Classification
from fl_engine.training.isolation import isolated
from flexfleet.api.array_data import from_arrays
from flexfleet.api.to_numpy import Array, array_of, pixels, targets_of

log = logging.getLogger("flexfleet")


def from_folder(
    path: str | Path, *, test: float = 0.2, size: int | tuple[int, int] | None = None, name: str | None = None
) -> Data:
    """Read images from a folder for each class, path/<class>/**/*, in every format that Pillow opens.

    The classes are the folders' names in alphabetical order; `data.task.names` keeps them. Of an image with several
    frames the first is read. Files that are no images, or not in a class folder, or hidden, are skipped with a warning.

    Args:
        path: The folder.
        test: Share of the images to test on.
        size: Height and width in pixels that all images are scaled to; None: all have the same size already.
        name: Name of the data set; None: that of the folder.

    Raises:
        DataError: A class folder has no image, an image cannot be read, or sizes differ.
        EnvironmentFailure: Pillow is not installed.

    Example:
        >>> data = flexfleet.from_folder("photos", size=32)
    """
    if not isinstance(path, str | Path):
        raise DataError(f"a folder is expected, got {path!r}")
    root, wanted = path_of(path), None if size is None else _size(size)
    folders = (each.name for each in root.iterdir() if each.is_dir()) if root.is_dir() else ()
    classes = sorted(name for name in folders if not name.startswith("."))
    if not classes:
        raise DataError(f"{root}: a folder for each class is expected, {root}/<class>/*.png; there is none")
    image = _pillow()
    found: list[Array] = []
    labels: list[int] = []
    skipped: list[str] = []
    for file in _files(root):
        at = file.relative_to(root)
        read = None
        if len(at.parts) > 1 and not any(part.startswith(".") for part in at.parts):
            read = _picture(image, file, wanted)
        if read is None:
            skipped.append(str(at))
            continue
        found.append(read)
        labels.append(classes.index(at.parts[0]))
    if empty := sorted({*range(len(classes))} - {*labels}):
        raise DataError(
            f"{root / classes[empty[0]]}: no image that Pillow opens is there; remove the folder or fill it"
        )
    if skipped:
        log.warning("%s: files skipped, not images of a class (%d): %s", root, len(skipped), _named(skipped))
    grey = all(each.ndim == 2 for each in found)
    found = [each if grey or each.ndim == 3 else np.repeat(each[None], 3, axis=0) for each in found]
    first = found[0].shape[-2:]
    if apart := next((each.shape[-2:] for each in found if each.shape[-2:] != first), None):
        raise DataError(f"{root}: images of {first[0]}x{first[1]} and {apart[0]}x{apart[1]}: give size=(height, width)")
    called = root.resolve().name if name is None else name
    data = from_arrays(np.stack(found), np.array(labels), test=test, name=called)
    return replace(data, task=Classification(len(classes), names=tuple(classes)))


def from_torch(train: Any, test: Any = 0.2, *, name: str | None = None) -> Data:
    """Read a torch `Dataset` of (sample, target) once.

    Args:
        test: Another data set, or a share.
        name: Name of the data set; None: that of its class.

    Raises:
        DataError: Items are no samples and targets, or the data set's transform draws random numbers. Augment on the
            clients instead (`training.augment`).

    Example:
        >>> data = flexfleet.from_torch(torchvision.datasets.MNIST(root, transform=ToTensor()))
    """
    x, y = _read_items(train, "train")
    part = test if isinstance(test, float | int) else _read_items(test, "test")
    return from_arrays(x, y, test=part, name=type(train).__name__ if name is None else name)


def from_huggingface(
    train: Any,
    test: Any = 0.2,
    *,
    image: str = "image",
    label: str = "label",
    client: str | None = None,
    name: str | None = None,
) -> Data:
    """Read a `datasets.Dataset` of Hugging Face.

    Args:
        test: Another data set, or a share.
        image: Column of images, or of lists of numbers.
        label: Column of labels.
        client: Column with the owner of each sample. A run then has these clients, unless it sets another
            `partition_rule`.
        name: Name of the data set; None: its own.

    Raises:
        DataError: A column does not exist, or samples have different shapes.

    Example:
        >>> data = flexfleet.from_huggingface(datasets.load_dataset("mnist")["train"])
    """
    x, y = _columns(train, image, label)
    owner = None if client is None else _column(train, client)
    known = str(getattr(getattr(train, "info", None), "dataset_name", None) or "huggingface")
    part = test if isinstance(test, float | int) else _columns(test, image, label)
    return from_arrays(x, y, test=part, clients=owner, name=known if name is None else name)


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("reading images needs Pillow: pip install pillow") from error
    return Image


def _size(given: Any) -> tuple[int, int]:
    pair = (given, given) if isinstance(given, int) else given
    if not isinstance(pair, tuple | list) or [type(side) for side in pair] != [int, int] or min(pair) < 1:
        raise DataError(f"size: a side, or (height, width), in pixels is expected, at least 1, got {given!r}")
    high, wide = pair
    return high, wide


def _files(root: Path) -> list[Path]:
    """Return all files below the folder, sorted; links to folders are followed. Raises DataError for an unreadable
    folder."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); check who may read it") from error

    walked = os.walk(root, onerror=refuse, followlinks=True)
    return sorted(Path(folder, name) for folder, _, names in walked for name in names)


def _picture(image: Any, file: Path, size: tuple[int, int] | None) -> Array | None:
    """Return the pixels of an image's first frame; None if neither its content nor its suffix is one that Pillow
    opens."""
    try:
        with image.open(file) as opened:
            return pixels(opened, str(file), size)
    except image.UnidentifiedImageError as error:
        if image.registered_extensions().get(file.suffix.lower()) not in image.OPEN:
            return None
        raise DataError(f"{file}: Pillow cannot read this image: {error}") from error
    except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
        raise DataError(f"{file}: Pillow cannot read this image: {error}") from error


def _named(files: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = [f"{len(files) - MOST_NAMED} more"] if len(files) > MOST_NAMED else []
    return ", ".join([*files[:MOST_NAMED], *more])


def _read_items(given: Any, what: str) -> tuple[Array, Array]:
    try:
        count = len(given)
    except TypeError as error:
        raise DataError(
            f"{what}: a Dataset with a length is expected, got {type(given).__name__}; of an iterable one collect the "
            "samples and give them to from_arrays"
        ) from error
    if not hasattr(given, "__getitem__"):
        of = ": give its data set, loader.dataset" if hasattr(given, "dataset") else ""
        raise DataError(f"{what}: a Dataset that is read by position is expected, got {type(given).__name__}{of}")
    xs: list[Array] = []
    ys: list[Array] = []
    with isolated():
        before = drawn()
        for i in range(count):
            try:
                x, y = given[i]
            except (TypeError, ValueError) as error:
                raise DataError(f"{what}: item {i} is no (sample, target): {error}") from error
            xs.append(array_of(x, f"{what}: item {i}"))
            ys.append(targets_of(y, f"{what}: target {i}"))
        after = drawn()
    if after != before:
        raise DataError(
            f"{what}: reading it draws random numbers, so its transform augments: leave that out, and augment on the "
            "clients (options={'training.augment': [...]})"
        )
    if not xs:
        raise DataError(f"{what}: the data set is empty")
    shapes = {x.shape for x in xs}
    if len(shapes) > 1:
        raise DataError(f"{what}: samples have the shapes {sorted(shapes)[:3]}; make them alike: resize or pad them")
    targets = {y.shape for y in ys}
    if len(targets) > 1:
        raise DataError(f"{what}: targets have the shapes {sorted(targets)[:3]}; each needs as many numbers")
    return np.stack(xs), np.stack(ys)


def _columns(given: Any, image: str, label: str) -> tuple[Array, Array]:
    rows, labels = _column(given, image), _column(given, label)
    samples = [array_of(each, f"{image}: row {i}") for i, each in enumerate(rows)]
    if len({each.shape for each in samples}) > 1:
        raise DataError(f"{image}: samples of different shapes; resize them first (given.map)")
    return np.stack(samples), targets_of(labels, label)


def _column(given: Any, wanted: str) -> list[Any]:
    names = list(getattr(given, "column_names", []))
    if wanted not in names:
        raise DataError(f"no column {wanted!r}; there are {', '.join(map(str, names)) or 'none'}: say which it is")
    return list(given[wanted])
