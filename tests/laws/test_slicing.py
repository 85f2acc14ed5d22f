"""`take` against a loop over single elements, and what follows from it: nesting, shapes, counts, errors."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import contains, entries, shapes, take
from fl_engine.core.types import FULL, Axis, Keep, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.core.widths import random_drop
from fl_engine.testing.kinds import TinyLSTM
from fl_engine.testing.models import ModelSuite
from fl_engine.testing.tiny import TinyNet, assert_same_bits

law = settings(max_examples=60)

# One of each: a free axis, a repeat or copies on either axis, both at once, a group twice in one tensor, a tensor with
# no group at all.
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
        "chain": Slot("third", (Axis("a", then=Axis(None, 2, then=Axis("b", 2, then=Axis("a")))), Axis("c"))),
    },
)
SHAPES = {"one": (4, 2), "two": (3, 8), "tied": (9, 3), "cube": (2, 3, 4), "free": (5,)}
SHAPES |= {"gates": (16, 3), "window": (2, 18), "joined": (4, 4), "chain": (16, 2)}
SHAPES = {name: SHAPES[name] for name in LAYOUT.slots}


def numbered() -> Params:
    start, out = 0, {}
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return out


def kept_channels(spec: SubmodelSpec, group: str) -> set[int]:
    keep = dict(spec.keep).get(group, LAYOUT.groups[group])
    return set(range(keep)) if isinstance(keep, int) else set(keep)


def channel_of(entry: int, axis: Axis) -> int:
    """Whose entry it is, by the definition: runs over all channels, and in them consecutive entries of one."""
    assert axis.group is not None and axis.then is None
    return entry % (LAYOUT.groups[axis.group] * axis.repeat) // axis.repeat


def part_of(entry: int, axis: Axis) -> tuple[int, Axis]:
    """The axis of a concatenation that an entry lies in, and where."""
    for part in axis.parts if axis.then is not None else ():
        size = part.repeat * part.copies * (1 if part.group is None else LAYOUT.groups[part.group])
        if entry < size:
            return entry, part
        entry -= size
    return entry, axis


def slow_take(params: Params, spec: SubmodelSpec) -> dict[str, list[float]]:
    """Visits every element of the full model and asks of each axis whether its channel is kept."""
    out = {}
    for name, slot in LAYOUT.slots.items():
        if spec.blocks is not None and slot.block not in spec.blocks:
            continue
        values = []
        for index in itertools.product(*map(range, SHAPES[name])):
            kept = (
                axis.group is None or channel_of(i, axis) in kept_channels(spec, axis.group)
                for i, axis in itertools.starmap(part_of, zip(index, slot.axes, strict=True))
            )
            if all(kept):
                values.append(float(params[name][index]))
        out[name] = values
    return out


@st.composite
def specs(draw: st.DrawFn, inside: SubmodelSpec = FULL) -> SubmodelSpec:
    keep = {}
    for group in LAYOUT.groups:
        channels = sorted(kept_channels(inside, group))
        if draw(st.booleans()):
            keep[group] = channels[: draw(st.integers(1, len(channels)))]
        else:
            keep[group] = sorted(draw(st.sets(st.sampled_from(channels), min_size=1)))
    blocks = [b for b in LAYOUT.blocks if inside.blocks is None or b in inside.blocks]
    kept = draw(st.sets(st.sampled_from(blocks))) if blocks else set()
    return SubmodelSpec.of(keep, kept if draw(st.booleans()) or inside.blocks is not None else None)


class TestTinyNet(ModelSuite):
    @pytest.fixture(params=[TinyNet(), TinyNet((2, 6, 4), 3, dropout=0.3, conv=5, hidden=9)], ids=["4x4", "6x4"])
    def family(self, request: pytest.FixtureRequest) -> ModelFamily:
        return request.param  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------------- take
@law
@given(spec=specs())
def test_take_keeps_exactly_the_elements_whose_channels_are_kept(spec: SubmodelSpec) -> None:
    found = take(numbered(), LAYOUT, spec)
    assert {name: t.flatten().tolist() for name, t in found.items()} == slow_take(numbered(), spec)


@law
@given(data=st.data())
def test_a_slice_of_a_slice_is_the_slice(data: st.DataObject) -> None:
    outer = data.draw(specs())
    inner = data.draw(specs(inside=outer))
    part = take(numbered(), LAYOUT, outer)
    assert_same_bits(take(part, LAYOUT, inner, have=outer), take(numbered(), LAYOUT, inner))


@law
@given(outer=specs(), inner=specs())
def test_contains_is_inclusion_of_channels_and_blocks(outer: SubmodelSpec, inner: SubmodelSpec) -> None:
    every = set(LAYOUT.blocks)
    channels = all(kept_channels(inner, g) <= kept_channels(outer, g) for g in LAYOUT.groups)
    blocks = (every if inner.blocks is None else set(inner.blocks)) <= (
        every if outer.blocks is None else set(outer.blocks)
    )
    assert contains(LAYOUT, outer, inner) == (channels and blocks)
    part = take(numbered(), LAYOUT, outer)
    if channels and blocks:
        assert_same_bits(take(part, LAYOUT, inner, have=outer), take(numbered(), LAYOUT, inner))
    else:
        with pytest.raises(ModelError):
            take(part, LAYOUT, inner, have=outer)


@law
@given(spec=specs())
def test_shapes_are_those_of_the_slice(spec: SubmodelSpec) -> None:
    full = {name: torch.Size(s) for name, s in SHAPES.items()}
    assert shapes(LAYOUT, spec, full) == {n: tuple(t.shape) for n, t in take(numbered(), LAYOUT, spec).items()}


def test_a_prefix_is_a_view_and_everything_else_a_copy() -> None:
    params = numbered()
    prefix = take(params, LAYOUT, SubmodelSpec.of({"a": 2, "b": 2}))
    prefix["two"].zero_()
    assert params["two"][:2, :4].abs().sum() == 0
    before = params["tied"].clone()
    take(params, LAYOUT, SubmodelSpec.of({"b": [0, 2]}))["tied"].zero_()
    assert torch.equal(params["tied"], before)


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("keep", [0, -1, [], [1, 1], [2, 1], [-1, 0]])
def test_nonsense_cannot_be_written_down(keep: int | list[int]) -> None:
    with pytest.raises(ModelError, match="'a'"):
        SubmodelSpec.of({"a": keep})


# --------------------------------------------------------------------------------------------------- specs
@law
@given(spec=specs())
def test_a_specification_survives_json(spec: SubmodelSpec) -> None:
    again = SubmodelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_one_sub_model_is_written_in_one_way() -> None:
    assert SubmodelSpec.of({"b": [0, 1, 2], "a": 2}) == SubmodelSpec.of({"a": range(2), "b": 3})
    assert SubmodelSpec.of({}, ["y", "x", "y"]) == SubmodelSpec.of({}, ("x", "y"))
    assert SubmodelSpec.of({"a": [1, 2]}) != SubmodelSpec.of({"a": 2})
    with pytest.raises(ModelError, match="keep"):
        SubmodelSpec.from_json({"kept": {}, "blocks": None})


def test_entries_by_hand() -> None:
    def listed(keep: Keep, axis: Axis, size: int) -> list[int]:
        found = entries(keep, axis, size)
        return found.tolist() if isinstance(found, torch.Tensor) else list(range(found.stop))

    assert listed((1, 3), Axis("g", 2), 8) == [2, 3, 6, 7]
    assert listed(2, Axis("g", 3), 12) == [0, 1, 2, 3, 4, 5]
    assert listed((0, 4), Axis("g"), 5) == [0, 4]
    assert listed(2, Axis("g", copies=3), 15) == [0, 1, 5, 6, 10, 11]
    assert listed((0, 2), Axis("g", 2, copies=2), 12) == [0, 1, 4, 5, 6, 7, 10, 11]
    assert isinstance(entries(5, Axis("g", copies=3), 15), slice), "all of it needs no copy"
    assert isinstance(entries(2, Axis("g", 3), 12), slice), "a prefix of a single run lies together"


# -------------------------------------------------------------------------------------------------- counts
def test_counts_by_hand() -> None:
    """Convolution 1 -> 8 at 4x4, then 2x2 maps; hidden 32; residual 32; 4 classes."""
    family = TinyNet()
    assert count_params(family) == (9 + 1) * 8 + (8 * 4 + 1) * 32 + (32 + 1) * 32 + (32 + 1) * 4
    assert count_macs(family) == 16 * 8 * 9 + 8 * 4 * 32 + 32 * 32 + 32 * 4
    small = SubmodelSpec.of({"conv": [1, 5], "hidden": [0, 7, 9]}, ["conv", "fc", "classifier"])
    assert count_params(family, small) == (9 + 1) * 2 + (2 * 4 + 1) * 3 + (3 + 1) * 4
    assert count_macs(family, small) == 16 * 2 * 9 + 2 * 4 * 3 + 3 * 4


def test_an_lstm_counts_each_matrix_once_a_step() -> None:
    family = TinyLSTM()
    for hidden in (12, 7):
        spec = SubmodelSpec.of({"lstm": hidden})
        assert count_macs(family, spec) == 5 * 4 * hidden * (2 + hidden) + 5 * hidden * 3
        assert count_params(family, spec) == 4 * hidden * (2 + hidden + 2) + 5 * hidden * 3 + 3


# ------------------------------------------------------------------------------------------------- choices of channels

RATIOS = st.fractions(Fraction(1, 20), 1, max_denominator=40)


def choice_channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


@law
@given(size=st.integers(1, 20), widths=st.tuples(RATIOS, RATIOS).map(sorted), seed=st.integers(0, 2**32))
def test_a_choice_draws_by_itself_as_many(size: int, widths: list[Fraction], seed: int) -> None:
    g, between = Axis("g"), Axis("g", choice="between")
    layout = ParamLayout({"g": size, "classes": 2}, {"a": Slot("a", (between, g)), "b": Slot("b", (g, between))})
    rng, (small, large) = np.random.default_rng(seed), (float(w) for w in widths)
    outer = random_drop(layout, large, rng)
    inner = random_drop(layout, small, rng, inside=outer)
    assert contains(layout, outer, inner)
    full = {name: torch.arange(size * size).view(size, size) for name in "ab"}
    for spec in (outer, inner):
        layout.check(spec)
        rows, columns = choice_channels(layout, spec, "between"), choice_channels(layout, spec, "g")
        assert len(rows) == len(columns)
        cut = take(full, layout, spec)
        assert cut["a"].tolist() == full["a"][rows][:, columns].tolist()
        assert cut["b"].tolist() == full["b"][columns][:, rows].tolist()
    again = take(take(full, layout, outer), layout, inner, have=outer)
    assert {name: t.tolist() for name, t in again.items()} == {name: t.tolist() for name, t in cut.items()}
    part = SubmodelSpec.of({"g": 1})
    assert choice_channels(layout, part, "between") == [0]
    assert contains(layout, FULL, part) and contains(layout, outer, part) == (
        0 in choice_channels(layout, outer, "g") and 0 in choice_channels(layout, outer, "between")
    )


def test_a_choice_of_another_size_is_an_error() -> None:
    layout = ParamLayout({"g": 4}, {"a": Slot("a", (Axis("g", choice="between"), Axis("g")))})
    with pytest.raises(ModelError, match="choice 'between'"):
        layout.check(SubmodelSpec.of({"between": 3}))
    with pytest.raises(ModelError, match="'between' has 4 channels"):
        layout.check(SubmodelSpec.of({"g": 2, "between": [1, 5]}))
    with pytest.raises(ModelError, match="the choice 'g' is a group's name, or of two groups"):
        ParamLayout({"g": 4}, {"a": Slot("a", (Axis("g", choice="g"),))})
    with pytest.raises(ModelError, match="the choice 'x' is a group's name, or of two groups"):
        ParamLayout({"g": 4, "h": 4}, {"a": Slot("a", (Axis("g", choice="x"), Axis("h", choice="x")))})
