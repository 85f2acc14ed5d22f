"""Create data sets from folders of images, and from data sets of other libraries."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data
from fl_engine.core.seeds import drawn
from fl_engine.core.task import Task
from fl_engine.core.text import path_of
from fl_engine.data.files import replacing
from fl_engine.tasks import Classification
from fl_engine.training.isolation import isolated
from flexfleet.api.array_data import Array, array_of, from_arrays, pixels, targets_of

log = logging.getLogger("flexfleet")


def from_folder(
    path: str | Path, *, test: float = 0.2, size: int | tuple[int, int] | None = None, name: str | None = None
) -> Data:
    """Read images from one folder per class, path/<class>/**/*, in any format that Pillow supports.

    The classes are the folder names in alphabetical order, as listed in `data.task.names`. Files with other suffixes
    are skipped with a warning.

    Args:
        path: The folder.
        test: Fraction of the images to use as the test set.
        size: Height and width in pixels to which all images are resized. None if all images already have the same size.
        name: Name of the data set; None: the folder's name.

    Returns:
        The data set, for `flexfleet.run(dataset=...)`.

    Raises:
        DataError: A class folder does not contain images, an image cannot be read, or the image sizes differ.
        EnvironmentFailure: Pillow is not installed.

    Examples:
        >>> data = flexfleet.from_folder("photos", size=32)
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentFailure("Pillow is not installed: pip install pillow") from error
    root = path_of(path)
    folders = sorted(each for each in root.iterdir() if each.is_dir()) if root.is_dir() else []
    folders = [each for each in folders if not each.name.startswith(".")]
    if not folders:
        raise DataError(f"{root} must have one folder for each class, such as {root}/<class>/*.png")
    suffixes = {suffix for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN}
    images: list[Array] = []
    labels: list[int] = []
    skipped: list[Path] = []
    for label, folder in enumerate(folders):
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
            if hidden or file.suffix.lower() not in suffixes:
                skipped.append(file)
                continue
            try:
                with Image.open(file) as opened:
                    images.append(pixels(opened, str(file), None if size is None else _pair(size)))
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                raise DataError(f"{file} cannot be read as an image: {error}") from error
            labels.append(label)
        if label not in labels:
            raise DataError(f"{folder} has no image. Remove the folder, or add images")
    if skipped:
        log.warning("%s: skipped %d files that are not images, such as %s", root, len(skipped), skipped[0])
    if any(each.ndim == 3 for each in images):  # if some images have colors, grayscale images get three equal channels
        images = [each if each.ndim == 3 else np.repeat(each[None], 3, axis=0) for each in images]
    if len(shapes := {each.shape[-2:] for each in images}) > 1:
        found = sorted(shapes)[:3]
        raise DataError(f"{root}: all images must have the same size, got {found}. Set size=(height, width)")
    data = from_arrays(np.stack(images), np.array(labels), test=test, name=name or root.resolve().name)
    return replace(data, task=Classification(len(folders), names=tuple(each.name for each in folders)))


def from_torch(
    train: Any,
    test: Any = 0.2,
    *,
    task: str | Task | None = None,
    name: str | None = None,
    folder: str | Path | None = None,
) -> Data:
    """Create a data set from a torch `Dataset` of pairs (sample, target). Each pair is read once.

    Args:
        train: The data set.
        test: The test data set, or the fraction of `train` to use as the test set.
        task: As in `from_arrays`, for example `segmentation` for targets (H, W).
        name: Name of the data set; None: the name of its class.
        folder: Folder in which the samples are written to memory-mapped files, for a data set that does not fit into
            memory. `test` must then be a data set, and images should be uint8 (`PILToTensor`). None: keep in memory.

    Returns:
        The data set, for `flexfleet.run(dataset=...)`.

    Raises:
        DataError: An item is not a pair (sample, target), or the transform of the data set is random. For random
            augmentation, use `training.augment`.

    Examples:
        >>> data = flexfleet.from_torch(torchvision.datasets.MNIST(root, transform=ToTensor()))
    """
    if folder is not None and isinstance(test, float | int):
        raise DataError(f"with folder={str(folder)!r}, test must be a Dataset, got the fraction {test}")
    x, y = _read_items(train, "train", folder)
    part = test if isinstance(test, float | int) else _read_items(test, "test", folder)
    return from_arrays(x, y, test=part, task=task, name=name or type(train).__name__)


def from_huggingface(
    train: Any,
    test: Any = 0.2,
    *,
    image: str = "image",
    label: str = "label",
    client: str | None = None,
    task: str | Task | None = None,
    name: str | None = None,
) -> Data:
    """Create a data set from a Hugging Face `datasets.Dataset`.

    Args:
        train: The data set.
        test: The test data set, or the fraction of `train` to use as the test set.
        image: Name of the column with images or lists of numbers.
        label: Column with labels.
        client: Column with the client that owns each sample. A run has these clients unless it sets `partition_rule`.
        task: As in `from_arrays`.
        name: Name of the data set; None: its Hugging Face name.

    Returns:
        The data set, for `flexfleet.run(dataset=...)`.

    Raises:
        DataError: A column does not exist, or the samples differ in shape.

    Examples:
        >>> data = flexfleet.from_huggingface(datasets.load_dataset("mnist")["train"])
    """
    x, y = _column(train, image), _column(train, label)
    owners = None if client is None else _column(train, client)
    part = test if isinstance(test, float | int) else (_column(test, image), _column(test, label))
    known = getattr(getattr(train, "info", None), "dataset_name", None) or "huggingface"
    return from_arrays(x, y, test=part, clients=owners, task=task, name=name or str(known))


def _pair(size: Any) -> tuple[int, int]:
    pair = (size, size) if isinstance(size, int) else size
    if not isinstance(pair, tuple | list) or [type(side) for side in pair] != [int, int] or min(pair) < 1:
        raise DataError(f"size must be at least 1 pixel, either an integer or (height, width), got {size!r}")
    return pair[0], pair[1]


def _read_items(items: Any, what: str, folder: str | Path | None = None) -> tuple[Array, Array]:
    """Return the samples and targets of a torch `Dataset`. If `folder` is given, the samples are written to a file."""
    path = None if folder is None else path_of(folder) / f"{what}_x.npy"
    xs, ys = list[Array](), list[Array]()
    with isolated(), nullcontext() if path is None else replacing(path) as out:
        before = drawn()
        for i, (x, y) in enumerate(_pairs(items, what)):
            x = array_of(x, f"{what}: sample {i}")
            ys.append(targets_of(y, f"{what}: target {i}"))
            if out is None:
                xs.append(x)
                continue
            if x.dtype != np.uint8:
                x = x.astype(np.int64 if x.dtype.kind in "iu" else np.float32)
            if not xs:
                xs.append(x)
                form = {"descr": x.dtype.str, "fortran_order": False, "shape": (len(items), *x.shape)}
                np.lib.format.write_array_header_1_0(out, form)
            if (found := (x.dtype, x.shape)) != (wanted := (xs[0].dtype, xs[0].shape)):
                raise DataError(
                    f"{what}: all samples must have the same type and shape {wanted}, got {found} (sample {i})"
                )
            out.write(x.tobytes())
        if drawn() != before:
            raise DataError(
                f"{what} draws random numbers in its transform. Remove the augmentation, and augment on "
                "the clients: options={'training.augment': [...]}"
            )
    if not ys:
        raise DataError(f"{what} must have at least one sample")
    try:
        return np.stack(xs) if path is None else np.load(path, mmap_mode="r"), np.stack(ys)
    except ValueError as error:
        raise DataError(f"{what}: all samples must have the same shape, and so must all targets: {error}") from error


def _pairs(items: Any, what: str) -> Iterator[tuple[Any, Any]]:
    try:
        for i in range(len(items)):
            x, y = items[i]
            yield x, y
    except (TypeError, ValueError, LookupError) as error:
        raise DataError(
            f"{what} must be a Dataset of pairs (x, y) that has a length, got {type(items).__name__} ({error})"
        ) from error


def _column(table: Any, wanted: str) -> list[Any]:
    names = list(getattr(table, "column_names", []))
    if wanted not in names:
        raise DataError(f"there is no column {wanted!r}. The columns are: {', '.join(map(str, names)) or 'none'}")
    return list(table[wanted])
