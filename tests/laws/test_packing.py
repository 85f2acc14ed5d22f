"""The measurements of old rounds are packed: the number of files is bounded, and a kill loses no measurement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import IntegrityError
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage import checkpoints
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from tests.harness.ledgers import DAMAGES, KEPT, STATE, commit, damage, files_of, rows

Make = Callable[[], Store]


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PACKED", 10)


def test_many_rounds_are_packed_into_few_files(memory_store: Store, small_packs: None) -> None:
    ledger, most = Ledger(memory_store), 0
    for round in range(237):
        commit(ledger, round)
        most = max(most, len(memory_store.list("rounds/")))
    assert most <= (10 + 2) * len(KEPT) + 2 * len(STATE) + len(KEPT | STATE)
    assert len(memory_store.list("metrics/")) == 23
    assert Checkpoints(memory_store).rows() == rows(*range(237))
    assert Checkpoints(memory_store).last_good() == 236


def test_a_kill_while_packing_loses_no_measurement(
    new_store: Make, dying: Any, killed: type[BaseException], small_packs: None
) -> None:
    for writes in range(1000):
        store = new_store()
        commit(Ledger(store), *range(11))
        try:
            ledger = Ledger(dying(store, writes), keep_every=5)
            commit(ledger, *range(11, 30))
            ledger.checkpoints.discard_after(14)
            commit(ledger, *range(15, 17))
            break
        except killed:
            pass
        again = Ledger(store, keep_every=5)
        last = again.checkpoints.commits()[-1]
        assert again.checkpoints.rows() == rows(*range(last + 1)), f"killed after {writes} writes"
        again.checkpoints.tidy()
        assert again.checkpoints.rows() == rows(*range(last + 1)), f"killed after {writes} writes"
        commit(again, *range(last + 1, 40))
        assert Checkpoints(store).rows() == rows(*range(40)), f"killed after {writes} writes"
    assert writes > 100


def test_a_kill_while_deleting_leaves_no_mark_without_metrics(
    new_store: Make, dying: Any, killed: type[BaseException], small_packs: None
) -> None:
    for writes in range(1000):
        store = new_store()
        commit(Ledger(store), *range(11))
        try:
            commit(Ledger(dying(store, writes)), *range(11, 14))
            break
        except killed:
            pass
        for round in Checkpoints(store).commits():
            assert "metrics.json" in files_of(store, round), f"round {round}, killed after {writes} writes"
    assert writes > 30


def test_a_kill_while_discarding_leaves_no_gap(
    new_store: Make, dying: Any, killed: type[BaseException], small_packs: None
) -> None:
    for writes in range(1000):
        store = new_store()
        commit(Ledger(store, keep_every=4), *range(25))
        try:
            Ledger(dying(store, writes), keep_every=4).checkpoints.discard_after(3)
            break
        except killed:
            pass
        found = Checkpoints(store)
        assert found.rows() == rows(*range(found.commits()[-1] + 1)), f"killed after {writes} writes"
    assert writes > 5


def test_a_damaged_pack_is_kept_unless_it_is_discarded(memory_store: Store, small_packs: None) -> None:
    commit(Ledger(memory_store, keep_every=7), *range(45))
    memory_store.delete(*(key for key in memory_store.list("rounds/") if key > "rounds/00035"))
    *_, last = memory_store.list("metrics/")
    assert last.startswith("metrics/00030-")
    ledger = Ledger(memory_store, keep_every=7)
    damage(memory_store, last, "flipped")
    with pytest.raises(IntegrityError):
        ledger.checkpoints.tidy()
    assert last in memory_store.list("metrics/")


@pytest.mark.parametrize("how", [*DAMAGES, "deleted"])
def test_a_damaged_pack_is_named_and_can_be_got_over(memory_store: Store, small_packs: None, how: str) -> None:
    commit(Ledger(memory_store, keep_every=7), *range(45))
    *_, third, _ = memory_store.list("metrics/")
    assert third.startswith("metrics/00020-")
    damage(memory_store, third, how)
    ledger = Ledger(memory_store, keep_every=7)
    said = "the measurements of 10 rounds are missing" if how == "deleted" else third
    with pytest.raises(IntegrityError, match=said) as error:
        ledger.checkpoints.rows()
    assert "--discard-damaged" in str(error.value)
    assert ledger.checkpoints.last_good() == 13, "round 20 has a state, but its measurements are lost"
    ledger.checkpoints.discard_after(13)
    assert ledger.checkpoints.rows() == rows(*range(14))
    assert [int(key.split("/")[1]) for key in memory_store.list("rounds/") if key.endswith("MITTED")] == [6, 13]
    assert max(memory_store.list("rounds/")).startswith("rounds/00013/"), "no file of a later round is left"
