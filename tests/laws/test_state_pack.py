"""A state that is stored and read again is the state; one that does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms.pooled import PooledState
from fl_engine.core.errors import IntegrityError
from fl_engine.core.state import constant, pack, unpack
from fl_engine.core.types import Params
from fl_engine.storage.store import decode, encode
from fl_engine.testing.tiny import assert_same_bits

law = settings(max_examples=40)


@dataclass(frozen=True)
class Rich:
    """One field of each kind that an algorithm may want to keep."""

    params: Params
    fixed: tuple[str, ...] = constant()
    moment: Params = field(default_factory=dict)
    counts: tuple[int, ...] = ()
    table: dict[int, float] = field(default_factory=dict)
    name: str | None = None
    nested: tuple[tuple[int, float], ...] = ()


def rich(**changes: Any) -> Rich:
    start = Rich({"w": torch.zeros(2, 3), "b.c": torch.zeros(3)}, fixed=("from", "init"))
    return replace(start, **changes)


def stored(state: Any) -> tuple[Params, dict[str, Any]]:
    """Through the bytes of the ledger, not only through memory."""
    tensors, rest = pack(state)
    return decode(encode(tensors), "state"), json.loads(json.dumps(rest, allow_nan=False))


@law
@given(
    counts=st.lists(st.integers(), max_size=4).map(tuple),
    table=st.dictionaries(st.integers(0, 99), st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    name=st.none() | st.text(max_size=5),
    nested=st.lists(st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)), max_size=3).map(tuple),
    seed=st.integers(0, 2**20),
    moment=st.booleans(),
)
def test_what_is_packed_comes_back(
    counts: tuple[int, ...],
    table: dict[int, float],
    name: str | None,
    nested: tuple[tuple[int, float], ...],
    seed: int,
    moment: bool,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(t.shape, generator=generator) for n, t in rich().params.items()}
    moments = {n: t / 2 for n, t in values.items()} if moment else {}
    later = rich(params=values, counts=counts, table=table, name=name, nested=nested, moment=moments)
    found = unpack(rich(), *stored(later))
    assert_same_bits(found.params, later.params)
    assert_same_bits(found.moment, later.moment)
    assert (found.counts, found.table, found.name, found.nested) == (counts, table, name, nested)
    assert found.fixed == ("from", "init")


def test_special_values_keep_their_bits() -> None:
    odd = torch.tensor([[0.0, -0.0, 1e-45], [float("inf"), float("nan"), 3.4e38]])
    found = unpack(rich(), *stored(rich(params={"w": odd, "b.c": torch.ones(3)})))
    assert_same_bits(found.params, {"w": odd, "b.c": torch.ones(3)})


def test_constants_are_not_stored_and_come_from_init() -> None:
    tensors, rest = pack(rich(fixed=("stored", "long ago")))
    assert "fixed" not in rest
    assert unpack(rich(fixed=("now",)), tensors, rest).fixed == ("now",)
    start = PooledState(params={"w": torch.ones(1)}, tables={}, moments={}, layout=None, pool=())  # type: ignore[arg-type]
    assert pack(start)[1] == {"tables": {}}


def test_slices_and_transposed_tensors_can_be_stored() -> None:
    whole = torch.arange(12.0).view(3, 4)
    state = rich(params={"w": whole.t()[:2], "b.c": whole[:, 1]})
    found = unpack(rich(), *stored(state))
    assert_same_bits(found.params, state.params)


def test_a_name_is_not_cut_at_the_wrong_slash() -> None:
    start = replace(rich(), params={"a/b": torch.zeros(1)})
    later = replace(start, params={"a/b": torch.ones(1)}, moment={"params/x": torch.ones(2)})
    found = unpack(start, *stored(later))
    assert_same_bits(found.params, later.params)
    assert_same_bits(found.moment, later.moment)


def test_reading_changes_nothing_that_was_there() -> None:
    start = rich()
    unpack(start, *stored(rich(params={"w": torch.ones(2, 3), "b.c": torch.ones(3)})))
    assert_same_bits(start.params, rich().params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"params/w": None}, "'w'"),
        ({"params/w": torch.zeros(3, 2)}, "'w'"),
        ({"params/extra": torch.zeros(1)}, "'extra'"),
        ({"params/w": None, "params/b.c": None}, "params"),
    ],
    ids=["missing", "shape", "extra", "none"],
)
def test_tensors_of_another_model_are_refused(change: dict[str, Any], message: str) -> None:
    tensors, rest = stored(rich())
    tensors = {n: t for n, t in (tensors | change).items() if t is not None}
    with pytest.raises(IntegrityError, match=message):
        unpack(rich(), tensors, rest)


@pytest.mark.parametrize(
    ("name", "value"), [("counts", "many"), ("table", {"x": 1.0}), ("nested", [[1]]), ("name", 3)], ids=str
)
def test_fields_that_do_not_fit_are_refused(name: str, value: Any) -> None:
    tensors, rest = stored(rich())
    with pytest.raises(IntegrityError, match=f"'{name}'"):
        unpack(rich(), tensors, rest | {name: value})


def test_a_missing_field_is_refused() -> None:
    tensors, rest = stored(rich())
    del rest["counts"]
    with pytest.raises(IntegrityError, match="'counts'"):
        unpack(rich(), tensors, rest)


def test_two_fields_may_hold_the_same_tensors() -> None:
    """As after the first round of an algorithm that remembers the model before: `previous = params`."""
    later = rich(params={"w": torch.ones(2, 3), "b.c": torch.ones(3)})
    later = replace(later, moment=later.params)
    found = unpack(rich(), *stored(later))
    assert_same_bits(found.moment, later.params)
