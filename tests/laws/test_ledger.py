"""The round ledger: a kill between any two writes loses no more than the round in flight, and nothing piles up."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_engine.core.errors import IntegrityError
from fl_engine.core.types import Assignment, ClientFailure, ClientUpdate, RoundPlan, SubmodelSpec
from fl_engine.rounds.ledger import Ledger
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import FolderStore, Store
from tests.harness.ledgers import DAMAGES, KEPT, STATE, commit, damage


def plan_of(round: int, clients: int = 2, seed: int = 0) -> RoundPlan:
    spec = SubmodelSpec.of({"w": [0, 2]})
    payload = {"w": torch.arange(2.0)}
    assignments = tuple(Assignment(round, c, spec, payload, seed + c, 0) for c in range(clients))
    return RoundPlan(round, assignments)


def update(plan: RoundPlan, client: int) -> ClientUpdate:
    assignment = plan.assignments[client]
    payload = {"w": torch.tensor([0.1, client])}
    return ClientUpdate(plan.round, assignment.client, assignment.spec, payload, 17, {"loss": 0.1, "seconds": 2.0})


def answered(ledger: Ledger, plan: RoundPlan) -> set[int]:
    return {result.client for result in ledger.mailbox.finished(plan)}


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
    ledger = Ledger(memory_store)
    commit(ledger, 0, 1, 2)
    damage(memory_store, f"rounds/00002/{name}", how)
    with pytest.raises(IntegrityError) as error:
        ledger.checkpoints.read(2)
    assert f"memory/rounds/00002/{name}" in str(error.value)
    assert "--discard-damaged" in str(error.value)
    assert ledger.checkpoints.last_good() == 1


def test_last_good_goes_back_as_far_as_states_are_kept(memory_store: Store) -> None:
    ledger = Ledger(memory_store, keep_every=3)
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


@pytest.mark.parametrize("committed", [False, True])
def test_tidy_deletes_what_a_kill_left_and_nothing_else(tmp_path: Path, committed: bool) -> None:
    ledger = Ledger(FolderStore(tmp_path))
    if committed:
        commit(ledger, 0, 1, 3)
    before = ledger.checkpoints.store.list("")
    ledger.checkpoints.store.put("rounds/00002/state.json", b"of a round without a marker")
    ledger.checkpoints.store.put("rounds/00001/closed.json", b"of a round that is over if it is committed")
    ledger.checkpoints.store.put("rounds/00004/closed.json", b"of the round that goes on")
    ledger.checkpoints.store.put("rounds/000001/COMMITTED", b"a folder of another name")
    for folder in ("rounds/00004", "metrics"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / ".state.json.1-1.part").write_bytes(b"half")
    ledger.checkpoints.tidy()
    assert not list(tmp_path.rglob("*.part"))
    left = {"rounds/00004/closed.json", "rounds/000001/COMMITTED"}
    if not committed:
        left |= {"rounds/00002/state.json", "rounds/00001/closed.json"}
    assert set(ledger.checkpoints.store.list("")) == {*before, *left}
    assert ledger.checkpoints.commits() == ([0, 1, 3] if committed else [])


# -------------------------------------------------------------------------------------------- inside a round
def test_result_reads_back_unchanged(memory_store: Store) -> None:
    ledger, plan = Ledger(memory_store), plan_of(3)
    ledger.mailbox.open_round(plan)
    sent, failure = update(plan, 0), ClientFailure(3, 1, "prune", "12.0 % is free")
    ledger.mailbox.put_result(plan, sent)
    assert answered(ledger, plan) == {0}
    ledger.mailbox.put_result(plan, failure)
    assert answered(ledger, plan) == {0, 1}
    found = ledger.mailbox.result(plan, 0)
    assert isinstance(found, ClientUpdate)
    assert replace(found, payload={}, metrics={}) == replace(sent, payload={}, metrics={})
    assert dict(found.metrics) == dict(sent.metrics)
    assert torch.equal(found.payload["w"], sent.payload["w"])
    assert ledger.mailbox.result(plan, 1) == failure
    assert ledger.mailbox.closed(plan) is None
    ledger.mailbox.close(plan)
    closed = ledger.mailbox.closed(plan)
    assert closed is not None and list(closed.accepted) == [0, 1]
    # client 1 of round 3 must not be taken for client 1 of round 30, nor its file for client 11's
    assert ledger.mailbox.closed(plan_of(30)) is None
    assert answered(ledger, plan_of(30)) == set()


def test_assignments_read_back_unchanged(memory_store: Store) -> None:
    ledger, plan = Ledger(memory_store), plan_of(3, clients=3)
    first, second, third = plan.assignments
    shared = first.payload
    second = replace(second, payload=shared, memory={"m": torch.tensor([7.0])}, level=1, hints={"kd": 0.5})
    third = replace(third, payload={})
    keys = ledger.mailbox.put_assignments(replace(plan, assignments=(first, second, third)))
    assert ledger.mailbox.count_assignments(3) == 3 and keys.keys() == {0, 1, 2}
    for assignment in (first, second, third):
        (found,) = ledger.mailbox.assignments(3, [assignment.client]).values()
        assert replace(found, payload={}, memory={}) == replace(assignment, payload={}, memory={})
        for sent, back in ((assignment.payload, found.payload), (assignment.memory, found.memory)):
            assert sent.keys() == back.keys() and all(torch.equal(sent[name], back[name]) for name in sent)
        assert all(memory_store.get(key) for key in keys[assignment.client])
    assert [len(keys[client]) for client in (0, 1, 2)] == [2, 3, 1], "the order, what is sent, what is remembered"
    assert len(memory_store.list("rounds/00003/assignments/")) == 3 + 2, "what two are sent lies there once"
    together = ledger.mailbox.assignments(3, [2, 1, 0])
    assert list(together) == [2, 1, 0]
    assert together[0].payload is together[1].payload and not together[2].payload
    assert torch.equal(together[1].memory["m"], second.memory["m"]) and not together[0].memory


@pytest.mark.parametrize(
    "other", [{"seed": 1}, {"spec": SubmodelSpec.of({"w": [1, 2]})}, {"hints": {"kd": 0.5}}, {"level": 1}], ids=str
)
def test_update_of_another_assignment_is_not_adopted(memory_store: Store, other: dict[str, Any]) -> None:
    ledger, plan = Ledger(memory_store), plan_of(0)
    for client in range(2):
        ledger.mailbox.put_result(plan, update(plan, client))
    changed = replace(plan, assignments=(replace(plan.assignments[0], **other), plan.assignments[1]))
    assert answered(ledger, changed) == {1}
    with pytest.raises(IntegrityError, match="client 0"):
        ledger.mailbox.result(changed, 0)


# A manifest has no checksum of its own, and one flipped bit may leave a valid one.
PARTS = [(".safetensors", how) for how in [*DAMAGES, "deleted"]] + [
    (".json", how) for how in [*DAMAGES, "deleted"] if how != "flipped"
]


@pytest.mark.parametrize(("suffix", "how"), PARTS)
def test_incomplete_update_is_requested_again(memory_store: Store, suffix: str, how: str) -> None:
    ledger, plan = Ledger(memory_store), plan_of(0)
    for client in range(2):
        ledger.mailbox.put_result(plan, update(plan, client))
    damage(memory_store, f"rounds/00000/updates/1{suffix}", how)
    assert answered(ledger, plan) == {0}


def test_a_closed_round_is_merged_without_asking_anyone(
    job: Any, memory_store: Store, dying: Any, killed: type[BaseException]
) -> None:
    expected = job.federate(type(memory_store)(), keep_updates=True)
    with pytest.raises(killed):
        job.federate(dying(memory_store, 7), keep_updates=True)  # plan, two updates of two files, closed; one state
    assert "rounds/00000/closed.json" in memory_store.list("")
    assert job.federate(memory_store, keep_updates=True) == expected
    assert 0 not in {round for round, _ in job.backend.asked}


# ------------------------------------------------------------------------------------- a kill at any instant
MODES = [
    {"keep_updates": False, "commit_every": 1, "keep_every": 2},
    {"keep_updates": True, "commit_every": 2},
]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(f"{k}={v}" for k, v in mode.items()))
def test_a_kill_between_any_two_writes_changes_no_bit(job: Any, killed_at_writes: Any, mode: dict[str, Any]) -> None:
    """No file is left, also where the kill came between the last commit and its clearing away."""
    killed_at_writes(functools.partial(job.federate, stop=3, **mode), also=lambda store: store.list(""))
