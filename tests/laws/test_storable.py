"""A state comes back from the ledger as it was, in value, type and order; what does not is refused when it is made."""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.pooled import PooledState
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.state import constant, pack, unpack
from fl_engine.core.types import Params
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.storage.store import FolderStore, decode, encode
from fl_engine.testing.played import federated
from fl_engine.testing.tiny import TRAINING, TinyNet, tiny_fleet, tiny_site

if TYPE_CHECKING:
    from decimal import Decimal


class Phase(Enum):
    WARM = "warm"
    LATE = "late"


@dataclass(frozen=True)
class Best:
    round: int
    score: float | None = None


def state_with(kind: Any, value: Any) -> Any:
    """A state with one field of this annotation."""
    made = make_dataclass("Mine", [("params", Params), ("kept", kind)], frozen=True)
    return made({"w": torch.zeros(2)}, value)


def stored(state: Any) -> Any:
    """Through the bytes of the ledger, not only through memory."""
    tensors, rest = pack(state)
    return unpack(state, decode(encode(tensors), "state"), json.loads(json.dumps(rest, allow_nan=False)))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (tuple[float | None, ...], (1.0, None, -0.0, 5e-324)),
        (list[tuple[int, str]], [(3, "a"), (2**70, "\u00e9")]),
        (dict[int, float], {10: 0.1, 9: 0.2}),
        (dict[str, list[bool]], {"b": [True], "a": []}),
        (int | str, "3"),
        (bool | None, False),
        (Best, Best(3, 0.5)),
        (dict[int, Best], {7: Best(1), 2: Best(0, 1.0)}),
        (Phase, Phase.LATE),
        (dict[Phase, int], {Phase.LATE: 1, Phase.WARM: 2}),
        (Any, [1, {"a": None}, 0.5]),
    ],
)
def test_what_can_be_stored_comes_back_as_it_was(kind: Any, value: Any) -> None:
    found = stored(state_with(kind, value)).kept
    assert repr(found) == repr(value)  # types and the order of keys too


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (list[int], (1, 2), "Mine.kept holds (1, 2) (tuple), which comes back from JSON as [1, 2] (list)"),
        (Any, {"a": (1, 2)}, "Mine.kept['a'] holds (1, 2) (tuple), which comes back from JSON as [1, 2] (list)"),
        (dict, {1: 0.5}, "Mine.kept holds {1: 0.5} (dict), which comes back from JSON as {'1': 0.5} (dict)"),
        (
            float,
            np.float64(0.5),
            "Mine.kept holds np.float64(0.5) (float64), which comes back from JSON as 0.5",
        ),
        (float, np.float32(0.5), "Mine.kept holds np.float32(0.5) (float32), which c"),
        (int, np.int64(3), "Mine.kept holds np.int64(3) (int64), which c"),
        (tuple[float, ...], (0.5, np.float64(1)), "Mine.kept[1] holds np.float64(1.0) (float64), which comes"),
        (dict[int, float], {np.int64(1): 1.0}, "Mine.kept holds {np.int64(1): 1.0} (dict), which c"),
        (int, True, "Mine.kept holds True (bool), which comes back from JSON as 1 (int)"),
        (bool, 1, "Mine.kept holds 1 (int), which comes back from JSON as True (bool)"),
        (float, 3, "Mine.kept holds 3 (int), which comes back from JSON as 3.0 (float)"),
        (
            Best,
            Best(1, 2),
            "Mine.kept.score holds 2 (int), which comes back from JSON as 2.0 (float). The field is annotated as Best",
        ),
        (Any, Best(1), "Mine.kept holds Best(round=1, score=None) (Best), which comes back from JSON as {"),
        (set[int], {1}, "Mine.kept holds {1} (set), which comes"),
        (
            Any,
            Phase.LATE,
            "Mine.kept holds <Phase.LATE: 'late'> (Phase), which comes back from JSON as 'late'",
        ),
        (dict[str, int], defaultdict(int, a=1), "(defaultdict), which comes back from JSON as {'a': 1} (dict)"),
        (deque[int], deque([1], maxlen=2), "Mine.kept holds deque([1], maxlen=2) (deque), which comes"),
        (int, "many", "Mine.kept holds 'many' (str), which does not fit: Input should be a valid integer"),
        (
            int,
            None,
            "Mine.kept holds None (NoneType), which does not fit: Input should be a valid integer",
        ),
        (float, float("inf"), "Mine.kept holds inf (float), which cannot be stored: Out of range float values"),
        (tuple[float, ...], (float("nan"),), "Mine.kept holds (nan,) (tuple), which cannot be stored"),
        (torch.Tensor, torch.ones(1), "(Tensor), which cannot be stored: Unable to generate pydantic-core schema for"),
        (Mapping[str, torch.Tensor], {}, "Mine.kept holds {} (dict), which cannot be stored: Unable to generate"),
        (np.ndarray, np.ones(1), "(ndarray), which cannot be stored"),
        (Any, object(), "(object), which cannot be stored: Unable to serialize unknown type"),
        (bytes, b"\xff", "(bytes), which cannot be stored: 'utf-8' codec can't decode"),
    ],
)
def test_what_would_come_back_as_another_is_refused_with_the_field_and_what_it_holds(
    kind: Any, value: Any, said: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(said)) as refused:
        pack(state_with(kind, value))
    assert "What can be stored: Params (tensors by name); and finite int and float" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([torch.ones(1)], "Mine.kept holds a list, where Params, a dict of tensors by name, is expected"),
        ({1: torch.ones(1)}, "Mine.kept has the name 1, a int, where a str is expected"),
        ({"w": np.ones(1)}, "Mine.kept['w'] is a ndarray instead of a torch.Tensor"),
        ({"w": torch.nn.Parameter(torch.ones(1))}, "Mine.kept['w'] is a Parameter instead of a torch.Tensor"),
        ({"w": torch.ones(1, requires_grad=True)}, "Mine.kept['w'] is a tensor with requires_grad; `.detach()`"),
        ({"w": torch.ones(2).to_sparse()}, "Mine.kept['w'] is a tensor of torch.float32, torch.sparse_coo, on cpu"),
        ({"w": torch.ones(2, dtype=torch.complex128)}, "Mine.kept['w'] is a tensor of torch.complex128"),
        ({"w": torch.ones(2, device="meta")}, "Mine.kept['w'] is a tensor of torch.float32, torch.strided, on meta"),
    ],
    ids=["a list", "a number", "numpy", "a parameter", "a gradient", "sparse", "complex", "meta"],
)
def test_tensors_that_no_file_holds_are_refused(tensors: Any, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        pack(state_with(Params, tensors))


def test_tensors_come_back_in_their_own_order() -> None:
    """Or a sum over all of them would have other bits after a kill."""
    params = {"conv.weight": torch.ones(1), "conv.bias": torch.ones(2), "a": torch.ones(3, dtype=torch.int64)}
    assert list(stored(state_with(Params, params)).kept) == list(params)
    tensors, rest = pack(state_with(Params, params))
    with pytest.raises(IntegrityError, match="kept/order does not list the names"):
        unpack(state_with(Params, {}), tensors, {**rest, "kept/order": ["conv.weight", "a", "a"]})


@dataclass(frozen=True)
class Unset:
    params: Params
    kept: int = field(default=0, init=False)


@dataclass(frozen=True)
class Unread:
    params: Params
    kept: Decimal


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"params": {}}, "a dict is no state: make it a @dataclass(frozen=True)"),
        (Unset({}), "Unset.kept is a field with init=False"),
        (Unread({}, None), "the annotations of Unread cannot be read: name 'Decimal' is not defined. Define or"),  # type: ignore[arg-type]
    ],
    ids=["a dict", "not set", "not read"],
)
def test_what_is_no_state_is_refused(state: Any, said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        pack(state)


def test_the_state_of_the_guide_can_be_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/extending.md").read_text()
    (text,) = (each for each in re.findall(r"^```python\n(.*?)^```$", guide, re.M | re.DOTALL) if "MyState" in each)
    module: Any = ModuleType("guide_state")
    monkeypatch.setitem(sys.modules, "guide_state", module)  # where annotations are looked up
    exec(text, vars(module))
    whole = {"params": {"w": torch.zeros(2)}, "tables": {}, "moments": {}, "layout": None, "pool": ()}
    state = module.MyState(
        **whole, average={"w": torch.ones(2)}, phase=module.Phase.FINE, best=0.5, seen={3: (0.5, 1.0), 1: ()}
    )
    assert repr(stored(state)) == repr(state)


# ------------------------------------------------------------------------------------------------ in a run
@dataclass(frozen=True)
class Counting(PooledState):
    first: tuple[int, ...] = constant()
    seen: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts(FedAvg):
    """Begins with `begins` and gives what `merged` makes of the merged state."""

    begins: Any = None
    merged: Any = None

    def init(self, *given: Any) -> Any:
        state = Counting(**vars(super().init(*given)), first=(1,))
        return state if self.begins is None else self.begins(state)

    def merge(self, state: Any, *given: Any) -> Any:
        merged = super().merge(state, *given)
        return merged if self.merged is None else self.merged(merged)


def run_of(algorithm: Any, folder: Path, stop: int = 3) -> Any:
    site = tiny_site(algorithm, TinyNet(), fleet=tiny_fleet(4))
    return federated(Run(algorithm, site, RoundsConfig(stop=stop, commit_every=1)), FolderStore(folder))[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"begins": lambda s: dict(vars(s))}, "Counts.init gave a dict, where a state is expected"),
        ({"begins": lambda s: replace(s, seen={0: 0})}, "Counting.seen[0] holds 0 (int), which comes"),
        ({"merged": lambda s: replace(s, seen={0: np.float64(1)})}, "Counting.seen[0] holds np.float64(1.0)"),
        ({"merged": lambda s: replace(s, first=(2,))}, "Counts.merge gave another `first`, a field made with"),
        ({"merged": lambda s: PooledState(**{n: v for n, v in vars(s).items() if n not in ('seen', 'first')})},
         "Counts.merge gave a PooledState, where a Counting like `init`'s is expected"),
    ],
    ids=["init a dict", "init an int", "merge numpy", "merge a constant", "merge another class"],
)  # fmt: skip
def test_a_run_refuses_a_state_that_no_ledger_holds(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=re.escape(said)):
        run_of(Counts(training=TRAINING, eligible="all", **options), tmp_path)
    assert not list(tmp_path.glob("rounds/*/COMMITTED")), "nothing was committed"


def test_a_run_that_goes_on_iterates_in_the_same_order(tmp_path: Path) -> None:
    """The state sums over dicts in their order: of clients as they came, of tensors as the network has them."""

    def merged(state: Any) -> Any:
        total = sum(state.seen.values(), 0.1)
        for tensor in state.params.values():
            total += float(tensor.double().norm()) * 1e3
        return replace(state, seen={10 - len(state.seen): total % 1.0, **state.seen})

    algorithm = Counts(training=TRAINING, eligible="all", merged=merged)
    whole = run_of(algorithm, tmp_path / "whole", stop=5)
    for stop in range(1, 6):
        parts = run_of(algorithm, tmp_path / "parts", stop)
    assert list(whole.seen.items()) == list(parts.seen.items())
    assert list(whole.params) == list(parts.params)
