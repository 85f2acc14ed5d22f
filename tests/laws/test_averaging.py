"""The mean against a loop over single elements; what it leaves alone; what it refuses.

FlexFL Sec. III-E, for each element p: sum over the updates m that hold p of d_m * p_m, over the sum of their d_m.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.aggregation import averaging
from fl_engine.aggregation.averaging import StreamingMean
from fl_engine.aggregation.spool import Spool
from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, Axis, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.testing.tiny import assert_same_bits

law = settings(max_examples=40)

LAYOUT = ParamLayout(
    {"a": 4, "b": 3, "c": 2},
    {
        "one": Slot("first", (Axis("a"), Axis(None))),
        "two": Slot("second", (Axis("b"), Axis("a", 2))),
        "tied": Slot("second", (Axis("b", 3), Axis("b"))),
        "cube": Slot("third", (Axis("c"), Axis("b"), Axis("a"))),
        "gates": Slot("second", (Axis("a", copies=4), Axis("b"))),
        "window": Slot("third", (Axis("c"), Axis("b", 2, copies=3))),
        "joined": Slot("first", (Axis("c", copies=2), Axis("c", copies=2))),
        "free": Slot("third", (Axis(None),)),
    },
)
SHAPES = {"one": (4, 2), "two": (3, 8), "tied": (9, 3), "cube": (2, 3, 4), "free": (5,)}
SHAPES |= {"gates": (16, 3), "window": (2, 18), "joined": (4, 4)}
SHAPES = {name: SHAPES[name] for name in LAYOUT.slots}


@dataclass
class Update:
    payload: Params
    spec: SubmodelSpec
    weight: float


def old_model(seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def channels(spec: SubmodelSpec, group: str) -> list[int]:
    keep = dict(spec.keep).get(group, LAYOUT.groups[group])
    return list(range(keep)) if isinstance(keep, int) else list(keep)


def positions(spec: SubmodelSpec, name: str) -> list[tuple[int, ...]]:
    """Global positions of the elements of a sub-model's tensor, in its own row-major order."""
    slot, shape = LAYOUT.slots[name], SHAPES[name]
    axes = []
    for axis, size in zip(slot.axes, shape, strict=True):
        if axis.group is None:
            axes.append(list(range(size)))
        else:
            run = [c * axis.repeat + r for c in channels(spec, axis.group) for r in range(axis.repeat)]
            first = range(0, size, size // axis.copies)
            axes.append([start + entry for start in first for entry in run])
    return list(itertools.product(*axes))


def local_shape(spec: SubmodelSpec, name: str) -> tuple[int, ...]:
    slot, shape = LAYOUT.slots[name], SHAPES[name]
    pairs = zip(slot.axes, shape, strict=True)
    return tuple(n if a.group is None else len(channels(spec, a.group)) * a.repeat * a.copies for a, n in pairs)


def slow_mean(old: Params, updates: list[Update]) -> Params:
    """One element at a time, in exact fractions."""
    total = {name: np.full(SHAPES[name], Fraction(0)) for name in SHAPES}
    weight = {name: np.full(SHAPES[name], Fraction(0)) for name in SHAPES}
    for u in updates:
        for name, tensor in u.payload.items():
            for position, value in zip(positions(u.spec, name), tensor.flatten().tolist(), strict=True):
                total[name][position] += Fraction(u.weight) * Fraction(value)
                weight[name][position] += Fraction(u.weight)
    out = {}
    for name, tensor in old.items():
        out[name] = tensor.clone()
        for position in itertools.product(*map(range, SHAPES[name])):
            if weight[name][position] > 0:
                out[name][position] = float(total[name][position] / weight[name][position])
    return out


@st.composite
def updates(draw: st.DrawFn, weights: st.SearchStrategy[float]) -> Update:
    keep = {}
    for group, size in LAYOUT.groups.items():
        prefix, scattered = st.integers(1, size).map(range), st.sets(st.integers(0, size - 1), min_size=1)
        keep[group] = sorted(draw(prefix | scattered))
    blocks = draw(st.none() | st.sets(st.sampled_from(LAYOUT.blocks), min_size=1))
    spec = SubmodelSpec.of(keep, blocks)
    seed = draw(st.integers(0, 2**30))
    generator = torch.Generator().manual_seed(seed)
    payload = {}
    for name, slot in LAYOUT.slots.items():
        if LAYOUT.has_block(spec, slot.block) and draw(st.integers(0, 9)) > 0:
            payload[name] = torch.randn(local_shape(spec, name), generator=generator)
    return Update(payload, spec, draw(weights))


def mean_of(old: Params, given: list[Update]) -> Params:
    mean = StreamingMean(old, LAYOUT)
    for u in given:
        mean.add(u.payload, u.spec, u.weight)
    return mean.result()


counts = st.integers(1, 5000).map(float)
reals = st.floats(1e-3, 1e6)


@law
@given(given=st.lists(updates(counts | reals), min_size=10, max_size=10))
def test_mean_equals_loop_over_elements(given: list[Update]) -> None:
    old = old_model()
    found, expected = mean_of(old, given), slow_mean(old, given)
    assert list(found) == list(old)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32
        # One rounding to single precision, of a sum that is right to far more digits.
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-9, msg=name)
        held = torch.zeros(SHAPES[name], dtype=torch.bool)
        for u in given:
            for position in positions(u.spec, name) if name in u.payload else ():
                held[position] = True
        assert torch.equal(tensor[~held], old[name][~held]), "an element that nobody holds moved"


@law
@given(given=st.lists(updates(counts), min_size=2, max_size=8), data=st.data())
def test_the_order_of_updates_does_not_matter(given: list[Update], data: st.DataObject) -> None:
    old = {name: t.double() for name, t in old_model().items()}
    for u in given:
        u.payload = {name: t.double() for name, t in u.payload.items()}
    found, other = mean_of(old, given), mean_of(old, data.draw(st.permutations(given)))
    for name in old:
        torch.testing.assert_close(other[name], found[name], rtol=1e-14, atol=1e-14)


@law
@given(given=st.lists(updates(counts), min_size=1, max_size=10))
def test_identical_values_average_exactly(given: list[Update]) -> None:
    old = old_model(seed=3)
    for u in given:
        for name in u.payload:
            values = [float(old[name][position]) for position in positions(u.spec, name)]
            u.payload[name] = torch.tensor(values).view(local_shape(u.spec, name))
    assert_same_bits(mean_of(old, given), old)


def test_by_hand() -> None:
    """Three clients, one tensor of four values: (1 * 10 + 3 * 30) / 4, 30, the old one, 7."""
    layout = ParamLayout({"g": 4}, {"w": Slot("b", (Axis("g"),))})
    mean = StreamingMean({"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}, layout)
    mean.add({"w": torch.tensor([10.0])}, SubmodelSpec.of({"g": 1}), 1)
    mean.add({"w": torch.tensor([30.0, 30.0])}, SubmodelSpec.of({"g": 2}), 3)
    mean.add({"w": torch.tensor([7.0])}, SubmodelSpec.of({"g": [3]}), 2)
    assert mean.result()["w"].tolist() == [25.0, 30.0, 3.0, 7.0]


@pytest.mark.parametrize("held_bytes", [0, 2**30], ids=["in a file", "in memory"])
@pytest.mark.parametrize("rows_bytes", [1, 48, 2**22])
def test_neither_a_spool_nor_parts_of_tensors_change_a_bit(
    held_bytes: int, rows_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = [Update(old_model(1), FULL, 3.0), Update(GOOD, HALF, 5.0), Update(old_model(2), FULL, 0.5)]
    expected = mean_of(old_model(), updates)
    monkeypatch.setattr(averaging, "ROWS_BYTES", rows_bytes)
    spool, mean = Spool(held_bytes), StreamingMean(old_model(), LAYOUT)
    for update in updates:
        mean.add(spool.get(spool.put(update.payload)), update.spec, update.weight)
    assert_same_bits(mean.result(), expected)
    wrong = spool.get(spool.put(GOOD | {"free": torch.ones(4)}))
    with pytest.raises(ModelError, match="free"):
        StreamingMean(old_model(), LAYOUT).add(wrong, HALF, 1.0)


def test_many_updates_do_not_lose_the_small_ones() -> None:
    """In single precision the running sum would stop growing."""
    layout = ParamLayout({"g": 1}, {"w": Slot("b", (Axis("g"),))})
    mean = StreamingMean({"w": torch.zeros(1)}, layout)
    mean.add({"w": torch.tensor([1.0])}, FULL, 2.0**25)
    for _ in range(64):
        mean.add({"w": torch.tensor([0.0])}, FULL, 2.0**19)
    assert mean.result()["w"].tolist() == [0.5]


HALF = SubmodelSpec.of({"a": 2, "b": [0, 2]})
GOOD = {name: torch.ones(local_shape(HALF, name)) for name in SHAPES}

WRONG: dict[str, tuple[Params, SubmodelSpec, float, str]] = {
    "a shape too large": (GOOD | {"cube": torch.ones(2, 3, 2)}, HALF, 1.0, "cube"),
    "a shape too small": (GOOD | {"free": torch.ones(4)}, HALF, 1.0, "free"),
    "a shape that would broadcast": (GOOD | {"two": torch.ones(1, 1)}, HALF, 1.0, "two"),
    "a missing axis": (GOOD | {"cube": torch.ones(2)}, HALF, 1.0, "cube"),
    "the slice of another sub-model": (GOOD, SubmodelSpec.of({"a": 3}), 1.0, "shape"),
    "an unknown name": (GOOD | {"stray": torch.ones(1)}, HALF, 1.0, "stray"),
    "a dropped block's name": (GOOD, SubmodelSpec.of({"a": 2, "b": [0, 2]}, ["first"]), 1.0, "two"),
    "no weight": (GOOD, HALF, 0.0, "weight"),
    "a negative weight": (GOOD, HALF, -1.0, "weight"),
    "a weight that is no number": (GOOD, HALF, float("nan"), "weight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_and_nothing_has_been_added(case: str) -> None:
    payload, spec, weight, message = WRONG[case]
    clean, mean = StreamingMean(old_model(), LAYOUT), StreamingMean(old_model(), LAYOUT)
    for m in (clean, mean):
        m.add(old_model(1), FULL, 2)
    with pytest.raises(ModelError, match=message):
        mean.add(payload, spec, weight)
    for m in (clean, mean):
        m.add(GOOD, HALF, 5)
    assert_same_bits(mean.result(), clean.result())
