"""Ledgers to look at: states and measurements to commit, what lies there of a round, and ways to damage a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fl_engine.core.types import Params
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import Store

KEPT = {"COMMITTED", "metrics.json"}
STATE = {"state.safetensors", "state.json"}

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda v: v[: len(v) // 2] + bytes([v[len(v) // 2] ^ 1]) + v[len(v) // 2 + 1 :],
    "truncated": lambda v: v[: len(v) // 2],
    "empty": lambda v: b"",
    "other": lambda v: b'{"schema_version":1}',
}


def damage(store: Store, key: str, how: str) -> None:
    if how == "deleted":
        store.delete(key)
    else:
        store.put(key, DAMAGES[how](store.get(key)))


def state(round: int) -> tuple[Params, dict[str, Any]]:
    return {"params/w": torch.full((100,), float(round)), "params/b": torch.tensor([0.1])}, {"count": round}


def rows(*numbers: int) -> list[Row]:
    return [Row(round=r, metrics={"avg": r / 10, "seconds_round": 1.0}, clients=({"client": 0},)) for r in numbers]


def commit(ledger: Ledger, *numbers: int) -> None:
    for round in numbers:
        ledger.checkpoints.commit(round, *state(round), rows(round))


def files_of(store: Store, round: int) -> set[str]:
    return {key.split("/", 2)[2] for key in store.list(f"rounds/{round:05d}/")}


def after(calls: int) -> Callable[[], bool]:
    """Return a `should_stop` that is true from the n-th call on. The loop calls it after each client."""
    left = [calls]

    def should_stop() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return should_stop
