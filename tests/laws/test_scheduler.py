"""Which worker gets which assignments, and what a round waits for, with simulated workers (`harness.played`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fl_engine.algorithms import FedAvg
from fl_engine.algorithms.training import Training
from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.core.clients import LEASE_S
from fl_engine.core.errors import Replaced, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, RoundPlan
from fl_engine.exchange.client import Site, accept
from fl_engine.exchange.updates import fits_nobody
from fl_engine.remote.messages import HEARTBEAT, MESSAGE, Lease
from fl_engine.remote.provisioner import Enrolled
from fl_engine.testing.tiny import context_of, start_of, tiny_site
from tests.harness.played import Act, Played, Scene, Scenes, update_of
from tests.harness.played import scene_of as scene_of  # a fixture


def in_round(scene: Scene, round: int) -> None:
    scene.plan = RoundPlan(round, tuple(replace(assignment, round=round) for assignment in scene.plan.assignments))


@pytest.mark.parametrize("assignments, honest, its", [(100, 9, 20), (13, 9, 3), (100, 1, 99)])
def test_fast_liar_gets_no_majority(scene_of: Scenes, assignments: int, honest: int, its: int) -> None:
    scene = scene_of(assignments)
    for _ in range(honest):
        scene.worker(scene.honest(30.0))
    liar = scene.worker(scene.honest(0.0))
    assert scene.updates() == assignments and scene.account(liar).results == its


def test_coordinator_measures_the_time_of_each_lease(scene_of: Scenes) -> None:
    scene = scene_of(2)
    scene.worker(scene.honest(30.0))
    found = [result.metrics[LEASE_S] for result in scene.results().values() if isinstance(result, ClientUpdate)]
    assert len(found) == 2 and all(30 <= seconds < 35 for seconds in found)


@pytest.mark.parametrize("fault", [Scene.idle, Scene.silent])
@pytest.mark.parametrize(("clients", "bad"), [(6, 2), (1, 10)])
def test_untaken_leases_go_to_an_honest_worker(scene_of: Scenes, fault: Act, clients: int, bad: int) -> None:
    scene = scene_of(clients, lease_s=5.0, wait_s=100.0)
    for _ in range(bad):
        scene.worker(fault, takes=False)
    scene.worker(scene.honest(1.0))
    assert scene.updates() == clients and scene.clock.passed < 70 * bad


def test_run_stops_if_no_worker_takes_an_assignment(scene_of: Scenes) -> None:
    scene = scene_of(1, lease_s=5.0, wait_s=100.0)
    scene.worker(scene.idle, takes=False)
    scene.worker(scene.honest(), there=False)
    with pytest.raises(Stopped, match="flexfleet invite"):
        scene.results()
    assert 100 < scene.clock.passed < 200


def test_client_is_given_up_if_the_quorum_allows_it(scene_of: Scenes) -> None:
    scene = scene_of(10, lease_s=20.0, wait_s=100.0)
    scene.provisioner.quorum = 0.9
    scene.fleet[9] = Device(9, "own", 100.0, 0.0)
    for _ in range(3):
        scene.worker(scene.honest(5.0), "weak")
    scene.worker(scene.idle, "own", takes=False)
    ((client, failure),) = scene.failures().items()
    assert (client, failure.stage) == (9, "pod") and scene.clock.passed < 250


def test_round_below_the_quorum_stops(scene_of: Scenes) -> None:
    scene = scene_of(4, attempts=1)
    scene.provisioner.quorum = 0.9
    scene.worker(lambda w, lease, s: (scene.unable if w.taken[-1] == (0,) else scene.honest())(w, lease, s))
    with pytest.raises(Stopped, match="3 of 4"):
        scene.results()


def test_prune_failure_counts_only_if_it_follows_from_the_assignment() -> None:
    """With simulated memory the coordinator can compute whether an assignment fits."""
    fleet = tuple(Device(c, "strong", 120.0, 40.0) for c in range(6))
    algorithm = FedAvg(training=Training(fraction=1.0), eligible="capable")
    site = tiny_site(algorithm, fleet=fleet)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, 0))
    fails = {
        assignment.client: isinstance(accept(algorithm, assignment, site), ClientFailure)
        for assignment in plan.assignments
    }
    assert {*fails.values()} == {True, False}
    assert {
        assignment.client: fits_nobody(assignment, site.rules, algorithm) for assignment in plan.assignments
    } == fails
    for assignment in plan.assignments:
        assert not fits_nobody(assignment, replace(site.rules, seed=None), algorithm)
        assert not fits_nobody(replace(assignment, evaluates=True), site.rules, algorithm)
        assert not fits_nobody(assignment, None, algorithm)


def stopped_half_way(scene: Scene) -> None:
    scene.until = 10.0
    with pytest.raises(Stopped):
        scene.results()
    scene.until = 1000.0


def test_restarted_coordinator_waits_for_missing_results(scene_of: Scenes) -> None:
    scene = scene_of(3, 3, attempts=1, lease_s=30)
    whole = scene.plan

    def act(worker: Played, lease: Lease, worked: float) -> None:
        worker.beat("working", lease.id)
        if worked > 3:
            clients = (0, 1, 2) if worked > 60 else (1,)
            worker.send(lease, whole, scene.store, [update_of(whole.assignment_of[client]) for client in clients])

    worker = scene.worker(act, "weak")
    stopped_half_way(scene)
    number, scene.plan = worker.message().number, RoundPlan(0, (whole.assignments[0], whole.assignments[2]), adopted=1)
    scene.begin()
    assert scene.updates() == 2 and worker.taken == [(0, 1, 2)] and worker.message().number > number


@pytest.mark.parametrize("differs", ["configuration", "assignments", "process"])
def test_other_lease_is_not_adopted(scene_of: Scenes, differs: str) -> None:
    scene = scene_of(1)
    worker = scene.worker(scene.honest(20.0))
    stopped_half_way(scene)
    (lease,), old = worker.leases, scene.plan
    if differs == "assignments":
        scene.plan = RoundPlan(0, (replace(old.assignments[0], seed=77),))
    if differs == "process":
        worker.starts += 1
        worker.beat("idle")
    scene.begin(site={"run.json": "1" * 64 + ":9"} if differs == "configuration" else None)
    worker.send(lease, old, scene.store, [ClientFailure(0, 0, "drop", "of another run")])
    worker.act = scene.honest(0.0)
    assert scene.updates() == 1 and len({lease.id for lease in worker.leases}) == 2


def test_replaced_coordinator_writes_no_message(scene_of: Scenes, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, needed = scene_of(1, wait_s=60), list[float]()
    worker, numbers = scene.worker(scene.honest(20.0)), list[int]()
    monkeypatch.setattr(Enrolled, "need", lambda *_: needed.append(scene.clock.passed))

    def turn() -> bool:
        if scene.clock.passed > 10 and not numbers:
            scene.mailboxes.home.create("lease/00002.json", b"{}")
            numbers.append(worker.message().number)
            scene.clock.sleep(30.0)
        worker.turn()
        return False

    places: dict[str, Any] = {"mailbox": scene.mailbox, "mailboxes": scene.mailboxes, "registry": scene.registry}
    site: Any = Site(None, (), scene.fleet, None, None, 0)  # type: ignore[arg-type]
    around = Surroundings(site, run_id="a", agents=scene.options, should_stop=turn, **places)
    with pytest.raises(Replaced), BACKENDS["agents"](around) as backend:
        list(backend.run(None, scene.plan))  # type: ignore[arg-type]
    assert worker.message().number == numbers[0] and worker.message().run == "a"
    assert needed and max(needed) < 30


@pytest.mark.parametrize("own_data", [False, True])
def test_device_invited_while_the_run_waits_gets_an_assignment(scene_of: Scenes, own_data: bool) -> None:
    scene = scene_of(1, wait_s=600)
    scene.begin(most=9 if own_data else None)
    scene.between = lambda: scene.workers or scene.clock.passed < 100 or scene.worker(scene.honest())
    assert scene.updates() == 1 and scene.clock.passed < 200


@pytest.mark.parametrize("holds", [True, False])
def test_revoked_device_gets_no_assignment_in_the_next_round(scene_of: Scenes, holds: bool) -> None:
    scene = scene_of(2)
    scene.worker(scene.honest(3.0))
    revoked = scene.worker(scene.works if holds else scene.honest(3.0))
    for _ in scene.run():
        if holds:
            break
    before = len(revoked.taken)
    scene.mailboxes.revoke(scene.registry, revoked.name)
    if not holds:
        scene.remote.workers.send(scene.remote.workers.by_name[revoked.name], None)  # at the same time
        assert not revoked.message().revoked
    in_round(scene, 1)
    assert scene.updates() == 2 and len(revoked.taken) == before
    assert revoked.message().revoked and revoked.name not in scene.remote.workers.by_name


def test_idle_and_absent_workers_cost_few_requests(scene_of: Scenes) -> None:
    scene = scene_of(1, deadline_s=7200, lease_s=60)
    scene.worker(scene.honest(3600.0))
    idle, absent = scene.worker(scene.honest()), scene.worker(scene.honest(), there=False)
    home: Any = scene.mailboxes.home
    home.puts.clear()
    assert scene.updates() == 1
    assert home.puts[f"{idle.name}/{MESSAGE}"] <= 8, "one in ten minutes"
    assert home.gets[f"{absent.name}/{HEARTBEAT}"] <= 100 and home.gets[f"{idle.name}/{HEARTBEAT}"] <= 200


def test_message_with_a_lease_holds_no_key(scene_of: Scenes) -> None:
    scene, seen = scene_of(1), list[bytes]()

    def act(worker: Played, lease: Lease, worked: float) -> None:
        seen.append(scene.mailboxes.home.get(f"{worker.name}/{MESSAGE}"))
        scene.answer(worker, lease)

    worker = scene.worker(act)
    assert scene.updates() == 1 and worker.leases[0].id.encode() in seen[0]
    for key in (worker.key, worker.invitation.key, worker.id):
        assert key.encode() not in seen[0]
