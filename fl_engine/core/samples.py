"""Data sets: samples, targets and normalisation. The values of a memory-mapped array stay in its file."""

from __future__ import annotations

import copy
import math
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_engine.core.errors import DataError
from fl_engine.core.task import Task, check_metric_name

IMAGE_AXES = 4
"""Number of axes of images, (N, C, H, W)."""
BYTE = 255
NEAR = 1e-3
"""Maximum distance of 255 * x from a whole number. The rounding errors of float32 are much smaller."""
CHUNK = 2**18
"""Number of values that are checked or summed at once, which limits the memory for intermediate results."""
NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE: without it, Linux refuses to map a file that is larger than the memory."""
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}


def rows_of_chunk(shape: Sequence[int]) -> int:
    """Return the number of samples of an array (N, ...) that together have about `CHUNK` values, at least 1."""
    return max(1, CHUNK // max(1, math.prod(shape[1:])))


def need_no_mask(value: object, what: str) -> None:
    """Raise DataError if an array has masked values."""
    if isinstance(value, np.ma.MaskedArray) and (masked := int(np.sum(value.mask))):
        raise DataError(f"{what} must not have masked values, got {masked}. Replace them with x.filled(...)")


def are_bytes(x: Tensor) -> bool:
    """Return whether all values of x are multiples of 1/255. The values must be in [0, 1]."""
    scaled = (part * BYTE for part in torch.split(x, rows_of_chunk(x.shape)))
    return all(bool((part.round() - part).abs().max() <= NEAR) for part in scaled)


class FileSection(NamedTuple):
    """The part of a file that contains the values of a tensor, in C order and native byte order."""

    path: str
    dtype: str
    offset: int
    shape: tuple[int, ...]

    @staticmethod
    def of(array: np.memmap[Any, Any]) -> FileSection | None:
        """Return the section that contains the values of `array`. Return None if the values may differ from the file
        (copy-on-write, mode "c"), are not in C order, or have an unsupported type."""
        base: Any = array
        while isinstance(base, np.ndarray):
            base = base.base
        if (
            not isinstance(base, mmap.mmap)
            or array.filename is None
            or array.mode == "c"
            or not (array.flags.c_contiguous and array.dtype.isnative and array.dtype.name in DTYPES)
        ):
            return None
        mapped = np.frombuffer(base, np.uint8)
        begins = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # offset of `mapped` in the file
        offset = begins + array.ctypes.data - mapped.ctypes.data
        return FileSection(str(array.filename), array.dtype.name, offset, array.shape)

    def map(self) -> Tensor:
        """Return the values as a tensor. Changes to the tensor are not written to the file."""
        with open(self.path, "rb") as file:
            flags, access = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            whole = mmap.mmap(file.fileno(), 0, flags=flags, prot=access)
        count = math.prod(self.shape)
        tensor = torch.frombuffer(whole, dtype=DTYPES[self.dtype], count=count, offset=self.offset).view(self.shape)
        tensor.file_section = self  # type: ignore[attr-defined]
        return tensor


def section_of(value: object) -> FileSection | None:
    """Return the section of a tensor that `FileSection.map` returned; None for other objects."""
    found: FileSection | None = getattr(value, "file_section", None)
    return found


def _tensor_of(value: object, what: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            raise DataError(f"{what} must be a dense tensor, got {value.layout}")
        return value if section_of(value) else value.detach()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise DataError(f"{what} must be a tensor or array of numbers, got {getattr(value, 'dtype', type(value))}")
    need_no_mask(value, what)
    if isinstance(value, np.memmap) and (section := FileSection.of(value)) is not None:
        return section.map()
    if value.dtype != np.uint8:
        with np.errstate(over="ignore"):  # infinite values are rejected later
            value = value.astype(np.float32 if value.dtype.kind == "f" else np.int64, copy=False)
    # torch supports neither negative strides nor read-only tensors.
    return torch.from_numpy(np.require(value, requirements=("C", "W")))


def _samples_of(value: object, what: str) -> Tensor:
    x = _tensor_of(value, what)
    if x.dim() < 2 or not x.numel():
        raise DataError(f"{what} must have at least one sample and two axes, (N, F), got the shape {tuple(x.shape)}")
    if x.dtype == torch.bool or x.is_complex():
        raise DataError(f"{what} must have an integer or floating-point dtype, got {x.dtype}")
    if x.is_floating_point():
        x = x.float()
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(x, rows_of_chunk(x.shape))):
            wrong = (~torch.isfinite(x)).flatten(1).any(1).nonzero().flatten()
            raise DataError(
                f"{what} must be finite, got NaN or infinity in {len(wrong)} samples (first: {int(wrong[0])})"
            )
        return x
    images = x.dim() == IMAGE_AXES
    if images != (x.dtype == torch.uint8):
        raise DataError(
            f"{what}: images must be uint8 (N, C, H, W), and other samples must not be uint8, got {x.dtype} "
            f"{tuple(x.shape)}. Convert images with x.to(torch.uint8). Add an axis to grey images with x[:, None]"
        )
    if images:
        return x
    x = x.long()
    if int(x.min()) < 0:
        raise DataError(f"{what}: tokens must not be negative, got {int(x.min())}. Convert measurements to floats")
    return x


def _numbers_of(value: object, what: str) -> tuple[float, ...]:
    try:
        numbers = tuple(float(n) for n in value)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{what} must have a finite number for each channel or feature, such as (0.5,), got {value!r}")
    return numbers


def _check_normalisation(name: str, x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    images = x.dtype == torch.uint8
    if x.dtype == torch.int64:
        if mean or std:
            raise DataError(f"{name}: mean and std must not be set, because tokens are not normalised")
        return
    features = x.shape[1] if x.dim() == IMAGE_AXES else x.shape[-1]
    for what, values in (("mean", mean), ("std", std)):
        if len(values) != features and (images or mean or std):
            raise DataError(f"{name}: {what} must have {features} values, one for each feature, got {len(values)}")
        if images and any(abs(value) > 1 for value in values):
            raise DataError(f"{name}: {what} of images must be at most 1, got {values}. Divide the values by 255")
    if any(value <= 0 for value in std):
        raise DataError(f"{name}: std must be greater than 0, got {min(std):g}. Remove constant features")
    if not images and not mean and x.dim() == IMAGE_AXES and float(x.min()) >= 0 and float(x.max()) <= 1:
        raise DataError(
            f"{name}: float samples of shape {tuple(x.shape[1:])} with values from 0 to 1 look like images. Set mean "
            "and std, or use uint8"
        )


@dataclass(frozen=True)
class Data:
    """A data set. NumPy arrays are converted to tensors. The task defines the targets.

    The values of a `numpy.memmap` stay in its file if they are uint8, float32 or int64, so a data set can be larger
    than the memory. The file must not change as long as the data set is used.

    Samples (N, ...) are of one of three kinds:

        images    uint8 (N, C, H, W). A network receives `(x / 255 - mean) / std`, normalised per channel.
        floats    vectors (N, F), series (N, T, F), maps (N, C, H, W), or others. A network receives `(x - mean) / std`
                  per feature (the last axis, or the channel of maps), or unchanged samples if mean and std are empty.
        tokens    non-negative integers of any shape. A network receives unchanged tokens. A run converts the
                  integers to floats if its network does not take tokens.

    Attributes:
        name: Name of the data set.
        task: Task that defines the targets, the loss and the metric.
        train_x: Training samples (N_train, ...). `test_x` has the same form.
        train_y: Training targets (N_train,) or (N_train, ...). `test_y` has the same form.
        mean: Mean of each channel or feature. `std` has the same form.
        natural_client: Source of each training sample, such as a writer or a user, for the natural partition.
        natural_test_client: Source of each test sample. With the natural partition, a client evaluates on the test
            samples of its sources. If None, each client holds out training samples.

    Raises:
        DataError: if samples are of an unsupported kind, are not finite, or do not fit the targets, `mean` or `std`.

    Examples:
        >>> Data("mine", Classification(10), train_x, train_y, test_x, test_y, mean=(0.5,), std=(0.25,))
    """

    name: str
    task: Task
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    natural_client: Tensor | None = None
    natural_test_client: Tensor | None = None

    def __post_init__(self) -> None:
        if isinstance(self.task, type) or not isinstance(self.task, Task):
            raise DataError(f"{self.name}: task must be a task such as tasks.Regression(), got {self.task!r}")
        check_metric_name(self.task, self.task.metric.name)
        if not self.task.metric.higher_is_better:
            raise DataError(
                f"{self.name}: the task's first metric must have higher_is_better=True, got {self.task.metric.name}"
            )
        checked: dict[str, Any] = {of: _numbers_of(getattr(self, of), f"{self.name}: {of}") for of in ("mean", "std")}
        for part in ("train", "test"):
            x = _samples_of(getattr(self, f"{part}_x"), f"{self.name}: {part}_x")
            y = _tensor_of(getattr(self, f"{part}_y"), f"{self.name}: {part}_y")
            if y.dim() == 0 or len(x) != len(y):
                raise DataError(f"{self.name}: {part}_y must have {len(x)} targets, got the shape {tuple(y.shape)}")
            checked |= {f"{part}_x": x, f"{part}_y": self.task.check(y, f"{self.name}: {part}_y")}
        train, test = checked["train_x"], checked["test_x"]
        if train.shape[1:] != test.shape[1:] or train.dtype != test.dtype:
            raise DataError(
                f"{self.name}: training and test samples must have the same dtype and shape, got {train.dtype} "
                f"{tuple(train.shape[1:])} and {test.dtype} {tuple(test.shape[1:])}"
            )
        _check_normalisation(self.name, train, checked["mean"], checked["std"])
        for what, x in (("natural_client", train), ("natural_test_client", test)):
            if getattr(self, what) is not None:
                sources = _tensor_of(getattr(self, what), f"{self.name}: {what}")
                if sources.is_floating_point() or sources.shape != (len(x),):
                    form = f"{sources.dtype} {tuple(sources.shape)}"
                    raise DataError(f"{self.name}: {what} must contain {len(x)} integers, got {form}")
                checked[what] = sources.long()
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the file sections of memory-mapped samples instead of their values."""
        return {name: section_of(value) or value for name, value in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({n: value.map() if isinstance(value, FileSection) else value for n, value in state.items()})

    def __repr__(self) -> str:
        return (
            f"<Data {self.name}: {len(self.train_x)} training and {len(self.test_x)} test samples, "
            f"{self.train_x.dtype} {self.input_shape}, {self.task}>"
        )

    def part(self, train: Tensor, test: Tensor) -> Data:
        """Return a data set that uses the training samples at the indices `train` for training and those at `test` for
        testing. The result is not checked, because a small part may be invalid, e.g. have no boxes."""
        found, x, y = copy.copy(self), self.train_x[train], self.train_y[train]
        test_x, test_y = (x, y) if test is train else (self.train_x[test], self.train_y[test])
        vars(found).update(train_x=x, train_y=y, test_x=test_x, test_y=test_y)
        vars(found).update(natural_client=None, natural_test_client=None)
        return found

    def tested_on(self, positions: Tensor) -> Data:
        """Return this data set with the training samples at `positions` as test samples."""
        found = copy.copy(self)
        vars(found).update(test_x=self.train_x[positions], test_y=self.train_y[positions], natural_test_client=None)
        return found

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the samples and targets at `positions`, which are either all in the training set or all in the test
        set. The test samples follow the training samples, so len(train_y) is the position of the first test sample."""
        first = len(self.train_y)
        if len(positions) and int(positions[0]) >= first:
            return self.test_x[positions - first], self.test_y[positions - first]
        return self.train_x[positions], self.train_y[positions]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train_x.shape[1:])

    @property
    def has_images(self) -> bool:
        return self.train_x.dtype == torch.uint8

    @property
    def has_tokens(self) -> bool:
        return self.train_x.dtype == torch.int64

    def normalise(self, x: Tensor) -> Tensor:
        """Return normalised samples (B, ...) as floats on the same device, or tokens unchanged."""
        if not self.mean:
            return x
        shape = (1, -1, 1, 1) if x.dim() == IMAGE_AXES else (*[1] * (x.dim() - 1), -1)
        mean = torch.tensor(self.mean, device=x.device).view(shape)
        std = torch.tensor(self.std, device=x.device).view(shape)
        # Compute in place, because intermediate results would double the memory of a client's samples.
        centred = x.float().div_(255).sub_(mean) if x.dtype == torch.uint8 else x - mean
        return centred.div_(std)


def batch_layout(x: Tensor) -> Tensor:
    """Return a batch in the memory layout that networks expect: channels last for maps, otherwise contiguous."""
    return x.contiguous(memory_format=torch.channels_last if x.dim() == IMAGE_AXES else torch.contiguous_format)


def outputs_of(out: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the outputs of all exits in network order. `out` is a tensor if the network does not have early exits."""
    return out if isinstance(out, tuple) else (out,)


def split(x: Tensor, batch_size: int, answer: Callable[[Tensor], object]) -> Sequence[Tensor]:
    """Split samples (N, ...) into batches for the function `answer`. If `answer` raises ValueError for a last batch of
    one sample, as batch norm without running statistics does, this batch is merged into the previous batch."""
    parts = torch.split(x, batch_size)
    if len(parts) == 1 or len(parts[-1]) > 1:
        return parts
    try:
        with torch.no_grad():
            answer(parts[-1])
    except ValueError:
        return (*parts[:-2], x[-batch_size - 1 :])
    return parts
