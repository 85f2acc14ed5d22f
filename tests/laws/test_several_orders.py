"""Devices that hold several orders at once: what befalls one of these, or a device, is not the others' failure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.errors import Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, RoundPlan
from fl_engine.exchange.letters import Leased, Loan
from fl_engine.exchange.mailbox import Mailbox
from tests.harness.devices import Played, Scene

BAD = 2
"""The client whose order spoils whatever it is held with."""


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scene]:
    return lambda clients, room, **options: Scene(monkeypatch, clients, room, **options)


@pytest.fixture
def hands() -> list[tuple[str, tuple[int, ...]]]:
    """(device, clients) of each loan that was taken."""
    return []


def noting(act: Callable[..., None], hands: list[tuple[str, tuple[int, ...]]]) -> Callable[[Played, Loan, float], None]:
    seen = set[str]()

    def noted(device: Played, loan: Loan, worked: float) -> None:
        if loan.id not in seen:
            seen.add(loan.id)
            hands.append((device.name, loan.assignment.clients))
        act(device, loan, worked)

    return noted


def test_orders_are_shared_out_and_none_gets_more_than_it_has_room_for(
    scene_of: Callable[..., Scene], hands: list[Any]
) -> None:
    scene = scene_of(10, 4)
    devices = [scene.device(noting(scene.honest(), hands), "weak") for _ in range(2)]
    found = scene.outcomes()
    assert len(found) == 10 and all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert [len(clients) for _, clients in hands] == [4, 4, 1, 1]
    assert sorted(client for _, clients in hands for client in clients) == list(range(10))
    for device in devices:
        assert device.letter().number == 1 + 2, "one letter for each loan"
        assert scene.agents._agents[device.name].letter.account.answers == 5


def test_a_device_that_was_invited_is_one_client(scene_of: Callable[..., Scene], hands: list[Any]) -> None:
    scene = scene_of(5, None)
    scene.device(noting(scene.honest(), hands), "weak")
    assert len(scene.outcomes()) == 5
    assert [len(clients) for _, clients in hands] == [1] * 5


def unable(device: Played, loan: Loan, worked: float) -> None:
    Scene.unable(device, loan, worked)


def killed(device: Played, loan: Loan, worked: float) -> None:
    """By the kernel, for its memory, each time that it begins."""
    device.restart()
    device.beat("working", loan.id)


def late(device: Played, loan: Loan, worked: float) -> None:
    """It never comes to an end."""
    device.beat("working", loan.id)


def silent(device: Played, loan: Loan, worked: float) -> None:
    """It has beaten once, and says nothing more until it gets another letter."""


@pytest.mark.parametrize("attempts", [1, 2])
@pytest.mark.parametrize("befalls", [unable, killed, late, silent])
def test_the_order_that_takes_its_device_with_it_fails_alone(
    scene_of: Callable[..., Scene], hands: list[Any], befalls: Callable[..., None], attempts: int
) -> None:
    scene = scene_of(8, 4, attempts=attempts, lease_s=30, deadline_s=300)
    honest = scene.honest()

    def act(device: Played, loan: Loan, worked: float) -> None:
        (befalls if BAD in loan.assignment.clients else honest)(device, loan, worked)

    for _ in range(2 + attempts):
        scene.device(noting(act, hands), "weak")
    found = scene.outcomes()
    failed = [client for client, outcome in found.items() if isinstance(outcome, ClientFailure)]
    assert len(found) == 8 and failed == [BAD]
    with_it = [clients for _, clients in hands if BAD in clients]
    assert len(with_it[0]) > 1 and with_it[1:] == [(BAD,)] * attempts
    times = Counter(client for _, clients in hands for client in clients)
    assert {times[client] for client in with_it[0] if client != BAD} == {2}
    assert {clients for _, clients in hands if set(clients) & {*with_it[0]}} == {
        with_it[0],
        *((client,) for client in with_it[0]),
    }, "each of those that it was held with is lent by itself"


def test_one_bad_answer_of_several_is_asked_again_and_the_loan_goes_on(
    scene_of: Callable[..., Scene], hands: list[Any]
) -> None:
    scene = scene_of(3, 3)

    def act(device: Played, loan: Loan, worked: float) -> None:
        if worked < 5:
            keys = loan.assignment.keys
            box = Mailbox(Leased(scene.store, loan.id), key=lambda order: bytes.fromhex(keys[order.client]))
            box.put_outcome(scene.plan, ClientFailure(0, 1, "train", "the loss is not finite"))
            device.beat("working", loan.id)
        elif worked > 60:
            device.answer(loan, scene.plan, scene.store)

    first = scene.device(noting(act, hands), "weak")
    other = scene.device(noting(scene.honest(), hands), "weak")
    other.there = False
    scene.between = lambda: setattr(other, "there", bool(hands))
    other.post.home.delete(f"{other.name}/beat.json")
    found = scene.outcomes()
    assert all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert hands == [(first.name, (0, 1, 2)), (other.name, (1,))]
    assert len(first.taken) == 1 and scene.agents._agents[first.name].letter.account.lost == 1


def test_what_a_straggler_sends_replaces_no_answer_of_those_that_have_its_orders(
    scene_of: Callable[..., Scene], hands: list[Any]
) -> None:
    """It has answered one of three, was cut off, and sends the others when two more devices have them."""
    scene = scene_of(3, 3, lease_s=30, attempts=1)
    lent: list[Loan] = []

    def cut_off(device: Played, loan: Loan, worked: float) -> None:
        if not lent:
            lent.append(loan)
            device.answer(loan, scene.plan, scene.store, only=[1])
        device.there = False

    straggler = scene.device(noting(cut_off, hands), "weak")
    others = [scene.device(noting(scene.honest(20.0), hands), "weak") for _ in range(2)]
    for other in others:
        other.there = False
        other.post.home.delete(f"{other.name}/beat.json")

    def between() -> None:
        for other in others:
            other.there = bool(hands)
        if len(hands) == 3:
            keys = lent[0].assignment.keys
            box = Mailbox(Leased(scene.store, lent[0].id), key=lambda order: bytes.fromhex(keys[order.client]))
            for client in (0, 2):
                outcome = ClientFailure(0, client, "drop", "from one that has the order no more")
                box.put_outcome(scene.plan, outcome)

    scene.between = between
    found = scene.outcomes()
    assert {client: type(outcome) for client, outcome in found.items()} == dict.fromkeys(range(3), ClientUpdate)
    assert hands[0] == (straggler.name, (0, 1, 2))
    assert sorted(clients for _, clients in hands[1:]) == [(0,), (2,)], "the one that was answered is not asked again"
    assert {name for name, _ in hands[1:]} == {other.name for other in others}
    assert len({*lent[0].assignment.keys.values()}) == 3, "each answer has a key of its own"


def test_devices_that_are_ended_give_all_orders_back_for_nothing(
    scene_of: Callable[..., Scene], hands: list[Any]
) -> None:
    """Once: they may be lent together again, and no attempt is used up."""
    scene = scene_of(4, 4, attempts=1)
    device = scene.device(lambda *_: None, "weak")
    honest = scene.honest()
    device.act = noting(lambda d, loan, s: (Scene.leaving if len(hands) == 1 else honest)(d, loan, s), hands)
    found = scene.outcomes()
    assert all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert [clients for _, clients in hands] == [(0, 1, 2, 3)] * 2


def test_a_coordinator_that_starts_again_waits_for_those_that_are_not_answered(
    scene_of: Callable[..., Scene], hands: list[Any]
) -> None:
    scene = scene_of(3, 3, attempts=1, lease_s=30)
    whole = scene.plan

    def act(device: Played, loan: Loan, worked: float) -> None:
        device.beat("working", loan.id)
        if 3 < worked < 15:
            device.answer(loan, whole, scene.store, only=[1])
        if worked > 60:
            device.answer(loan, whole, scene.store)

    scene.device(noting(act, hands), "weak")
    scene.until = 20.0
    with pytest.raises(Stopped):
        scene.outcomes()
    scene.until = 1000.0
    scene.plan = RoundPlan(0, tuple(order for order in whole.orders if order.client != 1), adopted=1)
    scene.begin()
    found = scene.outcomes()
    assert sorted(found) == [0, 2] and all(isinstance(outcome, ClientUpdate) for outcome in found.values())
    assert [clients for _, clients in hands] == [(0, 1, 2)], "it goes on with the loan that it has"
