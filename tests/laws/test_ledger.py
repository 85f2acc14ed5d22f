"""The round ledger: a kill between any two writes loses no more than the round in flight, and nothing piles up."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.types import ClientFailure, ClientUpdate, Params, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.rounds.replay import replay
from fl_engine.storage import checkpoints
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.store import FolderStore, Store, sha256
from fl_engine.training.memory import resident_peak, restart_peak

KEPT = {"COMMITTED", "metrics.json"}
STATE = {"state.safetensors", "state.json"}
Make = Callable[[], Store]


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


def plan_of(round: int, clients: int = 2, seed: int = 0) -> RoundPlan:
    spec = SubmodelSpec.of({"w": [0, 2]})
    payload = {"w": torch.arange(2.0)}
    orders = tuple(WorkOrder(round, c, spec, payload, seed + c, 0) for c in range(clients))
    return RoundPlan(round, orders)


def update(plan: RoundPlan, client: int) -> ClientUpdate:
    order = plan.orders[client]
    payload = {"w": torch.tensor([0.1, client])}
    return ClientUpdate(plan.round, order.client, order.spec, payload, 17, {"loss": 0.1, "seconds": 2.0})


# --------------------------------------------------------------------------------------------------- commits
def test_a_commit_reads_back_as_it_was(memory_store: Store) -> None:
    ledger = ledger_in(memory_store)
    assert ledger.checkpoints.commits() == []
    assert ledger.checkpoints.rows() == []
    assert ledger.checkpoints.last_good() is None
    tensors, rest = state(0)
    ledger.checkpoints.commit(0, tensors, rest, rows(0))
    found, found_rest = Checkpoints(memory_store).read(0)
    assert found_rest == rest
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_rows_of_packed_commits_come_in_round_order(memory_store: Store) -> None:
    ledger = ledger_in(memory_store)
    ledger.checkpoints.commit(2, *state(2), rows(0, 1, 2))
    ledger.checkpoints.commit(3, *state(3), rows(3))
    ledger.checkpoints.commit(11, *state(11), rows(*range(4, 12)))
    assert ledger.checkpoints.rows() == rows(*range(12))
    assert ledger.checkpoints.commits() == [2, 3, 11]


def test_a_measurement_that_is_no_number_can_be_committed(memory_store: Store) -> None:
    """A model may diverge after the last loss that was looked at; that is a result, and no reason to crash."""
    row = Row(round=0, metrics={"loss/M1": float("nan"), "train_loss": float("inf"), "avg": 0.1}, clients=())
    Checkpoints(memory_store).commit(0, *state(0), [row])
    (found,) = Checkpoints(memory_store).rows()
    assert found.metrics["avg"] == 0.1


def test_after_many_commits_two_states_and_all_measurements_are_left(memory_store: Store) -> None:
    ledger = ledger_in(memory_store)
    for round in range(60):
        plan = plan_of(round)
        ledger.mailbox.open_round(plan)
        for client in range(2):
            ledger.mailbox.put_outcome(plan, update(plan, client))
        ledger.mailbox.close(plan, [0, 1])
        commit(ledger, round)
    assert ledger.checkpoints.rows() == rows(*range(60))
    assert [r for r in range(60) if files_of(memory_store, r) & STATE] == [58, 59]
    assert all(files_of(memory_store, r) == KEPT for r in range(58))
    assert all(files_of(memory_store, r) == KEPT | STATE for r in (58, 59))
    states = sum(len(memory_store.get(k)) for k in memory_store.list("") if k.rsplit("/")[-1] in STATE)
    assert states < 2 * 1000, "two states of 404 bytes each, and their headers"


# ---------------------------------------------------------------------------------------------------- packing
@pytest.fixture
def small_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PACKED", 10)
    monkeypatch.setattr(checkpoints, "LOOK_EVERY", 1)
    monkeypatch.setattr(checkpoints, "LINES", 20)


def test_however_many_rounds_there_are_the_files_are_few_and_the_measurements_all_there(
    memory_store: Store, small_packs: None
) -> None:
    ledger, most = ledger_in(memory_store), 0
    for round in range(237):
        commit(ledger, round)
        most = max(most, len(memory_store.list("rounds/")))
    assert most <= (10 + 2) * len(KEPT) + 2 * len(STATE) + len(KEPT | STATE)
    assert len(memory_store.list("metrics/")) == 23
    assert Checkpoints(memory_store).rows() == rows(*range(237))
    assert Checkpoints(memory_store).last_good() == 236


def test_states_that_are_kept_stay_when_measurements_are_packed(memory_store: Store, small_packs: None) -> None:
    ledger = ledger_in(memory_store, keep_every=7)
    commit(ledger, *range(40))
    for round in (6, 13, 20, 27, 34):
        assert Checkpoints(memory_store).read(round)[1] == {"count": round}
    assert ledger.checkpoints.rows() == rows(*range(40))
    ledger.checkpoints.discard_after(20)  # in the middle of a packed file
    assert ledger.checkpoints.rows() == rows(*range(21)) and ledger.checkpoints.last_good() == 20
    commit(ledger, *range(21, 50))
    assert ledger.checkpoints.rows() == rows(*range(50))


def test_a_client_whose_line_was_packed_away_is_not_said_to_be_missing(memory_store: Store, small_packs: None) -> None:
    ledger, lines = ledger_in(memory_store), tuple({"client": client} for client in range(6))
    for round in range(24):
        row = Row(round=round, metrics={"clients_trained": 6.0}, clients=lines)
        ledger.checkpoints.commit(round, *state(round), [row])
    with pytest.raises(ConfigError, match=r"^round 2 was packed, and its clients' lines are kept no longer$"):
        replay(None, None, None, ledger, 1, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("held", [0, 30, 1000])
def test_packed_rounds_keep_some_lines_about_clients_evenly_spread(
    memory_store: Store, small_packs: None, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    monkeypatch.setattr(checkpoints, "HELD_LINES", held)
    ledger = ledger_in(memory_store)
    for round in range(24):
        lines = tuple({"client": c, "loss": round + c / 10} for c in range(6))
        ledger.checkpoints.commit(round, *state(round), [Row(round=round, metrics={"avg": 0.5}, clients=lines)])
    found = ledger.checkpoints.rows()
    assert [row.round for row in found if row.clients] == [0, 3, 6, 9, 10, 13, 16, 19, 20, 21, 22, 23]
    assert all(row.clients[5]["loss"] == row.round + 0.5 for row in found if row.clients)
    assert all(row.metrics == {"avg": 0.5} for row in found)
    assert ledger.checkpoints.rows(lines=False) == [row.model_copy(update={"clients": ()}) for row in found]


def test_a_commit_of_many_rounds_is_thinned_like_many_commits(
    memory_store: Store, small_packs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "HELD_LINES", 40)
    ledger = ledger_in(memory_store)
    for last in range(2, 36, 3):
        made = [Row(round=r, metrics={"avg": 0.5}, clients=({"client": r},) * 4) for r in range(last - 2, last + 1)]
        ledger.checkpoints.commit(last, *state(last), made)
    assert len(memory_store.list("metrics/")) == 1
    found = ledger.checkpoints.rows()
    assert [row.round for row in found] == list(range(36))
    packed = [row.round for row in found[:30] if row.clients]
    assert packed == list(range(0, 30, 6)), "120 lines, of which 20 are to stay"
    assert all(row.clients == ({"client": row.round},) * 4 for row in found if row.clients)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counting the peak anew is Linux's")
def test_packing_and_resuming_hold_the_lines_of_one_commit(tmp_path: Path) -> None:
    """All 150,000 lines at once took 66 MB, a commit of 5,000 takes 13."""
    with multiprocessing.get_context("spawn").Pool(1) as alone:
        assert alone.apply(added_by_large_rounds, (tmp_path,)) < 40e6


def added_by_large_rounds(folder: Path) -> int:
    checkpoints.PACKED, checkpoints.HELD_LINES = 20, 5000
    ledger = ledger_in(FolderStore(folder))
    lines = tuple({"client": c, "sent": "full", "loss": c / 3, "seconds": 0.1 * c, "free": 77.7} for c in range(5000))
    row = Row(round=0, metrics={"avg": 0.5}, clients=lines)
    held, _ = restart_peak()
    for round in range(30):
        ledger.checkpoints.commit(round, *state(round), [row.model_copy(update={"round": round})])
    assert len(ledger.checkpoints.rows(lines=False)) == 30 and ledger.store.list("metrics/")
    return resident_peak() - held


def test_a_kill_between_any_two_writes_of_packing_and_cutting_loses_no_measurement(
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


def test_a_kill_while_old_rounds_are_deleted_leaves_no_mark_without_what_it_vouches_for(
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


def test_a_listing_that_does_not_show_the_last_commits_yet_loses_none(memory_store: Store, small_packs: None) -> None:
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


def test_keep_every_keeps_some_states_more(memory_store: Store) -> None:
    commit(ledger_in(memory_store, keep_every=10), *range(35))
    assert [r for r in range(35) if files_of(memory_store, r) & STATE] == [9, 19, 29, 33, 34]
    for round in (9, 19, 29):
        assert Checkpoints(memory_store).read(round)[1] == {"count": round}


def answered(ledger: Ledger, plan: RoundPlan) -> set[int]:
    return {outcome.client for outcome in ledger.mailbox.finished(plan)}


def test_a_commit_leaves_later_rounds_alone(memory_store: Store) -> None:
    ledger, later = ledger_in(memory_store), plan_of(5)
    ledger.mailbox.put_outcome(later, update(later, 0))
    commit(ledger, 0, 1)
    assert answered(ledger, later) == {0}


def test_a_folder_holds_no_empty_folders_and_no_parts(tmp_path: Path) -> None:
    ledger = ledger_in(FolderStore(tmp_path))
    for round in range(3):  # three rounds in one commit: the first two leave nothing but their rows in the third
        plan = plan_of(round)
        ledger.mailbox.open_round(plan)
        ledger.mailbox.put_outcome(plan, update(plan, 0))
    ledger.checkpoints.commit(2, *state(2), rows(0, 1, 2))
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "rounds",
        "rounds/00002",
        *(f"rounds/00002/{name}" for name in sorted(KEPT | STATE)),
    ]


# --------------------------------------------------------------------------------------------------- damage
# A COMMITTED that is not there is no damage: that round is not finished, and is done again.
WHERE = [
    (name, how)
    for name in sorted(KEPT | STATE)
    for how in [*DAMAGES, "deleted"]
    if (name, how) != ("COMMITTED", "deleted")
]


@pytest.mark.parametrize(("name", "how"), WHERE)
def test_damage_names_the_file_and_how_to_go_on(memory_store: Store, name: str, how: str) -> None:
    ledger = ledger_in(memory_store)
    commit(ledger, 0, 1, 2)
    damage(memory_store, f"rounds/00002/{name}", how)
    with pytest.raises(IntegrityError) as error:
        ledger.checkpoints.read(2)
    assert f"memory/rounds/00002/{name}" in str(error.value)
    assert "--discard-damaged" in str(error.value)
    assert ledger.checkpoints.last_good() == 1


@pytest.mark.parametrize("how", [*DAMAGES, "deleted"])
def test_damaged_measurements_of_an_old_round_name_their_own_file(memory_store: Store, how: str) -> None:
    ledger = ledger_in(memory_store)
    commit(ledger, *range(5))
    damage(memory_store, "rounds/00001/metrics.json", how)
    with pytest.raises(IntegrityError, match=r"memory/rounds/00001/metrics\.json") as error:
        ledger.checkpoints.rows()
    assert "--discard-damaged" in str(error.value)


@pytest.mark.parametrize("how", [h for h in DAMAGES if h != "flipped"])
def test_a_damaged_commit_mark_of_an_old_round_is_named(memory_store: Store, how: str) -> None:
    ledger = ledger_in(memory_store)
    commit(ledger, *range(5))
    damage(memory_store, "rounds/00001/COMMITTED", how)
    with pytest.raises(IntegrityError, match="rounds/00001/COMMITTED"):
        ledger.checkpoints.rows()


def test_last_good_goes_back_as_far_as_states_are_kept(memory_store: Store) -> None:
    ledger = ledger_in(memory_store, keep_every=3)
    commit(ledger, *range(8))
    assert ledger.checkpoints.last_good() == 7
    damage(memory_store, "rounds/00007/state.safetensors", "flipped")
    assert ledger.checkpoints.last_good() == 6
    damage(memory_store, "rounds/00006/state.json", "deleted")
    assert ledger.checkpoints.last_good() == 5
    damage(memory_store, "rounds/00005/metrics.json", "truncated")
    assert ledger.checkpoints.last_good() == 2
    damage(memory_store, "rounds/00002/state.safetensors", "empty")
    assert ledger.checkpoints.last_good() is None


def test_discard_after_forgets_later_rounds(memory_store: Store) -> None:
    ledger = ledger_in(memory_store)
    commit(ledger, *range(5))
    plan = plan_of(5)
    ledger.mailbox.put_outcome(plan, update(plan, 0))
    ledger.mailbox.close(plan, [0])
    ledger.checkpoints.discard_after(3)
    assert ledger.checkpoints.commits() == [0, 1, 2, 3]
    assert files_of(memory_store, 4) == files_of(memory_store, 5) == set()
    assert ledger.checkpoints.read(3)[1] == {"count": 3}
    ledger.checkpoints.discard_after(None)
    assert memory_store.list("rounds/") == []


@pytest.mark.parametrize(
    ("key", "how"),
    [
        ("rounds/00003/state.safetensors", "flipped"),
        ("rounds/00003/state.safetensors", "deleted"),
        ("rounds/00003/state.json", "truncated"),
        ("rounds/00003/metrics.json", "empty"),
        ("rounds/00003/COMMITTED", "truncated"),
        ("rounds/00002/metrics.json", "flipped"),
        ("rounds/00001/metrics.json", "truncated"),
        ("rounds/00000/metrics.json", "deleted"),
        ("rounds/00001/COMMITTED", "empty"),
    ],
)
def test_a_damaged_run_goes_on_only_when_told_to(job: Any, memory_store: Store, key: str, how: str) -> None:
    """Whatever file it is: an error that names it, and with leave to discard the bits of an undisturbed run."""
    job.federate(memory_store, stop=4)
    damage(memory_store, key, how)
    before = dict(memory_store.files)  # type: ignore[attr-defined]
    with pytest.raises(IntegrityError, match=key):
        job.federate(memory_store, stop=6)
    assert memory_store.files == before, "nothing is discarded without leave"  # type: ignore[attr-defined]
    found = job.federate(memory_store, stop=6, discard_damaged=True)
    assert found == job.federate(type(memory_store)(), stop=6)
    assert [row.round for row in Checkpoints(memory_store).rows()] == list(range(6))


# -------------------------------------------------------------------------------------------- inside a round
def test_an_outcome_reads_back_as_it_was(memory_store: Store) -> None:
    ledger, plan = ledger_in(memory_store), plan_of(3)
    ledger.mailbox.open_round(plan)
    sent, failure = update(plan, 0), ClientFailure(3, 1, "prune", "12.0 % is free")
    ledger.mailbox.put_outcome(plan, sent)
    assert answered(ledger, plan) == {0}
    ledger.mailbox.put_outcome(plan, failure)
    assert answered(ledger, plan) == {0, 1}
    found = ledger.mailbox.outcome(plan, 0)
    assert isinstance(found, ClientUpdate)
    assert replace(found, payload={}, metrics={}) == replace(sent, payload={}, metrics={})
    assert dict(found.metrics) == dict(sent.metrics)
    assert torch.equal(found.payload["w"], sent.payload["w"])
    assert ledger.mailbox.outcome(plan, 1) == failure
    assert ledger.mailbox.closed(plan) is None
    ledger.mailbox.close(plan, [1, 0])
    closed = ledger.mailbox.closed(plan)
    assert closed is not None and list(closed.accepted) == [0, 1]
    # client 1 of round 3 must not be taken for client 1 of round 30, nor its file for client 11's
    assert ledger.mailbox.closed(plan_of(30)) is None
    assert answered(ledger, plan_of(30)) == set()


def test_orders_come_back_as_they_were_put(memory_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what each sends and remembers, and every name that a client has to read; tensors are written once."""
    ledger, plan = ledger_in(memory_store), plan_of(3, clients=3)
    first, second, third = plan.orders
    shared = first.payload
    second = replace(second, payload=shared, memory={"m": torch.tensor([7.0])}, level=1, hints={"kd": 0.5})
    third = replace(third, payload={})
    keys = ledger.mailbox.put_orders(replace(plan, orders=(first, second, third)))
    assert ledger.mailbox.ordered(3) == 3 and keys.keys() == {0, 1, 2}
    for order in (first, second, third):
        (found,) = ledger.mailbox.orders(3, [order.client]).values()
        assert replace(found, payload={}, memory={}) == replace(order, payload={}, memory={})
        for sent, back in ((order.payload, found.payload), (order.memory, found.memory)):
            assert sent.keys() == back.keys() and all(torch.equal(sent[name], back[name]) for name in sent)
        assert all(memory_store.get(key) for key in keys[order.client])
    assert [len(keys[client]) for client in (0, 1, 2)] == [2, 3, 1], "the order, what is sent, what is remembered"
    assert len(memory_store.list("rounds/00003/orders/")) == 3 + 2, "what two are sent lies there once"
    looked, get = [], memory_store.get
    monkeypatch.setattr(memory_store, "get", lambda key, *limit: (looked.append(key), get(key, *limit))[1])
    together = ledger.mailbox.orders(3, [2, 1, 0])
    assert list(together) == [2, 1, 0] and len(looked) == len(set(looked)) == 3 + 2, "and is read once"
    assert together[0].payload is together[1].payload and not together[2].payload
    assert torch.equal(together[1].memory["m"], second.memory["m"]) and not together[0].memory


@pytest.mark.parametrize(("round", "client"), [(3, 1), (4, 0)])
def test_an_order_of_another_round_or_client_is_refused(memory_store: Store, round: int, client: int) -> None:
    ledger = ledger_in(memory_store)
    ledger.mailbox.put_orders(plan_of(3))
    at = f"rounds/{round:05d}/orders/{client}.json"
    memory_store.put(at, memory_store.get("rounds/00003/orders/0.json"))
    with pytest.raises(IntegrityError, match=f"{at} is of round 3, client 0"):
        ledger.mailbox.orders(round, [client])


def test_measurements_that_are_no_list_are_named(memory_store: Store) -> None:
    ledger = ledger_in(memory_store)
    commit(ledger, 0)
    mark = json.loads(memory_store.get("rounds/00000/COMMITTED"))
    memory_store.put("rounds/00000/metrics.json", b"{}")
    mark["files"]["metrics.json"] = sha256(b"{}")
    memory_store.put("rounds/00000/COMMITTED", json.dumps(mark).encode())
    with pytest.raises(IntegrityError, match=r"rounds/00000/metrics\.json is no list of rounds"):
        ledger.checkpoints.rows()


def _other_seed(order: WorkOrder) -> WorkOrder:
    return replace(order, seed=order.seed + 1)


def _other_spec(order: WorkOrder) -> WorkOrder:
    return replace(order, spec=SubmodelSpec.of({"w": [1, 2]}))


def _other_hints(order: WorkOrder) -> WorkOrder:
    return replace(order, hints={"kd": 0.5})


def _other_level(order: WorkOrder) -> WorkOrder:
    return replace(order, level=order.level + 1)


@pytest.mark.parametrize("other", [_other_seed, _other_spec, _other_hints, _other_level])
def test_an_update_for_another_order_is_not_adopted(
    memory_store: Store, other: Callable[[WorkOrder], WorkOrder]
) -> None:
    ledger, plan = ledger_in(memory_store), plan_of(0)
    for client in range(2):
        ledger.mailbox.put_outcome(plan, update(plan, client))
    changed = replace(plan, orders=(other(plan.orders[0]), plan.orders[1]))
    assert answered(ledger, changed) == {1}
    with pytest.raises(IntegrityError, match="client 0"):
        ledger.mailbox.outcome(changed, 0)


# A manifest has no checksum of its own, and one flipped bit may leave a valid one.
PARTS = [(".safetensors", how) for how in [*DAMAGES, "deleted"]] + [
    (".json", how) for how in [*DAMAGES, "deleted"] if how != "flipped"
]


@pytest.mark.parametrize(("suffix", "how"), PARTS)
def test_an_update_that_is_not_whole_is_asked_for_again(memory_store: Store, suffix: str, how: str) -> None:
    ledger, plan = ledger_in(memory_store), plan_of(0)
    for client in range(2):
        ledger.mailbox.put_outcome(plan, update(plan, client))
    damage(memory_store, f"rounds/00000/updates/1{suffix}", how)
    assert answered(ledger, plan) == {0}


@pytest.mark.parametrize("how", [h for h in DAMAGES if h != "flipped"])
def test_a_damaged_closed_set_is_named(memory_store: Store, how: str) -> None:
    ledger, plan = ledger_in(memory_store), plan_of(0)
    for client in (0, 1):
        ledger.mailbox.put_outcome(plan, update(plan, client))
    ledger.mailbox.close(plan, [0, 1])
    damage(memory_store, "rounds/00000/closed.json", how)
    with pytest.raises(IntegrityError, match=r"memory/rounds/00000/closed\.json"):
        ledger.mailbox.closed(plan)


def test_stored_updates_are_adopted_and_only_the_rest_is_asked(
    job: Any, memory_store: Store, dying: Any, killed: type[BaseException]
) -> None:
    expected = job.federate(type(memory_store)(), keep_updates=True)
    order_of_round_0 = [client for round, client in job.backend.asked if round == 0]
    with pytest.raises(killed):
        job.federate(dying(memory_store, 3), keep_updates=True)  # plan, the first update's payload and manifest
    assert job.federate(memory_store, keep_updates=True) == expected
    assert [client for round, client in job.backend.asked if round == 0] == order_of_round_0[1:]


def test_a_closed_round_is_merged_without_asking_anyone(
    job: Any, memory_store: Store, dying: Any, killed: type[BaseException]
) -> None:
    expected = job.federate(type(memory_store)(), keep_updates=True)
    with pytest.raises(killed):
        job.federate(dying(memory_store, 7), keep_updates=True)  # plan, two updates of two files, closed; one state
    assert "rounds/00000/closed.json" in memory_store.list("")
    assert job.federate(memory_store, keep_updates=True) == expected
    assert 0 not in {round for round, _ in job.backend.asked}


@pytest.mark.parametrize("name", ["plan.json", "closed.json", "updates/{}.json", "updates/{}.safetensors"])
@pytest.mark.parametrize("how", ["truncated", "empty", "deleted"])
def test_damage_in_an_open_round_can_be_got_over(
    job: Any, memory_store: Store, dying: Any, killed: type[BaseException], name: str, how: str
) -> None:
    """All of an open round can be computed again: at worst the user has to say so."""
    expected = job.federate(type(memory_store)(), keep_updates=True, stop=2)
    first = next(client for round, client in job.backend.asked if round == 1)
    writes = 0
    while "rounds/00001/closed.json" not in memory_store.list(""):
        writes += 1
        memory_store.files.clear()  # type: ignore[attr-defined]
        with pytest.raises(killed):
            job.federate(dying(memory_store, writes), keep_updates=True, stop=2)
    key = f"rounds/00001/{name.format(first)}"
    assert key in memory_store.list("")
    damage(memory_store, key, how)
    try:
        assert job.federate(memory_store, keep_updates=True, stop=2) == expected
    except IntegrityError as error:
        assert key.removesuffix(".json").removesuffix(".safetensors") in str(error)
        assert "--discard-damaged" in str(error)
        assert job.federate(memory_store, keep_updates=True, stop=2, discard_damaged=True) == expected


# ------------------------------------------------------------------------------------- a kill at any instant
MODES = [
    {"keep_updates": False, "commit_every": 1, "keep_every": 2},
    {"keep_updates": False, "commit_every": 2},
    {"keep_updates": True, "commit_every": 1},
    {"keep_updates": True, "commit_every": 2},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()))
def test_a_kill_between_any_two_writes_changes_no_bit(
    job: Any, new_store: Make, dying: Any, killed: type[BaseException], timeless: Any, mode: dict[str, Any]
) -> None:
    undisturbed = new_store()
    expected = job.federate(undisturbed, stop=3, **mode)
    leftovers = set()
    for writes in range(1000):
        store = new_store()
        try:
            job.federate(dying(store, writes), stop=3, **mode)
            break
        except killed:
            pass
        assert job.federate(store, stop=3, **mode) == expected, f"killed after {writes} writes"
        assert timeless(store) == timeless(undisturbed), f"killed after {writes} writes"
        leftovers |= set(store.list("")) ^ set(undisturbed.list(""))
    assert writes >= 4 * 2, "two commits or more, of four files each"
    # Also where the kill came between the last commit and its clearing away: the run is over, nothing else will.
    assert leftovers == set()


@settings(max_examples=15, deadline=None)
@given(
    kills=st.lists(st.integers(0, 20), min_size=2, max_size=6),
    modes=st.lists(st.sampled_from(MODES), min_size=7, max_size=7),
)
def test_several_kills_and_changed_storage_settings_change_no_bit(
    job: Any,
    new_store: Make,
    dying: Any,
    killed: type[BaseException],
    timeless: Any,
    kills: list[int],
    modes: list[dict[str, Any]],
) -> None:
    undisturbed, store = new_store(), new_store()
    expected = job.federate(undisturbed)
    for writes, mode in zip(kills, modes, strict=False):
        try:
            job.federate(dying(store, writes), **mode)
        except killed:
            continue
    assert job.federate(store, **modes[-1]) == expected
    assert timeless(store) == timeless(undisturbed)


def test_a_kill_while_discarding_changes_no_bit(
    job: Any, new_store: Make, dying: Any, killed: type[BaseException]
) -> None:
    """Discarding is itself several deletions; half of it done must not pass for a good run."""
    expected = job.federate(new_store(), stop=3)
    for writes in range(100):
        store = new_store()
        job.federate(store, stop=3, keep_every=1)
        for round in (1, 2):
            damage(store, f"rounds/{round:05d}/state.safetensors", "flipped")
        try:
            job.federate(dying(store, writes), stop=3, discard_damaged=True)
            break
        except killed:
            pass
        assert job.federate(store, stop=3, discard_damaged=True) == expected, f"killed after {writes} writes"
    assert writes > 8, "eight deletions, and then the rounds again"


def test_what_a_killed_write_left_does_not_stay(
    job: Any, tmp_path: Path, killed: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full-size VGG16 state has 134 MB: on machines that are often taken away, a part per kill fills the disk."""
    store = FolderStore(tmp_path)
    puts, put = iter(range(100)), os.replace

    def replaced(source: Path, target: Path) -> None:
        if next(puts) == 5:
            raise killed
        put(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # the killed process had another number than the next one
        patch.setattr(os, "replace", replaced)
        with pytest.raises(killed):
            job.federate(store)
    assert list(tmp_path.rglob("*.part"))
    job.federate(store)
    assert list(tmp_path.rglob("*.part")) == []


def test_records_are_plain_json(job: Any, tmp_path: Path) -> None:
    """The ledger is the truth, so other programs have to be able to read it."""
    job.federate(FolderStore(tmp_path), stop=2, keep_updates=True)
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_bytes())
    mark = json.loads((tmp_path / "rounds/00001/COMMITTED").read_bytes())
    assert mark["schema_version"] == 1
    assert mark["round"] == 1
    assert set(mark["files"]) == {"state.safetensors", "state.json", "metrics.json"}
