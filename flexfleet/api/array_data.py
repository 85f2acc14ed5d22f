"""Create data sets from the user's arrays. `library_data` reads image folders and data sets of other libraries.

How samples are interpreted:

    uint8 (N, H, W)            grayscale images: a channel is added
    (N, H, W, C), C 1, 3 or 4  images with channels last, unless H is 1, 3 or 4; channels are moved to the front
    uint8 (N, C, H, W)         images
    float images in [0, 1]     images, stored as uint8, if all values are multiples of 1/255
    other floats (N, ...)      numeric data: vectors, time series, maps
    integers (N, ...)          token IDs from 0 if the network takes tokens, otherwise numeric data
    booleans (N, ...)          numeric data: 0 and 1
    a DataFrame                numeric data, one feature for each column

`mean` and `std` normalize each channel of images and maps, or each feature of other data. By default they are computed
from the training samples. `target_data` describes targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data, are_bytes, need_no_mask, rows_of_chunk
from fl_engine.core.task import Task
from fl_engine.data.transforms import byte_statistics, moments, stratified
from fl_engine.tasks import Classification
from flexfleet.api.target_data import with_task

Array = NDArray[Any]
Pair = tuple[Array, Array]
Numbers = Sequence[float] | None
CHANNELS = (1, 3, 4)


def from_arrays(
    x: Any,
    y: Any,
    *,
    test: float | tuple[Any, Any] = 0.2,
    clients: Any = None,
    task: str | Task | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "arrays",
) -> Data:
    """Create a data set from arrays or tensors.

    Args:
        x: Samples (N, ...), as an array, a tensor, a list or a DataFrame. If `test` is (x, y), a `numpy.memmap`
            of uint8 images (N, C, H, W), float32 or int64 is not copied, so its file must not change.
        y: Targets. `task` describes their form for each task.
        test: Fraction of each class to use as test samples, drawn with a constant seed, or a test set (x, y).
        clients: Client that owns each sample, shape (N,). A run has these clients unless it sets `partition_rule`.
        task: A task from `fl_engine.tasks`, or its name. Targets of `classification` are integers 0, 1, ... (N,) or
            class names (N,), of `regression` numbers (N,) or (N, outputs), of `multilabel` zeros and ones (N, labels),
            and of `segmentation` classes of pixels (N, H, W), where 255 is ignored. None selects `classification` for
            integers, booleans and text, and `regression` for floats.
        mean: One value for each channel or feature. If None, it is computed from the training samples.
        std: Like `mean`.
        name: Name of the data set.

    Returns:
        The data set, for `flexfleet.run(dataset=...)`.

    Raises:
        DataError: The arrays are not valid samples and targets, or their lengths differ. Also raised if `task` is None
            and the targets fit several tasks, for example a matrix of zeros and ones.

    Examples:
        >>> data = flexfleet.from_arrays(x, y, test=(test_x, test_y))
    """
    x, y = _arrays(x, y, name)
    owners = None if clients is None else _owners(clients, len(x), name)
    if isinstance(test, tuple):
        test_x, test_y = _test_set(test, name)
        goal, (y, test_y) = with_task(task, [y, test_y], name)
        x = x if isinstance(x, np.memmap) else x.copy()
        return _data(goal, (x, y), (test_x, test_y), owners, mean, std, name)
    goal, (y,) = with_task(task, [y], name)
    if not 1 <= (count := round(_share(test, name) * len(y))) < len(y):
        raise DataError(f"{name}: test = {test} of {len(y)} samples leaves one part empty. Choose another fraction")
    held = _test_positions(goal, y, count)
    train = np.setdiff1d(np.arange(len(x)), held)
    owners = None if owners is None else owners[train]
    return _data(goal, (x[train], y[train]), (x[held], y[held]), owners, mean, std, name)


def from_clients(
    parts: Iterable[tuple[Any, ...]],
    *,
    test: float | tuple[Any, Any] = 0.2,
    task: str | Task | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "clients",
) -> Data:
    """Create a data set from the samples and targets of each client. A run has the same clients unless it sets
    `partition_rule`.

    Args:
        parts: Tuple (x, y) or (x, y, test_x, test_y) for each client, with arrays as in `from_arrays`. The test samples
            of all clients form one test set. With `evaluate.on=clients`, each client evaluates on its own test samples.
        test: Fraction of each client's samples to use as test samples (at least one sample is left for training), or a
            test set (x, y). The fraction is ignored for clients that have test samples.
        task: As in `from_arrays`.
        mean: As in `from_arrays`.
        std: As in `from_arrays`.
        name: Name of the data set.

    Returns:
        The data set, for `flexfleet.run(dataset=...)`.

    Raises:
        DataError: As in `from_arrays`. Also raised if the samples of the clients differ in shape or type.

    Examples:
        >>> data = flexfleet.from_clients([(x0, y0), (x1, y1)])
    """
    if not isinstance(parts, Iterable):
        raise DataError(f"{name}: expected (x, y) or (x, y, test_x, test_y) for each client, got {parts!r}")
    pairs, tests = [], {}
    for i, part in enumerate(parts):
        what = f"{name}: client {i}"
        match tuple(part) if isinstance(part, tuple | list) else part:
            case (x, y):
                pairs.append(_arrays(x, y, what))
            case (x, y, test_x, test_y):
                pairs.append(_arrays(x, y, what))
                tests[i] = _arrays(test_x, test_y, f"{what}: test")
            case _:
                raise DataError(f"{what} must be (x, y) or (x, y, test_x, test_y)")
        if not len(pairs[i][0]):
            raise DataError(f"{what} must have at least one sample")
        for x, y in (pairs[i], *([tests[i]] if i in tests else [])):
            wanted, found = ((a.dtype, a.shape[1:], b.dtype.kind, b.shape[1:]) for a, b in (pairs[0], (x, y)))
            if found != wanted:
                raise DataError(
                    f"{what}: the samples and targets of all clients must have the same shape and type, expected "
                    f"{wanted} (client 0), got {found}"
                )
    if not pairs:
        raise DataError(f"{name}: expected (x, y) or (x, y, test_x, test_y) for each client, got no client")
    common = [_test_set(test, name)] if isinstance(test, tuple) else []
    if common and tests:
        raise DataError(f"{name}: test must be a fraction, because client {min(tests)} has its own test samples")
    goal, ys = with_task(task, [y for _, y in (*pairs, *tests.values(), *common)], name)
    pairs = [(x, y) for (x, _), y in zip(pairs, ys, strict=False)]
    tested = [(x, y) for (x, _), y in zip((*tests.values(), *common), ys[len(pairs) :], strict=True)]
    tests = dict(zip(tests, tested, strict=False))
    if not common and len(tests) < len(pairs):
        share = _share(test, name)
        for i, (x, y) in enumerate(pairs):
            if i not in tests:
                held = _test_positions(goal, y, min(round(share * len(y)), len(y) - 1))
                tests[i] = x[held], y[held]
                pairs[i] = np.delete(x, held, axis=0), np.delete(y, held, axis=0)
        tested = [tests[i] for i in range(len(pairs))]
    train, test = ((np.concatenate([x for x, _ in of]), np.concatenate([y for _, y in of])) for of in (pairs, tested))
    owners, test_owners = (np.repeat(np.arange(len(of)), [len(each) for each, _ in of]) for of in (pairs, tested))
    data = _data(goal, train, test, owners, mean, std, name)
    return data if common else replace(data, natural_test_client=torch.from_numpy(test_owners))


def _arrays(x: Any, y: Any, what: str) -> Pair:
    x, y = array_of(x, f"{what}: x"), targets_of(y, f"{what}: y")
    if x.ndim < 1 or y.ndim < 1 or len(x) != len(y):
        raise DataError(f"{what}: expected one target for each sample, got the shapes {x.shape} (x) and {y.shape} (y)")
    return x, y


def _test_set(test: tuple[Any, ...], name: str) -> Pair:
    if len(test) != 2:
        raise DataError(f"{name}: test must be a fraction or a pair (x, y), got {len(test)} values")
    return _arrays(test[0], test[1], f"{name}: test")


def _data(task: Task, train: Pair, test: Pair, owners: Array | None, mean: Numbers, std: Numbers, name: str) -> Data:
    numbers = mean is not None or std is not None
    x, test_x = _samples(train[0], numbers), _samples(test[0], numbers)
    if not numbers:
        mean, std = _measured(x)
    mean, std = (() if each is None else each for each in (mean, std))
    return Data(name, task, x, train[1], test_x, test[1], mean, std, owners)  # type: ignore[arg-type]


def _owners(clients: Any, samples: int, name: str) -> Array:
    try:
        owners = np.asarray(_without_tensors(clients, f"{name}: clients"))
        if owners.shape == (samples,) and not (owners.dtype.kind == "f" and np.isnan(owners).any()):
            return np.unique(owners, return_inverse=True)[1]
    except (TypeError, ValueError):  # `unique` cannot sort a mix of strings and None
        pass
    raise DataError(f"{name}: clients must be {samples} numbers or strings, one for each sample, without None or NaN")


def _share(test: Any, name: str) -> float:
    if not isinstance(test, float) or not 0 < test < 1:
        raise DataError(f"{name}: test must be a fraction between 0 and 1, or a test set (x, y), got {test!r}")
    return test


def _test_positions(task: Task, y: Array, count: int) -> Array:
    """Draw `count` test samples with equal fractions of all classes, and return their indices in ascending order."""
    labels = y if isinstance(task, Classification) and y.ndim == 1 else np.zeros(len(y), dtype=np.int64)
    return stratified(labels.astype(np.int64), count, seeds.rng(0, "own/test"))


def _samples(x: Array, numbers: bool) -> Array:
    """Convert samples as described at the top of this file. If `numbers` is True, integers are numeric data, not
    tokens. `Data` checks the samples."""
    if x.ndim == 4 and x.shape[3] in CHANNELS and x.shape[1] not in CHANNELS:
        x = np.moveaxis(x, 3, 1)
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return x[:, None] if x.ndim == 3 else x
    if x.dtype.kind in "iu" and x.ndim != 4 and not numbers and x.min(initial=0) >= 0:
        return x.astype(np.int64)
    if x.dtype.kind in "iu" and x.ndim == 4:
        return x
    with np.errstate(over="ignore"):  # `Data` rejects numbers that are too large
        x = np.require(x, np.float32, "C")
    in_0_1 = x.ndim == 4 and x.size and x.min() >= 0 and x.max() <= 1  # False for NaN
    if not in_0_1 or not are_bytes(torch.from_numpy(x)):
        return x
    images = np.empty(x.shape, dtype=np.uint8)
    step = rows_of_chunk(x.shape)
    for at in range(0, len(x), step):  # multiplying the whole array at once would allocate a copy of it
        images[at : at + step] = np.rint(x[at : at + step] * 255)
    return images


def _measured(x: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if x.dtype == np.uint8 and x.ndim == 4:
        return byte_statistics(x)
    if x.dtype.kind != "f" or x.ndim < 2 or not np.isfinite([x.min(), x.max()]).all():  # `Data` rejects such samples
        return (), ()
    mean, std = moments(x, 1 if x.ndim == 4 else -1)
    return mean, tuple(each or 1.0 for each in std)


def array_of(value: Any, what: str) -> Array:
    """Convert an array, a tensor, a DataFrame, a Pillow image, or a list of them to one NumPy array of numbers or
    booleans. Raises DataError."""
    found = _array(value, what)
    if found.dtype.kind not in "iufb":
        raise DataError(f"{what} must be numbers, got {f'an array of {found.dtype}' if found.ndim else type(value)}")
    return found


def targets_of(y: Any, what: str) -> Array:
    """Convert targets like `array_of`, but also support strings. Integers become int64, because NumPy would convert
    a mix of int64 and uint64 to floats. For a Pillow image with a palette, the palette indices are the targets."""
    if hasattr(y, "iloc") and y.shape[1:] == (1,):  # y is a DataFrame with one column
        y = y.iloc[:, 0]
    palettes = [np.asarray(each) for each in (y if isinstance(y, list | tuple) else [y]) if hasattr(each, "getbands")]
    found = _array((palettes if isinstance(y, list | tuple) else palettes[0]) if palettes else y, what)
    if found.dtype == object and all(isinstance(each, str) for each in found.ravel()):
        found = found.astype(str)
    if found.dtype.kind not in "iufbU":
        other = next((each for each in found.ravel() if not isinstance(each, str)), found)
        raise DataError(f"{what} must be numbers or strings, got an array of {found.dtype}, such as {other!r}")
    return found.astype(np.int64) if found.dtype.kind in "iu" else found


def _array(value: Any, what: str) -> Array:
    if isinstance(value, np.memmap):
        return value
    try:
        found = np.asarray(_without_tensors(value, what))
        return _columns(value, what) if found.dtype == object and {"columns", "iloc"} <= set(dir(value)) else found
    except (TypeError, ValueError, RuntimeError) as error:  # raised for unequal shapes and for sparse tensors
        raise DataError(f"{what} cannot be converted to one array: {error}") from error


def _columns(frame: Any, what: str) -> Array:
    """Convert a pandas DataFrame with columns of different types to one array. Missing numbers become NaN."""
    columns = []
    for name, column in frame.items():
        if column.dtype.kind not in "iufb":
            raise DataError(
                f"{what}: the column {name!r} must be numbers or booleans, got {column.dtype}. Remove the column, or "
                "encode it: pandas.get_dummies(x)"
            )
        columns.append(column.to_numpy(np.float64, na_value=np.nan) if column.hasnans else column.to_numpy())
    return np.column_stack(columns)


def pixels(image: Any, what: str, size: tuple[int, int] | None = None) -> Array:
    """Return a Pillow image as uint8, with shape (H, W) for grayscale or black-and-white images, else (3, H, W)."""
    if image.mode.startswith(("I", "F")):
        raise DataError(
            f"{what} must have at most 8 bits per pixel, got mode {image.mode}. Pass the pixels to from_arrays as "
            "floats in [0, 1]: numpy.asarray(image) / 65535 for 16 bits"
        )
    image = image.convert("L" if image.mode in ("1", "L") else "RGB")
    if size is not None:
        image = image.resize((size[1], size[0]))
    found = np.array(image, dtype=np.uint8)
    return found if found.ndim == 2 else np.moveaxis(found, 2, 0)


def _without_tensors(value: Any, what: str) -> Any:
    """Convert tensors and Pillow images, including those in a list, to arrays."""
    if isinstance(value, list | tuple):
        return [each if isinstance(each, list | tuple) else _without_tensors(each, what) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    need_no_mask(value, what)
    return pixels(value, what) if hasattr(value, "getbands") else value
