"""Injected faults (`rounds.faults`): dropouts, stragglers and Byzantine clients for a share of the assignments.

    drop=0.2        no update
    slow=0.1x5      takes five times as long on the simulated clock
    nan=0.02        one weight is NaN
    scale=0.02x100  a hundred times the trained change
    flip=0.02       the change with the other sign
    corrupt=0.01    a damaged file
    always          the same clients in every round; otherwise drawn for each assignment

At most one fault strikes an assignment. Seed, round and client alone decide which one, so it is the same in every
backend and after every kill. The coordinator applies faults (`rounds.faulty`): clients train honestly, and a changed
update meets the same validation, deadlines and aggregation as a real one. If the way up is coded, the lie is about the
decoded weights, and is encoded again. A codec such as QSGD cannot encode NaN. With such a codec `nan` counts as a
failed training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError, nearest
from fl_engine.core.slicing import is_statistic
from fl_engine.core.text import need_plain
from fl_engine.core.types import Params

Kind = Literal["drop", "slow", "nan", "scale", "flip", "corrupt"]
TIMES: tuple[Kind, ...] = ("slow", "scale")
"""Faults with a factor."""
LIES: tuple[Kind, ...] = ("nan", "scale", "flip")
"""Faults that change an update's weights."""
ALWAYS = "always"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    share: float
    times: float = 1.0


@dataclass(frozen=True)
class Faults:
    """`always`: the faults strike the same clients in every round."""

    faults: tuple[Fault, ...] = ()
    always: bool = False


NONE = Faults()


def parse(text: str | None) -> Faults:
    """Parse `drop=0.2,slow=0.1x5,always`. Raises ConfigError."""
    if text is None or not text.strip():
        return NONE
    words = [word.strip() for word in text.split(",")]
    found = tuple(_fault(word) for word in words if word != ALWAYS)
    kinds = [fault.kind for fault in found]
    if len(set(kinds)) < len(kinds):
        raise ConfigError(f"a kind is given twice in {text!r}")
    if sum(fault.share for fault in found) > 1 + 1e-9:
        raise ConfigError(f"the shares add up to more than 1 in {text!r}")
    return Faults(found, ALWAYS in words)


def _fault(word: str) -> Fault:
    name, _, value = word.partition("=")
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    if name not in kinds:
        raise ConfigError(f"no kind {name!r}{nearest(name, (*kinds, ALWAYS))}")
    kind, (share, sign, times) = kinds[name], value.partition("x")
    wanted = f"{kind}=<share>x<times>" if kind in TIMES else f"{kind}=<share>"
    try:
        need_plain([value])
        fault = Fault(kind, float(share), float(times) if sign else 1.0)
    except ValueError:
        raise ConfigError(f"expected {wanted}, got {word!r}") from None
    if bool(sign) != (kind in TIMES) or not 0 <= fault.share <= 1 or not 0 < fault.times < math.inf:
        raise ConfigError(f"expected {wanted} with a share from 0 to 1 and times above 0, got {word!r}")
    return fault


def befalls(faults: Faults, seed: int, round: int, client: int, clients: int) -> Fault | None:
    """Return the fault that strikes the assignment of `client`, one of `clients`, or None."""
    if not faults.faults:
        return None
    if faults.always:
        place = (_ranks(seed, clients)[client] + 0.5) / clients
    else:
        place = float(seeds.rng(seed, "fault", round, client).random())
    for fault in faults.faults:
        if place < fault.share:
            return fault
        place -= fault.share
    return None


@lru_cache(maxsize=16)
def _ranks(seed: int, clients: int) -> tuple[int, ...]:
    return tuple(int(rank) for rank in seeds.rng(seed, "fault").permutation(clients))


def lie(fault: Fault, received: Params, trained: Params) -> Params:
    """Return the weights that a lying client sends instead of `trained`. `received` are those before training. The
    fault is one of LIES."""
    if fault.kind == "nan":
        first = next((name for name, tensor in trained.items() if tensor.is_floating_point()), None)
        if first is None:  # integers cannot be NaN
            return trained
        spoilt = trained[first].clone(memory_format=torch.contiguous_format)
        spoilt.view(-1)[0] = torch.nan
        return {**trained, first: spoilt}
    times = -1.0 if fault.kind == "flip" else fault.times
    # Statistics of batch norm stay: a variance below zero would be seen at once.
    return {
        name: tensor if is_statistic(name) else received[name] + times * (tensor - received[name])
        for name, tensor in trained.items()
    }


def damaged(value: bytes) -> bytes:
    """Return the file with its last bit flipped."""
    return value[:-1] + bytes([value[-1] ^ 1])


def slowness(fault: Fault | None) -> float:
    """Return how many times longer the assignment takes than without a fault."""
    return fault.times if fault is not None and fault.kind == "slow" else 1.0
