"""How leases end, with simulated workers (`harness.played`), one of which has a fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fl_engine.core.types import ClientFailure, ClientUpdate, Stage
from fl_engine.remote.messages import Lease, result_key
from fl_engine.remote.provisioner import Lost
from tests.harness.played import Act, Played, Scene, Scenes, update_of
from tests.harness.played import scene_of as scene_of  # a fixture

BAD = 2
"""The client whose order fails whatever it is leased with."""


@pytest.mark.parametrize("fault", ["junk", "unable", "train", "drop", "prune"])
def test_bad_worker_fails_no_client(scene_of: Scenes, fault: str) -> None:
    scene = scene_of(12)
    good = [scene.worker(scene.honest(30.0)) for _ in range(2)]
    bad = scene.worker(getattr(scene, fault, None) or scene.fails(fault))  # type: ignore[arg-type]
    assert scene.updates() == 12
    assert scene.account(bad).results == 0 and scene.account(bad).lost == len(bad.taken) >= 1
    assert sum(scene.account(worker).results for worker in good) == 12


@pytest.mark.parametrize(("workers", "asked"), [(4, [0, 1, 1, 1]), (1, [3])])
@pytest.mark.parametrize("stage", ["prune", "train", "evaluate", "pod"])
def test_client_fails_after_attempts(scene_of: Scenes, stage: Stage, workers: int, asked: list[int]) -> None:
    scene = scene_of(1, attempts=3)
    for _ in range(workers):
        scene.worker(scene.unable if stage == "pod" else scene.fails(stage))
    failure = scene.failures()[0]
    assert failure.stage == stage and ("no data here" if stage == "pod" else "no luck") in failure.reason
    assert sorted(len(worker.taken) for worker in scene.workers) == asked


def test_late_result_of_an_ended_lease_is_not_read(scene_of: Scenes) -> None:
    scene = scene_of(3, 3, lease_s=30, attempts=1)

    def cut_off(worker: Played, lease: Lease, worked: float) -> None:
        scene.answer(worker, lease, only=[1])
        worker.there = False

    straggler = scene.worker(cut_off, "weak")
    others = [scene.worker(scene.honest(20.0), "weak", there=False) for _ in range(2)]

    def between() -> None:
        for other in others:
            other.there = bool(straggler.taken)
        if all(other.taken for other in others):
            late = [ClientFailure(0, client, "drop", "late") for client in (0, 2)]
            straggler.send(straggler.leases[0], scene.plan, scene.store, late)

    scene.between = between
    assert scene.updates() == 3
    assert straggler.taken == [(0, 1, 2)] and sorted(other.taken for other in others) == [[(0,)], [(2,)]]


@pytest.mark.parametrize("whose", ["another lease", "another worker", "another configuration"])
def test_result_signed_with_another_key_is_refused(scene_of: Scenes, whose: str) -> None:
    scene = scene_of(1, attempts=1)
    other = scene.worker(scene.honest(), there=False)

    def lies(worker: Played, lease: Lease, worked: float) -> None:
        site = worker.message().site
        key = {
            "another lease": result_key(worker.key, site, "ee" * 8),
            "another worker": result_key(other.key, site, lease.id),
            "another configuration": result_key(worker.key, "other", lease.id),
        }[whose]
        worker.send(lease, scene.plan, scene.store, [update_of(scene.plan.assignments[0])], key)

    scene.worker(lies)
    assert [(failure.stage, failure.code) for failure in scene.failures().values()] == [("validate", "signature")]


def test_busy_coordinator_withdraws_no_lease_of_a_living_worker(scene_of: Scenes) -> None:
    scene, found = scene_of(3, lease_s=30, attempts=1), []
    for seconds in (1.0, 100.0, 200.0):
        scene.worker(scene.honest(seconds))
    for outcome in scene.run():
        found.append(type(outcome))
        for _ in range(9):
            scene.clock.sleep(10.0)
            for worker in scene.workers:
                worker.turn()
    assert found == [ClientUpdate] * 3 and all(scene.account(worker).lost == 0 for worker in scene.workers)


def says_that_it_was_ended(scene: Scene, worker: Played) -> None:
    worker.act = lambda w, lease, worked: (scene.leaving if worked > 290 else scene.works)(w, lease, worked)


def is_evicted(scene: Scene, worker: Played) -> None:
    def lost(name: str, process: str) -> Lost | None:
        if worker.leases and worker.leases[-1].id != worker.done and scene.clock.now > worker.since + 5:
            worker.done = worker.leases[-1].id
            worker.starts += 1
            return Lost("weak: Evicted", False)
        return None

    scene.provisioner.lost = lost  # type: ignore[method-assign]


@pytest.mark.parametrize("befalls", [says_that_it_was_ended, is_evicted])
@pytest.mark.parametrize("drains", [1, 3])
def test_worker_taken_away_again_and_again_fails_the_client(
    scene_of: Scenes, befalls: Callable[[Scene, Played], None], drains: int
) -> None:
    scene = scene_of(1, attempts=2, deadline_s=300, lease_s=20.0)
    scene.provisioner.drains = drains
    worker = scene.worker(scene.works)
    befalls(scene, worker)
    assert worker.name in scene.failures()[0].reason
    assert len(worker.taken) == drains + 2 and scene.clock.passed < (drains + 2) * 300


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("befalls", [Scene.unable, Scene.killed, Scene.works, Scene.silent])
def test_assignment_that_ends_its_worker_fails_alone(scene_of: Scenes, befalls: Act, attempts: int) -> None:
    scene = scene_of(8, 4, attempts=attempts, lease_s=30, deadline_s=300)
    honest = scene.honest()
    for _ in range(2 + attempts):
        scene.worker(lambda w, lease, s: (befalls if BAD in lease.assignment.clients else honest)(w, lease, s), "weak")
    assert [*scene.failures()] == [BAD]
    taken = [clients for worker in scene.workers for clients in worker.taken]
    together = next(clients for clients in taken if BAD in clients and len(clients) > 1)
    assert {clients for clients in taken if {*clients} & {*together}} == {together, *((c,) for c in together)}
    free = befalls is Scene.killed  # a process may be started again once
    assert attempts <= taken.count((BAD,)) <= attempts * (1 + free)
