"""A state that is stored and read again is the state; one that does not fit is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.state import constant, pack, unpack
from fl_engine.core.types import Params
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore, decode, encode
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import TRAINING, TinyNet, assert_same_bits, tiny_fleet, tiny_site

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


class Phase(Enum):
    WARM = "warm"
    LATE = "late"


@dataclass(frozen=True)
class Best:
    round: int
    score: float | None = None


def rich(**changes: Any) -> Rich:
    start = Rich({"w": torch.zeros(2, 3), "b.c": torch.zeros(3)}, fixed=("from", "init"))
    return replace(start, **changes)


def state_with(kind: Any, value: Any) -> Any:
    """A state with one field of this annotation."""
    made = make_dataclass("Mine", [("params", Params), ("kept", kind)], frozen=True)
    return made({"w": torch.zeros(2)}, value)


def stored(state: Any) -> tuple[Params, dict[str, Any]]:
    """Through the bytes of the ledger, not only through memory."""
    tensors, rest = pack(state)
    return decode(encode(tensors), "state"), json.loads(json.dumps(rest, allow_nan=False))


def restored(state: Any) -> Any:
    return unpack(state, *stored(state))


@law
@given(
    counts=st.lists(st.integers(), max_size=4).map(tuple),
    table=st.dictionaries(st.integers(0, 99), st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    name=st.none() | st.text(max_size=5),
    nested=st.lists(st.tuples(st.integers(), st.floats(allow_nan=False, allow_infinity=False)), max_size=3).map(tuple),
    seed=st.integers(0, 2**20),
    moment=st.booleans(),
)
def test_packed_state_comes_back(
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


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tuple[float | None, ...], (1.0, None, -0.0, 5e-324)),
        (list[tuple[int, str]], [(3, "a"), (2**70, "\u00e9")]),
        (dict[int, float], {10: 0.1, 9: 0.2}),
        (int | str, "3"),
        (dict[int, Best], {7: Best(1), 2: Best(0, 1.0)}),
        (dict[Phase, int], {Phase.LATE: 1, Phase.WARM: 2}),
        (Any, [1, {"a": None}, 0.5]),
    ],
)
def test_storable_field_keeps_value_type_and_order(kind: Any, value: Any) -> None:
    assert repr(restored(state_with(kind, value)).kept) == repr(value)


def test_tensors_come_back_in_their_own_order() -> None:
    """Otherwise a sum over all of them would have other bits after a kill."""
    params = {"conv.weight": torch.ones(1), "conv.bias": torch.ones(2), "a": torch.ones(3, dtype=torch.int64)}
    assert list(restored(state_with(Params, params)).kept) == list(params)
    tensors, rest = pack(state_with(Params, params))
    with pytest.raises(IntegrityError, match="kept/order"):
        unpack(state_with(Params, {}), tensors, {**rest, "kept/order": ["conv.weight", "a", "a"]})


def test_constants_are_not_stored_and_come_from_init() -> None:
    tensors, rest = pack(rich(fixed=("stored", "long ago")))
    assert "fixed" not in rest
    assert unpack(rich(fixed=("now",)), tensors, rest).fixed == ("now",)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (list[int], (1, 2)),
        (dict, {1: 0.5}),
        (float, np.float64(0.5)),
        (dict[int, float], {np.int64(1): 1.0}),
        (int, True),
        (Best, Best(1, 2)),
        (set[int], {1}),
        (torch.Tensor, torch.ones(1)),
        (bytes, b"\xff"),
        (Params, {1: torch.ones(1)}),
        (Params, {"w": np.ones(1)}),
        (Params, {"w": torch.nn.Parameter(torch.ones(1))}),
        (Params, {"w": torch.ones(2).to_sparse()}),
        (Params, {"w": torch.ones(2, device="meta")}),
    ],
    ids=lambda value: str(value)[:20],
)
def test_field_that_would_not_come_back_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(ModelError, match=r"Mine\.kept"):
        pack(state_with(kind, value))


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
def test_stored_tensors_of_another_model_are_refused(change: dict[str, Any], message: str) -> None:
    tensors, rest = stored(rich())
    tensors = {n: t for n, t in (tensors | change).items() if t is not None}
    with pytest.raises(IntegrityError, match=message):
        unpack(rich(), tensors, rest)


@dataclass(frozen=True)
class Counting(PooledState):
    seen: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts(FedAvg):
    """The state sums over dicts in their order: of clients as they came, of tensors as the network has them."""

    def init(self, *given: Any) -> Any:
        return Counting(**vars(super().init(*given)))

    def merge(self, state: Any, *given: Any) -> Any:
        merged = super().merge(state, *given)
        total = sum(merged.seen.values(), 0.1)
        for tensor in merged.params.values():
            total += float(tensor.double().norm()) * 1e3
        return replace(merged, seen={10 - len(merged.seen): total % 1.0, **merged.seen})


def run_of(algorithm: Any, folder: Path, stop: int = 3) -> Any:
    site = tiny_site(algorithm, TinyNet(), fleet=tiny_fleet(4))
    return federated(Run(algorithm, site, RoundsConfig(stop=stop, commit_every=1)), FolderStore(folder))[0]


def test_resumed_run_iterates_in_the_same_order(tmp_path: Path) -> None:
    algorithm = Counts(training=TRAINING, eligible="all")
    whole = run_of(algorithm, tmp_path / "whole", stop=5)
    for stop in range(1, 6):
        parts = run_of(algorithm, tmp_path / "parts", stop)
    assert list(whole.seen.items()) == list(parts.seen.items())
    assert list(whole.params) == list(parts.params)
