"""`Data` checks its arguments, and normalises samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.step_memory import counted
from fl_engine.core.errors import DataError
from fl_engine.core.samples import Data
from fl_engine.core.task import Measured, Metric
from fl_engine.tasks import Classification, Regression
from fl_engine.training.evaluation import score

IMAGES = {
    "name": "made", "task": Classification(3), "train_x": torch.zeros(6, 1, 2, 2, dtype=torch.uint8),
    "train_y": torch.arange(6) % 3, "test_x": torch.zeros(3, 1, 2, 2, dtype=torch.uint8), "test_y": torch.arange(3),
    "mean": (0.5,), "std": (0.25,),
}  # fmt: skip
TABLE = {
    "name": "made", "task": Regression(), "train_x": torch.arange(12.0).view(6, 2), "train_y": torch.arange(6.0),
    "test_x": torch.arange(6.0).view(3, 2), "test_y": torch.arange(3.0),
}  # fmt: skip
TOKENS = {
    **IMAGES, "train_x": torch.arange(12).view(6, 2), "test_x": torch.arange(6).view(3, 2), "mean": (), "std": (),
}  # fmt: skip
HOLED = TABLE["train_x"].clone()  # type: ignore[attr-defined]
HOLED[4, 1] = float("nan")
MASKED = np.ma.masked_greater(TABLE["train_x"].numpy(), 9.0)  # type: ignore[attr-defined]


class ByError(Regression):
    """A task whose metric is an error."""

    metric: ClassVar[Metric] = Regression.error


class TakenName(Regression):
    metric: ClassVar[Metric] = Metric("loss")


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a number of classes": (IMAGES, {"task": 3}, "task"),
    "an error that decides": (TABLE, {"task": ByError()}, "metric"),
    "a metric's name that is taken": (TABLE, {"task": TakenName()}, "'loss'"),
    "a list of samples": (IMAGES, {"train_x": [[1, 2]]}, "train_x"),
    "objects": (TABLE, {"train_y": np.array([None] * 6)}, "train_y"),
    "grey without a channel": (IMAGES, {"train_x": torch.zeros(6, 2, 2, dtype=torch.uint8)}, "train_x"),
    "images of integers": (IMAGES, {"train_x": torch.zeros(6, 1, 2, 2, dtype=torch.int64)}, "train_x"),
    "images in 0..1": (
        TABLE, {"train_x": torch.rand(6, 1, 2, 2), "test_x": torch.rand(3, 1, 2, 2)}, "mean and std"
    ),
    "negative tokens": (TOKENS, {"train_x": torch.full((6, 2), -1)}, "train_x"),
    "NaN": (TABLE, {"train_x": HOLED}, "first: 4"),
    "masked": (TABLE, {"train_x": MASKED}, "masked values, got 2"),
    "beyond float32": (TABLE, {"train_x": np.full((6, 2), 1e300)}, "6 samples"),
    "no test samples": (IMAGES, {"test_x": IMAGES["test_x"][:0], "test_y": torch.ones(0).long()}, "test_x"),  # type: ignore[index]
    "other test images": (IMAGES, {"test_x": torch.zeros(3, 1, 4, 4, dtype=torch.uint8)}, "test samples"),
    "labels as fractions": (IMAGES, {"train_y": torch.full((6,), 0.5)}, "float32"),
    "one-hot labels": (IMAGES, {"train_y": torch.eye(6).long()}, "(6, 6)"),
    "a label too high": (IMAGES, {"train_y": torch.arange(6)}, "train_y"),
    "a label below 0": (IMAGES, {"test_y": torch.tensor([0, -1, 1])}, "test_y"),
    "two targets": (TABLE, {"train_y": torch.rand(6, 2)}, "(6, 2)"),
    "a target of NaN": (TABLE, {"train_y": HOLED[:, 1]}, "sample 4"),
    "equal targets": (TABLE, {"test_y": torch.ones(3)}, "test_y"),
    "a sparse tensor": (TABLE, {"test_x": torch.eye(3, 2).to_sparse()}, "test_x"),
    "a mean of NaN": (IMAGES, {"mean": (float("nan"),)}, "mean"),
    "no mean of images": (IMAGES, {"mean": ()}, "mean"),
    "a std in 0..255": (IMAGES, {"std": (63.0,)}, "std"),
    "std 0": (IMAGES, {"std": (0.0,)}, "std"),
    "a mean without std": (TABLE, {"mean": (0, 0)}, "std"),
    "too few writers": (IMAGES, {"natural_client": torch.arange(5)}, "natural_client"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_data_refuses_wrong_arguments_in_one_line(mistake: str) -> None:
    right, wrong, word = MISTAKES[mistake]
    Data(**right)
    with pytest.raises(DataError) as refused:
        Data(**{**right, **wrong})
    assert word in str(refused.value) and "\n" not in str(refused.value)


def test_numpy_arrays_become_tensors_of_the_same_values() -> None:
    for right in (IMAGES, TABLE, TOKENS):
        plain = Data(**right)  # type: ignore[arg-type]
        arrays = {k: v.numpy()[::-1] if isinstance(v, torch.Tensor) else v for k, v in right.items()}
        wide = {k: v.astype(np.float64) if k.endswith("x") and v.dtype == np.float32 else v for k, v in arrays.items()}  # type: ignore[union-attr]
        for found in (Data(**arrays), Data(**wide)):  # type: ignore[arg-type]
            for part in ("train_x", "train_y", "test_x", "test_y"):
                assert torch.equal(getattr(found, part), getattr(plain, part).flip(0)), part
                assert getattr(found, part).dtype == getattr(plain, part).dtype
    whole = np.ma.masked_greater(np.arange(12.0).reshape(6, 2), 12.0)
    assert torch.equal(Data(**{**TABLE, "train_x": whole}).train_x, TABLE["train_x"]), "nothing is masked"  # type: ignore[arg-type]
    frozen = np.arange(12.0).reshape(6, 2)
    frozen.setflags(write=False)
    assert Data(**{**TABLE, "train_x": frozen, "mean": np.zeros(2), "std": [1, 2]}).mean == (0.0, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.int8, torch.uint64])
def test_tokens_are_integers_of_any_size(kind: torch.dtype) -> None:
    given = {**TOKENS, **{f"{part}_x": TOKENS[f"{part}_x"].to(kind) for part in ("train", "test")}}  # type: ignore[union-attr]
    found = Data(**given)  # type: ignore[arg-type]
    assert found.train_x.dtype == torch.int64 and torch.equal(found.train_x, Data(**TOKENS).train_x)  # type: ignore[arg-type]


def test_part_of_a_data_set_is_not_checked_again() -> None:
    """A part may have equal targets or maps in 0..1, for which a whole data set is refused."""
    data = Data(**{**TABLE, "train_y": torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), "natural_client": torch.arange(6)})  # type: ignore[arg-type]
    part = data.part(torch.tensor([0, 2]), torch.tensor([4]))
    assert (part.train_x.tolist(), part.train_y.flatten().tolist()) == ([[0.0, 1.0], [4.0, 5.0]], [1.0, 1.0])
    assert (part.test_x.tolist(), part.test_y.flatten().tolist()) == ([[8.0, 9.0]], [2.0])
    assert part.natural_client is None and len(data.train_y) == 6 and (part.name, part.task) == (data.name, data.task)


def test_each_kind_is_normalised_in_its_own_way() -> None:
    pixels = torch.arange(24, dtype=torch.uint8).view(6, 1, 2, 2)
    data = Data(**{**IMAGES, "train_x": pixels})  # type: ignore[arg-type]
    assert torch.equal(data.normalise(pixels), (pixels.float() / 255 - 0.5) / 0.25)
    table = Data(**TABLE)  # type: ignore[arg-type]
    assert table.normalise(table.train_x) is table.train_x
    series = torch.arange(36.0).view(6, 3, 2)
    windows = Data(**{**TABLE, "train_x": series, "test_x": series[:3], "mean": (1, 2), "std": (1, 4)})  # type: ignore[arg-type]
    assert windows.normalise(series)[0].tolist() == [[-1.0, -0.25], [1.0, 0.25], [3.0, 0.75]], "per feature"
    tokens = Data(**TOKENS)  # type: ignore[arg-type]
    assert torch.equal(tokens.normalise(tokens.train_x), tokens.train_x)
    assert (tokens.input_shape, tokens.has_tokens, data.has_images) == ((2,), True, True)


class Measures(Regression):
    """A task whose `measure` gives these metrics."""

    names: ClassVar[tuple[str, ...]] = ()

    def measure(self, observed: Sequence[torch.Tensor]) -> Measured:
        return Measured(dict.fromkeys(self.names, 0.5))


@pytest.mark.parametrize("names", [("mae",), ("r2", "params"), ("r2", "a b")])
def test_metric_with_a_reserved_name_is_refused(names: tuple[str, ...]) -> None:
    data = Data(**{**TABLE, "task": type("Other", (Measures,), {"names": names})()})
    with pytest.raises(DataError, match="Other"):
        score(nn.Linear(2, 1), data, ensemble=False)


MEAN, STD = (0.1, 0.4, 0.9), (0.2, 0.3, 0.7)


@pytest.mark.parametrize("kind", ["images", "floats"])
def test_samples_are_normalised_in_one_copy_of_them(kind: str) -> None:
    """The samples do not change. A device normalises all its training samples at once."""
    raw = torch.randint(256, (50, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    x = raw if kind == "images" else 40 * raw.float()
    data = Data("x", Classification(2), x, torch.arange(50) % 2, x, torch.arange(50) % 2, MEAN, STD)
    with counted("cpu") as found:
        normalised = data.normalise(data.train_x)
    assert 4 * x.numel() <= found["peak"] < 4.1 * x.numel()
    given = raw.float() / 255 if kind == "images" else 40 * raw.float()
    assert torch.equal(normalised, (given - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1))
    assert torch.equal(data.train_x, raw if kind == "images" else 40 * raw.float())
