"""`take` against a loop over single elements, and what follows from it: nesting, shapes, counts, errors."""

from __future__ import annotations

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
from fl_engine.core.slicing import contains, take
from fl_engine.core.types import FULL, Axis, ParamLayout, Params, Slot, SubmodelSpec
from fl_engine.core.widths import random_drop
from fl_engine.testing.models import ModelSuite, kept_channels, kept_mask
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from tests.harness.updates import LAYOUT, SHAPES, specs

law = settings(max_examples=60)


def numbered() -> Params:
    start, out = 0, {}
    for name, shape in SHAPES.items():
        size = torch.Size(shape).numel()
        out[name] = torch.arange(start, start + size, dtype=torch.float32).view(shape)
        start += size
    return out


def slow_take(params: Params, spec: SubmodelSpec) -> dict[str, list[float]]:
    """The elements whose channels and blocks are kept, by the definition of an axis."""
    names = [name for name, slot in LAYOUT.slots.items() if LAYOUT.has_block(spec, slot.block)]
    return {name: params[name][kept_mask(LAYOUT, spec, name, params[name].shape)].tolist() for name in names}


class TestTinyNet(ModelSuite):
    @pytest.fixture(params=[TinyNet(), TinyNet((2, 6, 4), 3, dropout=0.3, conv=5, hidden=9)], ids=["4x4", "6x4"])
    def family(self, request: pytest.FixtureRequest) -> ModelFamily:
        return request.param  # type: ignore[no-any-return]


@law
@given(spec=specs())
def test_take_keeps_exactly_the_elements_whose_channels_are_kept(spec: SubmodelSpec) -> None:
    found = take(numbered(), LAYOUT, spec)
    assert {name: t.flatten().tolist() for name, t in found.items()} == slow_take(numbered(), spec)


@law
@given(outer=specs(), inner=specs())
def test_contains_is_inclusion_of_channels_and_blocks(outer: SubmodelSpec, inner: SubmodelSpec) -> None:
    every = set(LAYOUT.blocks)
    channels = all(set(kept_channels(LAYOUT, inner, g)) <= set(kept_channels(LAYOUT, outer, g)) for g in LAYOUT.groups)
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


def test_a_prefix_is_a_view_and_everything_else_a_copy() -> None:
    params = numbered()
    prefix = take(params, LAYOUT, SubmodelSpec.of({"a": 2, "b": 2}))
    prefix["two"].zero_()
    assert params["two"][:2, :4].abs().sum() == 0
    before = params["tied"].clone()
    take(params, LAYOUT, SubmodelSpec.of({"b": [0, 2]}))["tied"].zero_()
    assert torch.equal(params["tied"], before)


@pytest.mark.parametrize("keep", [0, -1, [], [1, 1], [2, 1], [-1, 0]])
def test_nonsense_cannot_be_written_down(keep: int | list[int]) -> None:
    with pytest.raises(ModelError, match="'a'"):
        SubmodelSpec.of({"a": keep})


@law
@given(spec=specs())
def test_a_specification_survives_json(spec: SubmodelSpec) -> None:
    again = SubmodelSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert hash(again) == hash(spec)


def test_counts_by_hand() -> None:
    """Convolution 1 -> 8 at 4x4, then 2x2 maps; hidden 32; residual 32; 4 classes."""
    family = TinyNet()
    assert count_params(family) == (9 + 1) * 8 + (8 * 4 + 1) * 32 + (32 + 1) * 32 + (32 + 1) * 4
    assert count_macs(family) == 16 * 8 * 9 + 8 * 4 * 32 + 32 * 32 + 32 * 4
    small = SubmodelSpec.of({"conv": [1, 5], "hidden": [0, 7, 9]}, ["conv", "fc", "classifier"])
    assert count_params(family, small) == (9 + 1) * 2 + (2 * 4 + 1) * 3 + (3 + 1) * 4
    assert count_macs(family, small) == 16 * 2 * 9 + 2 * 4 * 3 + 3 * 4


RATIOS = st.fractions(Fraction(1, 20), 1, max_denominator=40)


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
        rows, columns = kept_channels(layout, spec, "between"), kept_channels(layout, spec, "g")
        assert len(rows) == len(columns)
        cut = take(full, layout, spec)
        assert cut["a"].tolist() == full["a"][rows][:, columns].tolist()
        assert cut["b"].tolist() == full["b"][columns][:, rows].tolist()
    again = take(take(full, layout, outer), layout, inner, have=outer)
    assert {name: t.tolist() for name, t in again.items()} == {name: t.tolist() for name, t in cut.items()}
    part = SubmodelSpec.of({"g": 1})
    assert kept_channels(layout, part, "between") == [0]
    assert contains(layout, FULL, part) and contains(layout, outer, part) == (
        0 in kept_channels(layout, outer, "g") and 0 in kept_channels(layout, outer, "between")
    )


def test_a_choice_of_another_size_is_an_error() -> None:
    layout = ParamLayout({"g": 4}, {"a": Slot("a", (Axis("g", choice="between"), Axis("g")))})
    with pytest.raises(ModelError, match="choice 'between'"):
        layout.check(SubmodelSpec.of({"between": 3}))
    with pytest.raises(ModelError, match="'between': channel indices must be below 4"):
        layout.check(SubmodelSpec.of({"g": 2, "between": [1, 5]}))
    with pytest.raises(ModelError, match="the choice 'g' must have one group"):
        ParamLayout({"g": 4}, {"a": Slot("a", (Axis("g", choice="g"),))})
    with pytest.raises(ModelError, match="the choice 'x' must have one group"):
        ParamLayout({"g": 4, "h": 4}, {"a": Slot("a", (Axis("g", choice="x"), Axis("h", choice="x")))})
