"""How orders that are lent end: with played devices (`harness.devices`), one of which has a fault."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest

from fl_engine.algorithms import AllLarge
from fl_engine.algorithms.pooled import Training
from fl_engine.backends import BACKENDS, Surroundings
from fl_engine.backends.agents.backend import Agents
from fl_engine.backends.agents.keeper import Invited, Lost
from fl_engine.core.errors import EnvironmentFailure, Replaced, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, RoundPlan
from fl_engine.exchange.client import Site, accept
from fl_engine.exchange.letters import Loan
from fl_engine.exchange.updates import fits_nobody
from fl_engine.fleet.faults import Fault
from fl_engine.testing.tiny import context_of, start_of, tiny_site
from tests.harness.devices import Played, Scene


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda clients=1, **options: Scene(monkeypatch, clients, **options)


def account(scene: Scene, device: Played) -> Any:
    return scene.agents._agents[device.name].letter.account


@pytest.mark.parametrize("fault", ["junk", "unable", "drops_out", "does_not_fit"])
def test_a_bad_device_fails_no_client(scene_of: Callable[..., Scene], fault: str) -> None:
    """It answers at once, and the others are busy: without a rest it would be lent every order that waits."""
    scene = scene_of(12)
    good = [scene.device(scene.honest(30.0)) for _ in range(2)]
    bad = scene.device(getattr(scene, fault))
    found = scene.outcomes()
    assert len(found) == 12 and all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert account(scene, bad).answers == 0 and account(scene, bad).lost == len(bad.taken) >= 1
    assert sum(account(scene, each).answers for each in good) == 12
    assert scene.agents._agents[bad.name].failures == len(bad.taken), "a bad answer ends no row of failures"


@pytest.mark.parametrize("stage", ["drop", "prune", "train", "evaluate"])
def test_an_answer_that_every_device_gives_is_the_client_s_failure(
    scene_of: Callable[..., Scene], stage: Literal["drop", "prune", "train", "evaluate"]
) -> None:
    scene = scene_of(1, attempts=3)
    devices = [scene.device(partial(scene.fails, stage, "the loss is not finite")) for _ in range(4)]
    (failure,) = scene.outcomes().values()
    assert failure == ClientFailure(0, 0, stage, "the loss is not finite")
    assert sorted(len(device.taken) for device in devices) == [0, 1, 1, 1], "three devices, each once"


@pytest.mark.parametrize("fault", ["idle", "sly"])
def test_devices_that_let_orders_lie_keep_nobody_from_getting_them(scene_of: Callable[..., Scene], fault: str) -> None:
    """Two, whose beats are always the last, and an honest one that has nothing to do meanwhile."""
    scene = scene_of(6, lease_s=5.0, wait_s=25.0)
    scene.device(scene.honest(2.0))
    for _ in range(2):
        scene.device(getattr(scene, fault)).takes = False
    found = scene.outcomes()
    assert len(found) == 6 and all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert scene.clock.now < 1000 + 60


def test_however_many_devices_let_orders_lie_an_honest_one_is_asked_before_the_run_stops(
    scene_of: Callable[..., Scene],
) -> None:
    """Ten, each of which keeps the order for a lease: all of them together longer than `wait_s`."""
    scene = scene_of(1, lease_s=5.0, wait_s=15.0)
    for _ in range(10):
        scene.device(scene.idle).takes = False
    scene.device(scene.honest(2.0))
    assert isinstance(scene.outcomes()[0], ClientUpdate)
    assert 1000 + 10 * 5 < scene.clock.now < 1000 + 10 * 5 + 60


def test_a_device_that_was_slow_to_start_is_soon_asked_again(scene_of: Callable[..., Scene]) -> None:
    """The only one; however many orders it has let lie."""
    scene = scene_of(1, lease_s=5.0)
    device = scene.device(scene.idle)
    device.takes = False

    def between() -> None:
        if scene.clock.now > 1000 + 200:
            device.takes, device.act = True, scene.honest(2.0)

    scene.between = between
    assert isinstance(scene.outcomes()[0], ClientUpdate)
    assert scene.clock.now < 1000 + 200 + 20


@pytest.mark.parametrize(("before_s", "lost"), [(60.0, 0), (5.0, 1)])
def test_a_device_that_looks_as_an_earlier_run_s_lease_lets_it_loses_no_order(
    scene_of: Callable[..., Scene], before_s: float, lost: int
) -> None:
    """It is idle, looks next after 25 s, and does not know yet that a lease is 5 s now. One that knows, from the letter
    of a run with the same lease, should have looked."""
    scene = scene_of(1, lease_s=5.0)
    device = scene.device(scene.honest(12.0))
    scene.post.write(
        scene.post.roster.member(device.name), scene.post.last(scene.post.roster.member(device.name)), lease_s=before_s
    )
    device.there = False
    scene.between = lambda: setattr(device, "there", scene.clock.now > 1000 + 25)
    assert isinstance(scene.outcomes()[0], ClientUpdate)
    assert account(scene, device).lost == lost


def test_who_beats_and_takes_no_order_is_named(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, lease_s=5.0, wait_s=25.0)
    scene.device(scene.idle).takes = False
    scene.device(scene.honest()).there = False
    with pytest.raises(
        Stopped, match=r"have not answered\. weak-1 beat, but took none: see what .* Invited are weak-1"
    ):
        scene.outcomes()


def test_a_client_whose_place_takes_no_order_is_given_up_where_others_have_answered(
    scene_of: Callable[..., Scene],
) -> None:
    """As with placement=device: its own pod beats, and no other one may have its order."""
    scene = scene_of(10, lease_s=20.0, wait_s=100.0)
    scene.keeper.spares = True
    scene.fleet[9] = Device(9, "own", 100.0, 0.0)
    for _ in range(3):
        scene.device(scene.honest(5.0), "weak")
    lazy = scene.device(scene.idle, "own")
    lazy.takes = False
    found = scene.outcomes()
    failure = found.pop(9)
    assert (
        isinstance(failure, ClientFailure)
        and failure.stage == "pod"
        and f"({lazy.name}, which beats)" in failure.reason
    )
    assert [type(outcome) for outcome in found.values()] == [ClientUpdate] * 9 and scene.clock.now < 1000 + 200


def test_a_device_with_data_of_its_own_that_rests_is_said_to_have_failed(scene_of: Callable[..., Scene]) -> None:
    """And of what: it is the only one that may have its client's order, and rests longer after each failure. In later
    rounds too; once it has answered an order, no longer."""
    scene = scene_of(2, wait_s=100.0, attempts=20)
    scene.agents._seats = {}
    scene.device(scene.honest())
    bad = scene.device(scene.unable)
    for round in range(2):
        scene.plan = replace(scene.plan, round=round, orders=tuple(replace(o, round=round) for o in scene.plan.orders))
        found = scene.outcomes()
        failure = found[1]
        assert isinstance(found[0], ClientUpdate) and isinstance(failure, ClientFailure)
        assert failure.reason.startswith("the device that holds its data has not taken the order for 100 s")
        assert failure.reason.endswith("failed, and it rests: weak-2 could not carry out the order: no data here")
    bad.act = scene.honest()
    scene.clock.now += 1000
    scene.plan = replace(scene.plan, round=2, orders=tuple(replace(o, round=2) for o in scene.plan.orders))
    assert all(isinstance(outcome, ClientUpdate) for outcome in scene.outcomes().values())
    assert scene.agents._agents[bad.name].why == ""


def test_where_no_place_takes_an_order_the_run_stops(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, lease_s=20.0, wait_s=100.0)
    scene.keeper.spares = True
    scene.device(scene.idle).takes = False
    with pytest.raises(Stopped, match="weak-1 beat, but took none"):
        scene.outcomes()


def test_where_nobody_is_invited_it_says_how_to_invite() -> None:
    assert Invited(()).advice([], ["medium"]) == "No device is invited: flexfleet invite --tier medium"


def test_where_nobody_is_invited_it_says_where_it_has_looked(scene_of: Callable[..., Scene]) -> None:
    """Somebody may have invited devices on another machine, or in another folder."""
    scene = scene_of(1, wait_s=100)
    said = re.escape(f"No device is invited ({scene.post.roster.store.uri()} lists none; where to look is set")
    with pytest.raises(Stopped, match=said):
        list(scene.begin(keeper=None).run(None, scene.plan))  # type: ignore[arg-type]


def test_who_is_to_drop_out_is_believed(scene_of: Callable[..., Scene]) -> None:
    """`rounds.faults` say so of the second client, and every device would."""
    scene = scene_of(2)
    scene.begin(befalls=lambda order: Fault("drop", 0.5) if order.client else Fault("slow", 0.5, 2.0))
    devices = [scene.device(scene.drops_out), *(scene.device(scene.honest(5.0)) for _ in range(2))]
    found = scene.outcomes()
    assert isinstance(found[0], ClientUpdate), "another device was asked"
    dropping = [client for client in range(2) if client in {client for _, client in devices[0].taken}]
    assert dropping and (isinstance(found[1], ClientFailure) or 1 not in dropping)
    assert sum(client == 1 for device in devices for _, client in device.taken) == 1


def test_whom_an_order_does_not_fit_follows_from_the_order() -> None:
    """Where the fleet says what is free, as the client itself finds it; else only the client knows."""
    fleet = tuple(Device(c, "strong", 120.0, 40.0) for c in range(6))
    algorithm = AllLarge(training=Training(fraction=1.0), eligible="capable")
    site = tiny_site(algorithm, fleet=fleet)
    plan = algorithm.plan(start_of(algorithm, site), context_of(site, 0, 0))
    said = {order.client: isinstance(accept(algorithm, order, site), ClientFailure) for order in plan.orders}
    assert set(said.values()) == {True, False}
    assert {order.client: fits_nobody(order, site.rules, algorithm) for order in plan.orders} == said
    for order in plan.orders:
        assert not fits_nobody(order, replace(site.rules, seed=None), algorithm)
        assert not fits_nobody(replace(order, evaluates=True), site.rules, algorithm)
        assert not fits_nobody(order, None, algorithm)


def test_an_order_goes_to_every_device_before_one_gets_it_again(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, attempts=3, deadline_s=300)
    hung, slow = scene.device(scene.hung), scene.device(scene.honest(100.0))
    scene.between = lambda: setattr(slow, "there", scene.clock.now > 1100)
    slow.post.home.delete(f"{slow.name}/beat.json")
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate)
    assert len(hung.taken) == 1 and len(slow.taken) == 1
    assert scene.agents._agents[hung.name].failures == 1, "a deadline is a failure as well"


@pytest.mark.parametrize("orders, honest, its", [(100, 9, 20), (13, 9, 3), (20, 19, 1), (100, 1, 99)])
def test_a_device_that_answers_at_once_is_no_majority_of_a_round(
    scene_of: Callable[..., Scene], orders: int, honest: int, its: int
) -> None:
    """The worst lie: what it answers is its own choice, and costs it no time. Of two devices one may do all."""
    scene = scene_of(orders)
    good = [scene.device(scene.honest(30.0)) for _ in range(honest)]
    liar = scene.device(scene.honest(0.0))
    assert len(scene.outcomes()) == orders
    assert account(scene, liar).answers == its
    assert sum(account(scene, each).answers for each in good) == orders - its


@pytest.mark.parametrize("room", [1, 7])
def test_the_faster_half_of_the_devices_waits_for_no_slower_one(scene_of: Callable[..., Scene], room: int) -> None:
    """All orders but those that the slow ones hold are answered while these are at their first."""
    scene = scene_of(200, room=room)
    fast = [scene.device(scene.honest(1.0), "weak") for _ in range(5)]
    slow = [scene.device(scene.honest(2000.0), "weak") for _ in range(5)]
    assert len(scene.outcomes()) == 200 and scene.clock.now < 1000 + 2010
    assert [len(device.taken) for device in slow] == [1] * 5
    assert all(account(scene, device).answers <= 40 for device in fast)


def test_one_device_has_what_the_others_leave(scene_of: Callable[..., Scene]) -> None:
    """Nine are there when the round begins: three end, three fall silent, three cannot carry out anything."""
    scene = scene_of(50, lease_s=20.0, attempts=4)
    good = scene.device(scene.honest(1.0))
    others = [scene.device(act) for act in (scene.leaving, scene.sly, scene.unable) for _ in range(3)]
    scene.between = lambda: [setattr(each, "there", not each.done) for each in others[:3]] and None
    assert [type(outcome) for outcome in scene.outcomes().values()] == [ClientUpdate] * 50
    assert account(scene, good).answers == 50 and scene.clock.now < 1000 + 200


def test_an_order_that_the_others_failed_has_room_at_the_device_that_has_had_its_share(
    scene_of: Callable[..., Scene],
) -> None:
    """The others have answered well since, so that all three count."""
    scene, bad = scene_of(30, wait_s=100.0), set[int]()

    def first(device: Played, loan: Loan, worked: float) -> None:
        scene.honest(300.0 if len(device.taken) == 20 else 0.0)(device, loan, worked)

    def other(device: Played, loan: Loan, worked: float) -> None:
        client = loan.assignment.clients[0]
        if len(taker.taken) == 20 and worked == 0.0 and not bad:
            bad.add(client)
        (scene.unable if client in bad else scene.honest(10.0))(device, loan, worked)

    others = [scene.device(other), scene.device(other)]
    taker = scene.device(first)
    assert [type(outcome) for outcome in scene.outcomes().values()] == [ClientUpdate] * 30
    assert bad and all(bad & {client for _, client in device.taken} for device in [taker, *others])
    assert account(scene, taker).answers == 21


def test_the_only_device_that_fails_gets_the_order_until_its_attempts_are_used_up(
    scene_of: Callable[..., Scene],
) -> None:
    scene = scene_of(1, attempts=3)
    device = scene.device(scene.unable)
    (failure,) = scene.outcomes().values()
    assert isinstance(failure, ClientFailure) and "no data here" in failure.reason
    assert len(device.taken) == 3


def test_a_coordinator_that_is_busy_takes_no_order_from_devices_that_live(
    scene_of: Callable[..., Scene], caplog: Any
) -> None:
    """Who takes the outcomes merges for longer than a lease; meanwhile the devices beat, and one answers."""
    scene = scene_of(3, lease_s=30, attempts=1)
    for seconds in (1.0, 100.0, 200.0):
        scene.device(scene.honest(seconds))
    found = []
    for outcome in scene.run():
        found.append(outcome)
        for _ in range(9):
            scene.clock.sleep(10.0)
            for device in scene.devices:
                device.turn()
    assert [type(outcome) for outcome in found] == [ClientUpdate] * 3
    assert "silent" not in caplog.text


def test_a_device_that_is_killed_again_and_again_loses_the_order(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, attempts=2)
    killed = scene.device(scene.killed)
    good = scene.device(scene.honest(5.0))
    good.there = False
    scene.between = lambda: setattr(good, "there", scene.clock.now > 1050)
    good.post.home.delete(f"{good.name}/beat.json")
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate)
    assert len(killed.taken) == 1 and killed.boots == 2 and len(good.taken) == 1
    assert scene.clock.now < 1000 + 300, "long before the deadline"


@pytest.mark.parametrize(("starts", "said"), [((0, 1, 0, 1, 0), 1), ((0, 1, 2, 3), 0)], ids=["two", "started again"])
def test_two_processes_with_one_invitation_are_told_once(
    scene_of: Callable[..., Scene], caplog: pytest.LogCaptureFixture, starts: tuple[int, ...], said: int
) -> None:
    scene = scene_of(10)
    scene.device(scene.honest(5.0))
    device = scene.device(scene.honest(30.0))

    def turn() -> None:
        device.boots = starts[min(int(scene.clock.now - 1000) // 30, len(starts) - 1)]

    scene.between = turn
    scene.outcomes()
    told = [each.getMessage() for each in caplog.records if "two processes answer as" in each.getMessage()]
    assert len(told) == said and all(f"invite --revoke {device.name}" in each for each in told)


def test_a_device_that_gives_its_order_back_does_so_once_for_nothing(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, attempts=2)
    device = scene.device(scene.leaving)
    (failure,) = scene.outcomes().values()
    assert isinstance(failure, ClientFailure) and failure.reason == f"{device.name} was ended"
    assert len(device.taken) == 3


def test_an_order_that_has_its_pod_evicted_again_and_again_does_not_hold_its_round_open(
    scene_of: Callable[..., Scene],
) -> None:
    """Nobody is left to say so but the cluster: a node that runs out of memory kills what it evicts at once."""
    scene = scene_of(1, attempts=2)
    scene.keeper.drains, scene.until = 3, 3000.0
    device = scene.device(scene.hung)

    def lost(name: str, heard: float) -> Lost | None:
        if not device.taken or device.done == device.taken[-1][0] or scene.clock.now < device.since + 5:
            return None
        device.done = device.taken[-1][0]
        device.restart()
        return Lost("weak: Evicted", False)

    scene.keeper.lost = lost  # type: ignore[method-assign]
    (failure,) = scene.outcomes().values()
    assert isinstance(failure, ClientFailure) and failure.reason == f"{device.name} is lost: weak: Evicted"
    assert len(device.taken) == 3 + 2


def test_a_device_that_says_all_the_time_that_it_was_ended_does_not_hold_its_round_open(
    scene_of: Callable[..., Scene],
) -> None:
    """The worst lie of a pod that alone may have the order: it keeps it until just before the deadline, each time."""
    scene = scene_of(1, attempts=2, deadline_s=300, lease_s=20.0)
    scene.keeper.drains = 3

    def lives_on(device: Played, loan: Loan, worked: float) -> None:
        (scene.leaving if worked > 290 else scene.hung)(device, loan, worked)

    device = scene.device(lives_on)
    (failure,) = scene.outcomes().values()
    assert isinstance(failure, ClientFailure) and failure.reason == f"{device.name} was ended"
    assert len(device.taken) == 3 + 2 and scene.clock.now < 1000 + 5 * 300


def test_who_was_replaced_writes_no_letter(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, wait_s=60)
    device = scene.device(scene.honest(20.0))
    around = Surroundings(
        site=Site(None, (), scene.fleet, None, None, 0),  # type: ignore[arg-type]
        mailbox=scene.mailbox,
        run_id="a",
        agents=scene.options,
        post=scene.post,
        should_stop=lambda: turn(),
    )
    taken = []

    def turn() -> bool:
        if scene.clock.now > 1010 and not taken:
            scene.post.home.create("lease/00002.json", b"{}")  # of a coordinator elsewhere, while this one was stopped
            taken.append(device.letter().number)
            scene.clock.sleep(30.0)
        device.turn()
        return False

    with pytest.raises(Replaced), BACKENDS["agents"](around) as backend:
        list(backend.run(None, scene.plan))  # type: ignore[arg-type]
    assert device.letter().number == taken[0] and device.letter().run == "a", "it is not told that the run is over"


@pytest.mark.parametrize("differs", ["key", "configuration"])
def test_no_loan_of_an_earlier_run_of_the_same_name_counts(
    scene_of: Callable[..., Scene], differs: str, caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    scene = scene_of(1)
    device = scene.device(scene.honest(20.0))
    scene.until = 10.0
    with pytest.raises(Stopped):
        scene.outcomes()
    before = device.taken[0][0]
    loan, more = device.letter().loan, {}
    assert loan is not None and loan.id == before
    if differs == "configuration":
        more = {"site_sums": {"run.json": "1" * 64 + ":9"}}
    scene.until = 1000.0
    scene.begin(b"n" * 32 if differs == "key" else b"k" * 32, **more)
    device.answer(loan, scene.plan, scene.store)  # trained as the earlier run had it
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate) and "which has its order" not in caplog.text
    assert len(device.taken) == 2, "it was asked again"


def test_what_lies_in_the_store_changes_nothing_that_devices_are_told(scene_of: Callable[..., Scene]) -> None:
    """Whoever can write the store puts another record there before each round."""
    scene = scene_of(1)
    sums = {"run.json": "1" * 64 + ":9", "pool.json": "2" * 64 + ":9"}
    scene.begin(site_sums=sums)
    told = []

    def noted(device: Played, loan: Loan, worked: float) -> None:
        told.append((loan.assignment.site, device.letter().site))
        device.answer(loan, scene.plan, scene.store)

    scene.device(noted)
    for content in (b"{}", b'{"config": {"model": {"name": "os:abort"}}}'):
        scene.store.put("site/run.json", content)
        assert isinstance(scene.outcomes()[0], ClientUpdate)
        scene.store.delete(*scene.store.list("rounds/"))
    assert told == [(sums, told[0][1])] * 2


def test_an_order_of_this_run_is_waited_for_and_its_letter_is_renewed(
    scene_of: Callable[..., Scene], caplog: Any
) -> None:
    caplog.set_level(logging.INFO)
    scene = scene_of(1)
    device = scene.device(scene.honest(20.0))
    scene.until = 10.0
    with pytest.raises(Stopped):
        scene.outcomes()
    number, scene.until = device.letter().number, 1000.0
    scene.begin()
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate) and len(device.taken) == 1
    assert "which has its order" in caplog.text and device.letter().number >= number + 2


def test_who_is_invited_while_the_run_waits_gets_its_order(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1, wait_s=600)

    def between() -> None:
        if scene.clock.now > 1100 and not scene.devices:
            scene.device(scene.honest())

    scene.between = between
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate)
    assert scene.clock.now < 1000 + 200


def test_who_was_revoked_between_two_rounds_reads_so(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(1)
    device = scene.device(scene.honest())
    other = scene.device(scene.honest())
    scene.outcomes()
    scene.post.revoke(device.name)
    scene.post.say(scene.agents._agents[device.name], None)  # at the same time, with the same number
    assert not device.letter().revoked
    scene.devices.remove(device)
    scene.outcomes()
    assert device.letter().revoked and device.name not in scene.agents._agents
    assert not other.letter().revoked


def test_a_device_that_was_killed_after_its_answer_is_told_that_it_is_done(scene_of: Callable[..., Scene]) -> None:
    scene = scene_of(2)
    device = scene.device(scene.honest(2.0))
    scene.device(scene.honest(120.0))
    restarted = []

    def between() -> None:
        # It does not remember that it has answered.
        if scene.agents._agents and scene.agents._agents[device.name].letter.account.answers and not restarted:
            restarted.append(device.done)
            device.restart()
            device.done, device.act = "", Scene.hung

    scene.between = between
    scene.outcomes()
    assert restarted and device.letter().loan is None and len(device.taken) == 1


def test_a_store_that_does_not_answer_at_the_end_does_not_fail_the_run(
    scene_of: Callable[..., Scene], monkeypatch: Any
) -> None:
    scene = scene_of(1)
    scene.device(scene.honest())
    assert len(scene.outcomes()) == 1

    def broken(*_: Any) -> None:
        raise EnvironmentFailure("no answer")

    monkeypatch.setattr(type(scene.post.home), "put", broken)
    scene.agents.finish()


def test_idle_devices_cost_a_letter_in_ten_minutes_and_absent_ones_few_looks(
    scene_of: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = scene_of(1, deadline_s=7200, lease_s=60)
    scene.device(scene.honest(3600.0))
    idle, absent = scene.device(scene.honest()), scene.device(scene.honest())
    absent.there = False
    scene.post.home.delete(f"{absent.name}/beat.json")
    looks: dict[str, int] = {}
    get = type(scene.post.home).get

    def counted(store: Any, key: str, limit: int | None = None) -> bytes:
        if key.endswith("beat.json"):
            looks[key] = looks.get(key, 0) + 1
        return get(store, key, limit)

    monkeypatch.setattr(type(scene.post.home), "get", counted)
    (outcome,) = scene.outcomes().values()
    assert isinstance(outcome, ClientUpdate)
    assert idle.letter().number <= 8, "the sign of life each ten minutes"
    assert looks[f"{absent.name}/beat.json"] <= 100 and looks[f"{idle.name}/beat.json"] <= 200


def test_who_was_replaced_lets_its_keeper_do_nothing(scene_of: Callable[..., Scene]) -> None:
    """The pods that a backend keeps are the other coordinator's."""
    scene, kept = scene_of(1), list[float]()
    scene.device(scene.honest(60.0))

    class Noted(Invited):
        def keep(self, *_: Any) -> bool:
            kept.append(scene.clock.now)
            return False

    def check() -> None:
        if scene.clock.now > 1030:
            raise Replaced("another one has the letters")

    scene.begin(check=check, keeper=Noted(scene.fleet))
    scene.between = lambda: scene.clock.sleep(60.0 if 1010 < scene.clock.now < 1030 else 0.0)  # is stopped meanwhile
    with pytest.raises(Replaced):
        scene.outcomes()
    assert kept and max(kept) < 1030


def test_who_was_revoked_while_it_held_an_order_gets_none_in_the_next_round(
    scene_of: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round had enough answers before its own."""
    scene, lent = scene_of(2), list[str]()
    real = Agents._lend_to
    monkeypatch.setattr(Agents, "_lend_to", lambda s, agent, *rest: (lent.append(agent.name), real(s, agent, *rest)))
    scene.device(scene.honest(3.0))
    late = scene.device(scene.hung)
    for _ in scene.run():
        break
    assert lent.count(late.name) == 1
    scene.post.revoke(late.name)
    scene.devices.remove(late)
    scene.plan = RoundPlan(1, tuple(replace(order, round=1) for order in scene.plan.orders))
    scene.outcomes()
    assert lent.count(late.name) == 1
