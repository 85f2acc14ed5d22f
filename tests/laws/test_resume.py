"""Resume equals uninterrupted, bit for bit, wherever a run was stopped and however it stores what it has; and the end
of a run by `rounds.stop_simulated_s`."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from fl_engine.core.errors import ConfigError, Stopped
from fl_engine.core.types import ClientFailure, ClientResult, RoundPlan
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.storage.checkpoints import Checkpoints
from fl_engine.storage.store import Store
from fl_engine.testing.tiny import Memory
from tests.harness.jobs import Through
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
    job: Any, killed_at_writes: Any, timeless: Rows, mode: dict[str, Any]
) -> None:
    run = functools.partial(job.federate, norm_bound=1.0, stop=3, **mode)
    undisturbed = killed_at_writes(run, also=remembered)
    assert any("validate: norm" in str(row) for row in timeless(undisturbed))


def remembered(store: Store) -> Any:
    ledger = Ledger(store)
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
        with pytest.raises(ConfigError) as error:
            job.federate(store, stop=1, evaluate_every=10, **mode)
        assert error.value.path == "rounds.stop"
        expected = job.federate(undisturbed, stop=2, evaluate_every=10, **mode)
        assert job.federate(store, stop=2, evaluate_every=10, **mode) == expected


def test_auto_packs_quick_rounds_and_commits_slow_ones(job: Any, new_store: Make) -> None:
    def commits(**mode: Any) -> list[int]:
        store = new_store()
        job.federate(store, commit_every="auto", **mode)
        return Checkpoints(store).commits()

    assert commits() == [3], "four rounds of milliseconds are one commit"
    assert commits(keep_every=3) == [2, 3], "but a state that is to be kept has to be there"
    assert commits(keep_updates=True) == [0, 1, 2, 3], "rounds that store updates are long ones"

    def slow_at_first(plan: RoundPlan, found: Iterator[ClientResult]) -> Iterator[ClientResult]:
        time.sleep(rounds.AUTO_COMMIT_S if plan.round == 0 else 0)
        return found

    assert commits(backend=Through(job.backend, slow_at_first)) == [0, 3]


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


def failing(plan: RoundPlan, found: Iterator[ClientResult]) -> Iterator[ClientResult]:
    """All clients of the second round bring nothing."""
    for result in found:
        yield result if plan.round != 1 else ClientFailure(1, result.client, "train", "as the test says")


@storage
def test_round_in_which_all_fail_changes_nothing(
    job: Any, new_store: Make, memory_store: Store, timeless: Rows, mode: dict[str, Any]
) -> None:
    after_one = job.federate(new_store(), stop=1)
    backend = Through(job.backend, failing)
    assert job.federate(memory_store, backend=backend, stop=2, **mode) == after_one
    row = Checkpoints(memory_store).rows()[1]
    assert row.metrics["clients_failed"] == PER_ROUND
    assert row.metrics["clients_trained"] == 0
    assert row.metrics["waste"] == 1
    assert "train_loss" not in row.metrics
    assert {line["failure"] for line in row.clients} == {"train: as the test says"}
    # a stored failure is a result: a resume that merges the round again asks nobody
    resumed = new_store()
    with pytest.raises(Stopped):
        job.federate(resumed, after(PER_ROUND + 1), backend=backend, stop=2, **mode)
    assert job.federate(resumed, backend=backend, stop=2, **mode) == after_one
    assert timeless(resumed) == timeless(memory_store)


@pytest.mark.parametrize("order", [lambda found: found[::-1], lambda found: found[1:] + found[:1]])
def test_results_are_merged_in_client_order(
    job: Any, new_store: Make, order: Callable[[list[ClientResult]], list[ClientResult]]
) -> None:
    everybody = copy.copy(job)  # the job is the whole session's
    everybody.algorithm = replace(job.algorithm, training=replace(job.algorithm.training, fraction=1.0))
    expected = everybody.federate(new_store(), stop=2)
    assert (
        everybody.federate(new_store(), stop=2, backend=Through(job.backend, lambda _, found: order(list(found))))
        == expected
    )


MODES: list[dict[str, Any]] = [
    {"commit_every": 1},
    {"commit_every": 3},
    {"commit_every": "auto", "keep_updates": True},
    {"commit_every": 1, "mode": "buffered", "buffer": 1, "norm_bound": None},
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.get("mode", str(mode["commit_every"])))


def clocks(store: Store) -> list[float]:
    """The simulated clock at the end of each round."""
    return list(accumulate(row.metrics.get("seconds_simulated", 0.0) for row in Checkpoints(store).rows()))


@pytest.mark.parametrize(
    ("stop", "limit", "seconds", "end"),
    [
        (9, 25.0, [10, 10, 10, 10], 3),  # 30 s is the first that is not below 25
        (9, 20.0, [10, 10, 10], 2),  # exactly
        (9, 25.0, [10, 10], None),
        (9, 25.0, [], None),
        (2, 25.0, [10, 10, 10], 2),  # rounds.stop comes first
        (9, None, [10] * 8, None),
        (9, None, [10] * 9, 9),
        (9, 5.0, [None, 10], 2),  # a round that takes no simulated time
    ],
)
def test_the_end_by_hand(stop: int, limit: float | None, seconds: Sequence[float | None], end: int | None) -> None:
    options = RoundsConfig(stop=stop, stop_simulated_s=limit)
    measured = [{} if each is None else {"seconds_simulated": float(each)} for each in seconds]
    assert options.end(measured) == end


@modes
def test_resumed_run_ends_in_the_same_round(job: Any, new_store: Make, timeless: Rows, mode: dict[str, Any]) -> None:
    job.federate(new := new_store(), stop=6, **mode)
    options = {"stop": 6, "stop_simulated_s": clocks(new)[2], **mode}
    undisturbed = new_store()
    expected = job.federate(undisturbed, **options)
    assert len(clocks(undisturbed)) == 3
    for answers in range(1, 7):
        store, stopped = new_store(), False
        try:
            job.federate(store, after(answers), **options)
        except Stopped:
            stopped = True
        assert stopped or answers > 3, f"stopped after {answers} clients"
        assert job.federate(store, **options) == expected, f"stopped after {answers} clients"
        assert timeless(store) == timeless(undisturbed)
        assert job.federate(store, **options) == expected, "a finished run that is resumed makes no further round"
        assert clocks(store) == clocks(undisturbed)


def test_raised_limit_continues_and_lowered_limit_is_refused(job: Any, new_store: Make) -> None:
    job.federate(new := new_store(), stop=6)
    times, store = clocks(new), new_store()
    job.federate(store, stop=6, stop_simulated_s=times[1])
    with pytest.raises(ConfigError) as error:
        job.federate(store, stop=6, stop_simulated_s=times[0])
    assert error.value.path == "rounds.stop_simulated_s"
    found = job.federate(store, stop=6, stop_simulated_s=times[3])
    assert len(clocks(store)) == 4
    assert found == job.federate(new_store(), stop=6, stop_simulated_s=times[3])
    assert job.federate(store, stop=5) == job.federate(new_store(), stop=5), "without the limit"
    with pytest.raises(ConfigError) as error:
        job.federate(store, stop=4)
    assert error.value.path == "rounds.stop"
