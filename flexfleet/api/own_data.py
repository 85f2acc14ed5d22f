"""Data of one's own, from arrays, folders, and the data sets of other libraries.

How samples are read:

    uint8 (N, H, W)            grey images: a channel is added
    (N, H, W, C), C 1, 3 or 4  images with the channel last, unless H is 1, 3 or 4: it is moved to the front
    float images in 0..1       made uint8 if all are k / 255 for whole k; others stay numbers, which are normalised
    uint8 (N, C, H, W)         images
    other floats (N, ...)      numbers: vectors, series, maps
    integers (N, ...)          tokens from 0 on

and targets: integers are classes 0..k-1 (k is the largest + 1), floats are numbers to predict (regression). `mean` and
`std` normalise per channel of images and maps, else per feature; those that are not given are measured on the training
samples. Whatever does not fit raises DataError.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.drawing import drawn
from fl_engine.core.errors import DataError, EnvironmentFailure
from fl_engine.core.samples import Data, Task, need_no_mask
from fl_engine.data.moments import byte_statistics, moments
from fl_engine.data.subsets import stratified
from fl_engine.tasks import Classification, Regression
from fl_engine.training.guest import guest

log = logging.getLogger("flexfleet")

Array = NDArray[Any]
CHANNELS = (1, 3, 4)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
DEEP = ("I", "F")
"""How the names of Pillow's modes of more than 8 bits begin: I, I;16, I;16B, F."""
PAIR = 2
FINE = 0.1
"""The largest step between neighbouring numbers of float32 that a feature keeps its values in, as a share of their
standard deviation."""
EQUAL_64 = 1e-12
"""A deviation of less than this share of the largest value is what arithmetic in float64 makes of equal values."""
NEAR = 1e-3
"""How far 255 times a float image may be from whole numbers: float32 holds k / 255 much closer."""


def from_arrays(
    x: Any,
    y: Any,
    *,
    test: float | tuple[Any, Any] = 0.2,
    clients: Any = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "arrays",
) -> Data:
    """Samples x (N, ...) and targets y (N,) or (N, outputs), NumPy arrays or tensors. `test`: the share of the samples
    to test on, of each class alike, drawn with a constant seed; or (x, y) of the test part. `clients` (N,): whose each
    sample is, for `partition_rule="natural"`. `mean` and `std`: a number for each channel or feature, by which samples
    are normalised; None: as measured on those to train on. Raises DataError for what are no samples and targets, or do
    not fit each other."""
    x, y = _array(x, f"{name}: x"), _targets(y, f"{name}: y")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise DataError(f"{name}: x has the shape {x.shape}, y {y.shape}; one target is needed for each sample")
    owner = None if clients is None else _owners(clients, len(x), name)
    _check_test(test, name)
    if isinstance(test, tuple):
        train, (test_x, test_y) = np.arange(len(x)), _test_part(test, name)
    else:
        train, held = _split(y, test, name)
        test_x, test_y = x[held], y[held]
    own = None if owner is None else owner[train]
    return _data(name, x[train], y[train], test_x, test_y, own, mean, std)


def from_clients(
    parts: Iterable[tuple[Any, Any]],
    *,
    test: float | tuple[Any, Any] = 0.2,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "clients",
) -> Data:
    """One (x, y) for each client, as in `from_arrays`: a natural partition (`partition_rule="natural"`). `test`: the
    share of each client's samples to test on, or (x, y) of a common test part. Raises DataError as `from_arrays` does,
    and where clients' samples or targets are not alike."""
    _check_test(test, name)
    pairs = [] if isinstance(parts, Mapping) or not isinstance(parts, Iterable) else list(parts)
    if any(not isinstance(pair, tuple | list) or len(pair) != PAIR for pair in pairs):
        raise DataError(f"{name}: one (x, y) for each client is expected")
    arrays = [
        (_array(x, f"{name}: x of client {i}"), _targets(y, f"{name}: y of client {i}"))
        for i, (x, y) in enumerate(pairs)
    ]
    if not arrays:
        raise DataError(f"{name}: no client has data; one (x, y) for each client is expected")
    kept: list[tuple[Array, Array]] = []
    held: list[tuple[Array, Array]] = []
    first_x, first_y = arrays[0]
    for i, (x, y) in enumerate(arrays):
        flat = x.ndim < 1 or y.ndim < 1 or len(x) != len(y)
        if flat or x.dtype != first_x.dtype or x.shape[1:] != first_x.shape[1:] or not _alike(y, first_y):
            raise DataError(
                f"{name}: client {i} has x {x.dtype} {x.shape} and y {y.dtype} {y.shape}, client 0 x {first_x.dtype} "
                f"{first_x.shape} and y {first_y.dtype} {first_y.shape}; all clients' samples and targets have to be "
                "alike, with a target for each sample"
            )
        if not len(x):
            raise DataError(f"{name}: client {i} has no sample: leave it out, the clients after it count one less")
        train, out = (np.arange(len(x)), np.arange(0)) if isinstance(test, tuple) else _split(y, test, f"{name}: {i}")
        kept.append((x[train], y[train]))
        held.append((x[out], y[out]))
    test_x, test_y = (
        _test_part(test, name)
        if isinstance(test, tuple)
        else (np.concatenate([pair[of] for pair in held]) for of in (0, 1))
    )
    owner = np.repeat(np.arange(len(kept)), [len(x) for x, _ in kept])
    x, y = (np.concatenate([pair[of] for pair in kept]) for of in (0, 1))
    return _data(name, x, y, test_x, test_y, owner, mean, std)


def from_folder(
    path: str | Path, *, test: float = 0.2, size: int | tuple[int, int] | None = None, name: str | None = None
) -> Data:
    """Images path/<class>/*.png (or jpg, bmp, webp); the classes are the folders' names in alphabetical order, without
    those that begin with a dot. `size`: height and width that all are scaled to; None: all have the same already.
    `name`: default the folder's. Raises DataError where there is no image, or their sizes differ; EnvironmentFailure
    without Pillow."""
    if not isinstance(path, str | Path):
        raise DataError(f"a folder is expected, got {path!r}")
    root, wanted = Path(path), None if size is None else _size(size)
    folders = (each.name for each in root.iterdir() if each.is_dir()) if root.is_dir() else ()
    classes = sorted(name for name in folders if not name.startswith("."))
    if not classes:
        raise DataError(f"{root}: a folder for each class is expected, {root}/<class>/*.png; there is none")
    image = _pillow()
    found: list[Array] = []
    labels: list[int] = []
    for label, word in enumerate(classes):
        files = sorted(file for file in (root / word).iterdir() if file.suffix.lower() in PICTURES)
        if not files:
            raise DataError(f"{root / word}: no image ({', '.join(PICTURES)}) is there; remove the folder or fill it")
        for file in files:
            found.append(_picture(image, file, wanted))
            labels.append(label)
    grey = all(each.ndim == 2 for each in found)
    found = [each if grey or each.ndim == 3 else np.repeat(each[None], 3, axis=0) for each in found]
    first = found[0].shape[-2:]
    if apart := next((each.shape[-2:] for each in found if each.shape[-2:] != first), None):
        raise DataError(f"{root}: images of {first[0]}x{first[1]} and {apart[0]}x{apart[1]}: give size=(height, width)")
    return from_arrays(np.stack(found), np.array(labels), test=test, name=root.resolve().name if name is None else name)


def from_torch(train: Any, test: Any = 0.2, *, name: str | None = None) -> Data:
    """From a torch `Dataset` of (sample, target), each of which is read once. `test`: another one, or a share. `name`:
    default that of its class.

    Augmentation belongs on the clients (`training.augment`): a data set whose transform draws random numbers is
    refused, since each sample would be the same draw in all rounds. That is seen where it draws from the generators of
    torch, NumPy or Python themselves, not where it has a generator of its own. Raises DataError for it too."""
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
    """From a `datasets.Dataset` with a column of images (or of lists of numbers) and one of labels; `client`: a column
    that says whose each sample is. `test`: another one, or a share. `name`: default its own."""
    x, y = _columns(train, image, label)
    owner = None if client is None else _column(train, client)
    known = str(getattr(getattr(train, "info", None), "dataset_name", None) or "huggingface")
    part = test if isinstance(test, float | int) else _columns(test, image, label)
    return from_arrays(x, y, test=part, clients=owner, name=known if name is None else name)


# ------------------------------------------------------------------------------------------------ putting together
def _data(
    name: str,
    x: Array,
    y: Array,
    test_x: Array,
    test_y: Array,
    owner: Array | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Data:
    task = _task(y, test_y, name)
    x, test_x = _channel_first(x), _channel_first(test_x)
    _tell_merged(x, name)
    x, test_x = _samples(x, name), _samples(test_x, name)
    if (mean is None) != (std is None):
        raise DataError(f"{name}: mean and std go together: give both, or neither, and they are measured")
    mean, std = (each.tolist() if isinstance(each, np.ndarray | torch.Tensor) else each for each in (mean, std))
    if not all(each is None or isinstance(each, Sequence) for each in (mean, std)):
        raise DataError(f"{name}: mean and std have a number for each channel or feature, [0.5]; got {mean!r}, {std!r}")
    if mean is None or std is None:
        mean, std = _measured(x, name)
    kinds = np.int64 if isinstance(task, Classification) else np.float32
    own = None if owner is None else torch.from_numpy(np.ascontiguousarray(owner, dtype=np.int64))
    with np.errstate(over="ignore"):  # what is too large is told by `Data`
        parts = {"train_x": x, "train_y": y.astype(kinds), "test_x": test_x, "test_y": test_y.astype(kinds)}
    tensors = {part: torch.from_numpy(np.ascontiguousarray(values)) for part, values in parts.items()}
    return Data(name, task, **tensors, mean=tuple(mean), std=tuple(std), natural_client=own)


def _readable(value: Any, what: str) -> Any:
    """What NumPy reads as it is meant: it reads no tensor with a gradient, and neither masks nor palettes."""
    if isinstance(value, list | tuple):
        return [_readable(each, what) if _is_read_here(each) else each for each in value]
    if _is_picture(value):
        return _pixels(value, what)
    if isinstance(value, torch.Tensor):
        try:
            return value.detach().cpu().numpy()
        except (TypeError, RuntimeError) as error:
            kind = f"{value.layout}, {value.dtype}".replace("torch.", "")
            raise DataError(f"{what}: a dense tensor of NumPy's types is expected, got one of {kind}") from error
    need_no_mask(value, what)
    return value


def _array(value: Any, what: str, targets: bool = False) -> Array:
    readable = _readable(value, what)
    try:
        found = np.asarray(readable)
    except ValueError as error:
        raise DataError(f"{what}: samples of different shapes cannot be one array: {error}") from error
    if found.dtype.kind not in "iufb":
        given = f"an array of {found.dtype}" if found.ndim else type(value).__name__
        words = targets and found.dtype.kind in ("USO" if found.ndim else "US")
        hint = ". Labels that are words: numpy.unique(y, return_inverse=True)[1]" if words else ""
        raise DataError(f"{what}: numbers are expected, got {given}{hint}")
    return found


def _targets(y: Any, what: str) -> Array:
    """What `_array` gives, with integers as int64, since NumPy joins int64 and uint64 to floats."""
    found = _array(y, what, targets=True)
    return _int64(found, what, "class", "classes") if found.dtype.kind in "iu" else found


def _int64(found: Array, what: str, one: str, several: str) -> Array:
    """Integers as int64, from which larger ones would come out negative."""
    if found.dtype.kind == "u" and found.size and found.max() > np.iinfo(np.int64).max:
        raise DataError(f"{what}: {found.max()} is no {one}: {several} are 0, 1, 2, ...")
    return found.astype(np.int64)


def _test_part(test: tuple[Any, Any], name: str) -> tuple[Array, Array]:
    x, y = test
    return _array(x, f"{name}: test"), _targets(y, f"{name}: test")


def _is_read_here(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ma.MaskedArray) or _is_picture(value)


def _check_test(test: Any, name: str) -> None:
    if isinstance(test, tuple) and len(test) != PAIR:
        raise DataError(f"{name}: test is a share, or (x, y) of the test part, got {len(test)} things")


def _alike(a: Array, b: Array) -> bool:
    """Whether targets are of one shape, and all integers or all floats."""
    kinds = ("i" if each.dtype.kind in "iu" else each.dtype.kind for each in (a, b))
    return len(set(kinds)) == 1 and a.shape[1:] == b.shape[1:]


def _owners(clients: Any, samples: int, name: str) -> Array:
    readable = _readable(clients, f"{name}: clients")
    try:
        listed = np.asarray(readable)
    except ValueError as error:
        raise DataError(f"{name}: clients says whose each of {samples} samples is, (N,): {error}") from error
    if listed.shape != (samples,):
        raise DataError(f"{name}: clients says whose each of {samples} samples is, (N,); got the shape {listed.shape}")
    try:
        missing = sum(map(_is_missing, listed.tolist()))
        owners = None if missing else np.unique(listed, return_inverse=True)[1]
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: clients are all numbers or all texts: {error}") from error
    if owners is None:
        raise DataError(f"{name}: clients: {missing} of {samples} samples have no client: leave them out, or name one")
    return owners


def _is_missing(value: Any) -> bool:
    """Whether it is None, or one of NaN, NaT and pandas' NA, which do not equal themselves."""
    try:
        return value is None or bool(value != value)
    except TypeError:  # NA has no truth value
        return True


def _split(y: Array, share: float, name: str) -> tuple[Array, Array]:
    """Ascending positions of the training and the test part, with the classes in equal shares."""
    count = round(share * len(y)) if isinstance(share, float | int) and math.isfinite(share) else 0
    if not 1 <= count < len(y):
        given = share if isinstance(share, float | int) else f"a {type(share).__name__}"
        raise DataError(
            f"{name}: test = {given} of {len(y)} samples leaves one part empty: give a share between 0 and 1, or "
            "(x, y) of the test part"
        )
    labels = y if y.ndim == 1 and y.dtype.kind in "iu" else np.zeros(len(y), dtype=np.int64)
    held = stratified(labels.astype(np.int64), count, seeds.rng(0, "own/test"))
    return np.setdiff1d(np.arange(len(y)), held), held


def _task(y: Array, test_y: Array, name: str) -> Task:
    if not len(y) or not len(test_y):
        raise DataError(f"{name}: {len(y)} training and {len(test_y)} test samples; both parts need at least one")
    if not _alike(y, test_y):
        raise DataError(
            f"{name}: training targets are {y.dtype} {y.shape}, those to test on {test_y.dtype} {test_y.shape}: both "
            "have to be integers (classes) or both floats (numbers to predict), of one shape"
        )
    if y.dtype.kind in "iu":
        largest = int(max(y.max(), test_y.max()))
        if largest < 1:
            raise DataError(f"{name}: all targets are {largest}: at least two classes, 0 and 1, are needed")
        seen = np.union1d(y, test_y)
        seen = seen[seen >= 0]
        if len(seen) <= largest:
            first = next(i for i, each in enumerate([*seen, None]) if i != each)
            log.warning(
                "%s: the classes are 0 to %d, the largest label, and class %d has no sample (%d classes have some). "
                "Where labels are other numbers than 0, 1, 2, ...: numpy.unique(y, return_inverse=True)[1]",
                name, largest, first, len(seen),
            )  # fmt: skip
        return Classification(largest + 1)
    if y.dtype.kind == "f":
        return Regression(1 if y.ndim == 1 else y.shape[1])
    raise DataError(
        f"{name}: targets are integers (classes) or floats (numbers to predict), got {y.dtype}: y.astype(int)"
    )


def _channel_first(x: Array) -> Array:
    last = x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS
    return np.moveaxis(x, 3, 1) if last else x


def _feature_axis(x: Array) -> int:
    """The axis that mean and std are per."""
    return 1 if x.ndim == 4 else -1


def _tell_merged(x: Array, name: str) -> None:
    """A warning where numbers of float64 lie so close together, for their size, that float32 makes many of them one."""
    if x.dtype.kind != "f" or x.dtype.itemsize <= 4 or x.ndim < 2 or not x.size:
        return
    others = tuple(i for i in range(x.ndim) if i != _feature_axis(x) % x.ndim)
    with np.errstate(over="ignore", invalid="ignore"):
        largest, std = np.abs(x).max(others), x.std(others)
        step = np.spacing(largest.astype(np.float32)).astype(np.float64)
        merged = np.flatnonzero((std > EQUAL_64 * largest) & (step > FINE * std))
    if len(merged):
        at = merged[0]
        log.warning(
            "%s: feature %d goes up to %g with a standard deviation of %g, and float32, in which networks compute, has "
            "only every %g there: it makes different values one (%d such features). Subtract their mean first, in "
            "float64: x - x.mean(axis=0)",
            name, at, largest[at], std[at], step[at], len(merged),
        )  # fmt: skip


def _samples(x: Array, name: str) -> Array:
    """Samples in the form that the head of this file says, with the channel in front."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim != 4:
        raise DataError(
            f"{name}: uint8 samples are images, (N, H, W), (N, C, H, W) or (N, H, W, C); got {x.shape}. Give "
            "measurements as floats, tokens as int64"
        )
    if x.dtype == np.bool_:
        raise DataError(f"{name}: samples are numbers, got bool: x.astype(numpy.float32)")
    if x.dtype.kind != "f":
        return x if x.dtype == np.uint8 else _int64(x, f"{name}: x", "token", "tokens")
    with np.errstate(over="ignore"):  # what is too large is told below
        x = x.astype(np.float32)
    if x.ndim == 4 and x.size and np.isfinite(x).all() and x.min() >= 0 and x.max() <= 1:
        whole = np.rint(x * 255)
        if np.abs(x * 255 - whole).max() <= NEAR:
            x = whole.astype(np.uint8)
    return x


def _measured(x: Array, name: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if x.dtype == np.uint8:
        return byte_statistics(x)
    if x.dtype.kind != "f":
        return (), ()
    if not np.isfinite(x).all():
        raise DataError(
            f"{name}: samples hold NaN or infinity, or more than float32 can hold: fill in or leave out what is "
            "missing, scale down what is too large"
        )
    mean, std = moments(x, _feature_axis(x))
    return mean, tuple(each or 1.0 for each in std)


# ------------------------------------------------------------------------------------------- other libraries' data
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


def _picture(image: Any, file: Path, size: tuple[int, int] | None) -> Array:
    try:
        with image.open(file) as opened:
            return _pixels(opened, str(file), size)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: this is no image that Pillow can read: {error}") from error


def _is_picture(value: Any) -> bool:
    """Whether it is an image of Pillow, which need not be installed."""
    return hasattr(value, "getbands")


def _pixels(picture: Any, what: str, size: tuple[int, int] | None = None) -> Array:
    """uint8 (H, W) of a grey or black and white image of Pillow, (3, H, W) of any other: of a palette its colours."""
    if picture.mode.startswith(DEEP):
        raise DataError(
            f"{what}: its pixels have more than 8 bits (mode {picture.mode}), which would be cut off: scale the images "
            "to 8 bits, or give the pixels to from_arrays as floats"
        )
    picture = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
    if size is not None:
        high, wide = size
        picture = picture.resize((wide, high))
    found = np.array(picture, dtype=np.uint8)
    return found if found.ndim == 2 else np.moveaxis(found, 2, 0)


def _read_items(given: Any, what: str) -> tuple[Array, Array]:
    try:
        count = len(given)
    except TypeError as error:
        raise DataError(
            f"{what}: a Dataset with a length is expected, got {type(given).__name__}; of an iterable one collect the "
            "samples and give them to from_arrays"
        ) from error
    xs: list[Array] = []
    ys: list[Array] = []
    with guest():
        before = drawn()
        for i in range(count):
            try:
                x, y = given[i]
            except (TypeError, ValueError) as error:
                raise DataError(f"{what}: item {i} is no (sample, target): {error}") from error
            xs.append(_array(x, f"{what}: item {i}"))
            ys.append(_targets(y, f"{what}: target {i}"))
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
    samples = [_array(each, f"{image}: row {i}") for i, each in enumerate(rows)]
    if len({each.shape for each in samples}) > 1:
        raise DataError(f"{image}: samples of different shapes; resize them first (given.map)")
    return np.stack(samples), _targets(labels, label)


def _column(given: Any, wanted: str) -> list[Any]:
    names = list(getattr(given, "column_names", []))
    if wanted not in names:
        raise DataError(f"no column {wanted!r}; there are {', '.join(map(str, names)) or 'none'}: say which it is")
    return list(given[wanted])
