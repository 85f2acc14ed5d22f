"""The round ledger: a kill between any two writes loses no more than the round in flight, and nothing piles up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import ClientFailure, ClientUpdate, RoundPlan, SubmodelSpec, WorkOrder
from fl_engine.rounds.ledger import Ledger, ledger_in
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from tests.harness.ledgers import DAMAGES, KEPT, STATE, commit, damage, rows, state

Make = Callable[[], Store]


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


def answered(ledger: Ledger, plan: RoundPlan) -> set[int]:
    return {outcome.client for outcome in ledger.mailbox.finished(plan)}


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
@pytest.mark.parametrize("how", ["truncated", "deleted"])
def test_damage_in_an_open_round_can_be_got_over(
    job: Any, memory_store: Store, dying: Any, killed: type[BaseException], name: str, how: str
) -> None:
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
