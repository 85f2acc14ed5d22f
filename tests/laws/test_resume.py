"""Resume equals uninterrupted, bit for bit, wherever a run was stopped and however it stores what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.types import ClientFailure, Outcome, RoundPlan
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import ledger_in
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from fl_engine.testing.tiny import Memory
from tests.harness.ledgers import after

Make = Callable[[], Store]
Rows = Callable[[Store], list[Any]]

STORAGE = [
    {"keep_updates": False, "commit_every": 3},
    {"keep_updates": False, "commit_every": "auto"},
    {"keep_updates": True, "commit_every": 1},
]
PER_ROUND = 2
ROUNDS = 4

storage = pytest.mark.parametrize(
    "mode", STORAGE, ids=lambda mode: f"keep_updates={mode['keep_updates']}-commit_every={mode['commit_every']}"
)


@storage
def test_run_stopped_after_any_client_resumes_to_the_same_bits(
    job: Any, new_store: Make, timeless: Rows, mode: dict[str, Any]
) -> None:
    undisturbed = new_store()
    expected = job.federate(undisturbed, stop=ROUNDS, **mode)
    for clients in range(1, ROUNDS * PER_ROUND + 1):
        store = new_store()
        with pytest.raises(Stopped):
            job.federate(store, after(clients), stop=ROUNDS, **mode)
        assert job.federate(store, stop=ROUNDS, **mode) == expected, f"stopped after {clients} clients"
        assert timeless(store) == timeless(undisturbed), f"stopped after {clients} clients"


@storage
def test_what_is_finished_is_committed_when_a_run_is_stopped(
    job: Any, memory_store: Store, mode: dict[str, Any]
) -> None:
    tracker = Memory()
    with pytest.raises(Stopped, match="--resume"):
        job.federate(memory_store, after(2 * PER_ROUND + 1), tracker=tracker, stop=ROUNDS, **mode)
    assert [row.round for row in Checkpoints(memory_store).rows()] == [0, 1]
    assert Checkpoints(memory_store).last_good() == 1
    assert sorted(tracker.rows) == [1, 2], "and tracked"


def test_a_stopped_round_keeps_the_updates_that_are_there(job: Any, memory_store: Store, new_store: Make) -> None:
    expected = job.federate(new_store(), keep_updates=True)
    asked = list(job.backend.asked)
    with pytest.raises(Stopped):
        job.federate(memory_store, after(PER_ROUND + 1), keep_updates=True)
    assert job.backend.asked == asked[: PER_ROUND + 1], "nobody is asked after the client in flight"
    assert job.federate(memory_store, keep_updates=True) == expected
    assert job.backend.asked == asked[PER_ROUND + 1 :]


def test_storage_settings_and_devices_may_change_at_resume(
    job: Any, new_store: Make, memory_store: Store, timeless: Rows
) -> None:
    undisturbed = new_store()
    expected = job.federate(undisturbed, stop=6)
    for mode in STORAGE[:-1]:
        with pytest.raises(Stopped):
            job.federate(memory_store, after(PER_ROUND + 1), stop=6, **mode)
    two = job.make_backend(("cpu", "cpu"))
    assert job.federate(memory_store, backend=two, stop=6, **STORAGE[-1]) == expected
    assert timeless(memory_store) == timeless(undisturbed)


@storage
def test_what_a_round_refuses_is_refused_after_a_kill_as_before(
    job: Any, new_store: Make, dying: Any, killed: type[BaseException], timeless: Rows, mode: dict[str, Any]
) -> None:
    terms = {"norm_bound": 1.0, "stop": 3, **mode}
    undisturbed = new_store()
    expected = job.federate(undisturbed, **terms)
    assert any("validate: norm" in str(row) for row in timeless(undisturbed))
    for writes in range(0, 60, 1 if mode["keep_updates"] else 4):
        store = new_store()
        try:
            job.federate(dying(store, writes), **terms)
        except killed:
            pass
        else:
            break
        assert job.federate(store, **terms) == expected, f"killed after {writes} writes"
        assert timeless(store) == timeless(undisturbed), f"killed after {writes} writes"
        assert remembered(store) == remembered(undisturbed), f"killed after {writes} writes"


def remembered(store: Store) -> Any:
    ledger = ledger_in(store)
    return ledger.checkpoints.read(ledger.checkpoints.commits()[-1])[1].get(rounds.HISTORY)


def test_the_last_round_is_always_committed_and_evaluated(job: Any, new_store: Make) -> None:
    for mode in ({"commit_every": 3}, {"commit_every": "auto"}, {"commit_every": 1, "evaluate_every": 3}):
        store = new_store()
        job.federate(store, stop=4, **mode)
        assert Checkpoints(store).commits()[-1] == 3
        scored = [row.round for row in Checkpoints(store).rows() if "avg" in row.metrics]
        assert scored == ([2, 3] if "evaluate_every" in mode else [3])


def test_a_run_does_not_end_at_a_round_that_was_not_evaluated(job: Any, new_store: Make) -> None:
    for mode in ({"commit_every": 1}, {"commit_every": 1, "keep_updates": True}):
        store, undisturbed = new_store(), new_store()
        with pytest.raises(Stopped):
            job.federate(store, after(PER_ROUND + 1), stop=4, evaluate_every=10, **mode)
        assert [row.round for row in Checkpoints(store).rows()] == [0]
        with pytest.raises(ConfigError, match=r"rounds\.stop = 1, and the 1 rounds .* were not evaluated"):
            job.federate(store, stop=1, evaluate_every=10, **mode)
        expected = job.federate(undisturbed, stop=2, evaluate_every=10, **mode)
        assert job.federate(store, stop=2, evaluate_every=10, **mode) == expected


def test_auto_packs_quick_rounds_and_commits_slow_ones(
    job: Any, new_store: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commits(**mode: Any) -> list[int]:
        store = new_store()
        job.federate(store, commit_every="auto", **mode)
        return Checkpoints(store).commits()

    assert commits() == [3], "four rounds of milliseconds are one commit"
    assert commits(keep_every=3) == [2, 3], "but a state that is to be kept has to be there"
    assert commits(keep_updates=True) == [0, 1, 2, 3], "rounds that store updates are long ones"
    monkeypatch.setattr(rounds, "AUTO_COMMIT_S", 0.0)
    assert commits() == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------- tracking
class AfterTheCommit(Memory):
    """A tracker may only learn of what no kill can undo."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        committed = {row.round + 1 for row in Checkpoints(self.store).rows()}
        assert {step for step, _ in rows} <= committed
        super().metrics(rows)


@storage
def test_tracking_follows_the_commit_and_resume_completes_it(
    job: Any, memory_store: Store, mode: dict[str, Any]
) -> None:
    with pytest.raises(Stopped):
        job.federate(memory_store, after(2 * PER_ROUND + 1), tracker=AfterTheCommit(memory_store), **mode)
    tracker = AfterTheCommit(memory_store)
    job.federate(memory_store, tracker=tracker, **mode)
    assert sorted(tracker.rows) == [1, 2, 3, 4], "also the rounds of which a killed process told nobody"
    assert {"bytes_down", "bytes_up", "waste", "clients_trained", "seconds_round"} <= tracker.rows[2].keys()


# ------------------------------------------------------------------------------------------------- failures
class Failing:
    """A backend whose chosen clients bring nothing."""

    durable = False

    def __init__(self, inner: Any, fails: Callable[[int, int], bool]) -> None:
        self.inner = inner
        self.fails = fails

    def run(self, algorithm: Any, plan: RoundPlan) -> Any:
        for order in plan.orders:
            if self.fails(plan.round, order.client):
                yield ClientFailure(plan.round, order.client, "train", "as the test says")
            else:
                yield from self.inner.run(algorithm, replace(plan, orders=(order,)))


@storage
def test_round_in_which_all_fail_changes_nothing(
    job: Any, new_store: Make, memory_store: Store, timeless: Rows, mode: dict[str, Any]
) -> None:
    after_one = job.federate(new_store(), stop=1)
    failing = Failing(job.backend, lambda round, _: round == 1)
    assert job.federate(memory_store, backend=failing, stop=2, **mode) == after_one
    row = Checkpoints(memory_store).rows()[1]
    assert row.metrics["clients_failed"] == PER_ROUND
    assert row.metrics["clients_trained"] == 0
    assert row.metrics["waste"] == 1
    assert "train_loss" not in row.metrics
    assert {line["failure"] for line in row.clients} == {"train: as the test says"}
    # a stored failure is an outcome: a resume that merges the round again asks nobody
    resumed = new_store()
    with pytest.raises(Stopped):
        job.federate(resumed, after(PER_ROUND + 1), backend=failing, stop=2, **mode)
    assert job.federate(resumed, backend=failing, stop=2, **mode) == after_one
    assert timeless(resumed) == timeless(memory_store)


# -------------------------------------------------------------------------------------------------- details
class Reordered:
    """Another backend, whose outcomes come in another order."""

    durable = False

    def __init__(self, inner: Any, order: Callable[[list[Outcome]], list[Outcome]]) -> None:
        self._inner = inner
        self._order = order

    def run(self, algorithm: Any, plan: Any) -> Iterator[Outcome]:
        yield from self._order(list(self._inner.run(algorithm, plan)))


@pytest.mark.parametrize("order", [lambda found: found[::-1], lambda found: found[1:] + found[:1]])
def test_results_are_merged_in_client_order(
    job: Any, new_store: Make, order: Callable[[list[Outcome]], list[Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    everybody = replace(job.algorithm, training=replace(job.algorithm.training, fraction=1.0))
    monkeypatch.setattr(job, "algorithm", everybody)  # the job is the whole session's
    expected = job.federate(new_store(), stop=2)
    assert job.federate(new_store(), stop=2, backend=Reordered(job.backend, order)) == expected
