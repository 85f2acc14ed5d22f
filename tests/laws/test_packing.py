"""The measurements of old rounds are packed: however many there are, files and lines about clients stay few, and a kill
loses none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import IntegrityError
from fl_engine.rounds.ledger import ledger_in
from fl_engine.storage import checkpoints
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import Store
from tests.harness.ledgers import DAMAGES, KEPT, STATE, commit, damage, files_of, rows, state

Make = Callable[[], Store]


@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PACKED", 10)
    monkeypatch.setattr(checkpoints, "LOOK_EVERY", 1)
    monkeypatch.setattr(checkpoints, "LINES", 20)


def test_many_rounds_are_packed_into_few_files(memory_store: Store, small_packs: None) -> None:
    ledger, most = ledger_in(memory_store), 0
    for round in range(237):
        commit(ledger, round)
        most = max(most, len(memory_store.list("rounds/")))
    assert most <= (10 + 2) * len(KEPT) + 2 * len(STATE) + len(KEPT | STATE)
    assert len(memory_store.list("metrics/")) == 23
    assert Checkpoints(memory_store).rows() == rows(*range(237))
    assert Checkpoints(memory_store).last_good() == 236


def test_packed_rounds_keep_some_lines_evenly_spread(memory_store: Store, small_packs: None) -> None:
    ledger = ledger_in(memory_store)
    for round in range(24):
        lines = tuple({"client": c, "loss": round + c / 10} for c in range(6))
        ledger.checkpoints.commit(round, *state(round), [Row(round=round, metrics={"avg": 0.5}, clients=lines)])
    found = ledger.checkpoints.rows()
    assert [row.round for row in found if row.clients] == [0, 3, 6, 9, 10, 13, 16, 19, 20, 21, 22, 23]
    assert all(row.clients[5]["loss"] == row.round + 0.5 for row in found if row.clients)
    assert all(row.metrics == {"avg": 0.5} for row in found)
    assert ledger.checkpoints.rows(lines=False) == [row.model_copy(update={"clients": ()}) for row in found]


def test_a_kill_while_packing_loses_no_measurement(
    new_store: Make, dying: Any, killed: type[BaseException], small_packs: None
) -> None:
    for writes in range(1000):
        store = new_store()
        commit(ledger_in(store), *range(11))
        try:
            ledger = ledger_in(dying(store, writes), keep_every=5)
            commit(ledger, *range(11, 30))
            ledger.checkpoints.discard_after(14)
            commit(ledger, *range(15, 17))
            break
        except killed:
            pass
        again = ledger_in(store, keep_every=5)
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
        commit(ledger_in(store), *range(11))
        try:
            commit(ledger_in(dying(store, writes)), *range(11, 14))
            break
        except killed:
            pass
        for round in Checkpoints(store).commits():
            assert "metrics.json" in files_of(store, round), f"round {round}, killed after {writes} writes"
    assert writes > 30


@pytest.mark.parametrize("how", [*DAMAGES, "deleted"])
def test_a_damaged_pack_is_named_and_can_be_got_over(memory_store: Store, small_packs: None, how: str) -> None:
    commit(ledger_in(memory_store, keep_every=8), *range(35))
    _, second, _ = memory_store.list("metrics/")
    damage(memory_store, second, how)
    ledger = ledger_in(memory_store, keep_every=8)
    said = "the measurements of 10 rounds are missing" if how == "deleted" else second
    with pytest.raises(IntegrityError, match=said) as error:
        ledger.checkpoints.rows()
    assert "--discard-damaged" in str(error.value)
    assert ledger.checkpoints.last_good() == 7, "the last state before what is lost"
    ledger.checkpoints.discard_after(7)
    assert ledger.checkpoints.rows() == rows(*range(8))


def test_a_stale_listing_loses_no_commit(memory_store: Store, small_packs: None) -> None:
    """An S3 server is consistent today; a cache in front of it may not be."""

    class Stale(type(memory_store)):  # type: ignore[misc]
        def list(self, prefix: str) -> list[str]:
            hidden = sorted(key for key in self.files if key.endswith("COMMITTED"))[-2:]
            found: list[str] = super().list(prefix)
            return [key for key in found if key not in hidden]

    store = Stale()
    commit(ledger_in(store), *range(30))
    store.__class__ = type(memory_store)
    assert Checkpoints(store).rows() == rows(*range(30))
    assert Checkpoints(store).last_good() == 29
