"""A run without some clients (`rounds.without`) has the bits of the same run with them, until one of them is drawn."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_engine.algorithms import ALGORITHMS, FedAvg
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.selection import SELECTIONS
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import FolderStore
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import TRAINING, tiny_site
from tests.harness.made_up import without_fine_tuning

ROUNDS = 5
CASES: dict[str, Any] = {
    **{name: without_fine_tuning(kind(training=TRAINING)) for name, kind in ALGORITHMS.items() if name != "fedbn"},
    **{
        f"{name}-{draws}": ALGORITHMS["adaptivefl"](training=TRAINING, selection=kind(draws=draws))  # type: ignore[call-arg]
        for name, kind in SELECTIONS.items()
        for draws in ("position", "keyed")
    },
}


def rows_of(algorithm: Any, folder: Path, stop: int = ROUNDS, without: tuple[int, ...] = ()) -> list[Row]:
    site = tiny_site(algorithm)
    run = Run(algorithm, site, RoundsConfig(stop=stop, evaluate_every=100, commit_every=1, without=without))
    return federated(run, FolderStore(folder), keep_rounds=math.inf)[1]


def asked(row: Row) -> list[int]:
    return [line["client"] for line in row.clients]


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_equal_until_the_client_is_drawn(name: str, tmp_path: Path) -> None:
    algorithm = replace(CASES[name], training=replace(TRAINING, fraction=0.5))
    whole = rows_of(algorithm, tmp_path / "whole")
    first = {client: row.round for row in reversed(whole) for client in asked(row)}
    client = max(first, key=lambda client: first[client])  # the client that is drawn last
    never = rows_of(algorithm, tmp_path / "never", without=(client,))
    assert all(client not in asked(row) for row in never)
    shared = first[client]
    assert [(row.plan, row.model) for row in never[:shared]] == [(row.plan, row.model) for row in whole[:shared]]
    assert shared == ROUNDS or asked(never[shared]) != asked(whole[shared])
    # The fork: the first rounds of the whole run, and the rest without the client.
    rows_of(algorithm, tmp_path / "fork", stop=max(1, shared))
    fork = rows_of(algorithm, tmp_path / "fork", without=(client,)) if shared else never
    assert [(row.plan, row.model) for row in fork] == [(row.plan, row.model) for row in never]


def test_place_of_the_client_goes_to_another_client(tmp_path: Path) -> None:
    algorithm = replace(FedAvg(training=TRAINING, eligible="all"), training=replace(TRAINING, fraction=0.5))
    whole, never = (rows_of(algorithm, tmp_path / str(w), without=w) for w in ((), (0, 1)))
    assert [len(row.clients) for row in never] == [len(row.clients) for row in whole]
    for before, after in zip(whole, never, strict=True):
        assert set(asked(before)) - {0, 1} <= set(asked(after))


def test_without_all_clients_nobody_is_asked(tmp_path: Path) -> None:
    algorithm = FedAvg(training=TRAINING, eligible="all")
    count = len(tiny_site(algorithm).fleet)
    assert all(not row.clients for row in rows_of(algorithm, tmp_path, without=tuple(range(count))))
