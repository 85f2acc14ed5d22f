"""Channels of a group that a sub-model may choose by themselves (`Axis.choice`)."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import contains, take
from fl_engine.core.types import FULL, Axis, ParamLayout, Slot, SubmodelSpec
from fl_engine.core.widths import random_drop

law = settings(max_examples=60)
RATIOS = st.fractions(Fraction(1, 20), 1, max_denominator=40)


def channels(layout: ParamLayout, spec: SubmodelSpec, group: str) -> list[int]:
    keep = layout.indices(spec, group)
    return list(range(keep)) if isinstance(keep, int) else list(keep)


@law
@given(size=st.integers(1, 20), widths=st.tuples(RATIOS, RATIOS).map(sorted), seed=st.integers(0, 2**32))
def test_a_choice_draws_by_itself_as_many(size: int, widths: list[Fraction], seed: int) -> None:
    """`between` is of the group `g` and follows it where a sub-model names no channels for it."""
    g, between = Axis("g"), Axis("g", choice="between")
    layout = ParamLayout({"g": size, "classes": 2}, {"a": Slot("a", (between, g)), "b": Slot("b", (g, between))})
    rng, (small, large) = np.random.default_rng(seed), (float(w) for w in widths)
    outer = random_drop(layout, large, rng)
    inner = random_drop(layout, small, rng, inside=outer)
    assert contains(layout, outer, inner)
    full = {name: torch.arange(size * size).view(size, size) for name in "ab"}
    for spec in (outer, inner):
        layout.check(spec)
        rows, columns = channels(layout, spec, "between"), channels(layout, spec, "g")
        assert len(rows) == len(columns)
        cut = take(full, layout, spec)
        assert cut["a"].tolist() == full["a"][rows][:, columns].tolist()
        assert cut["b"].tolist() == full["b"][columns][:, rows].tolist()
    again = take(take(full, layout, outer), layout, inner, have=outer)
    assert {name: t.tolist() for name, t in again.items()} == {name: t.tolist() for name, t in cut.items()}
    part = SubmodelSpec.of({"g": 1})
    assert channels(layout, part, "between") == [0]
    assert contains(layout, FULL, part) and contains(layout, outer, part) == (
        0 in channels(layout, outer, "g") and 0 in channels(layout, outer, "between")
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
