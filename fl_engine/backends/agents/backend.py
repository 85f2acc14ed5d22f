"""Clients on devices that stay: each takes orders from its mailbox (`exchange.letters`), as many as it has room for.

Any device of a client's tier may carry out its order: the update follows from the order alone, and with
`observe=cgroup` from the memory that the device has free. An order whose lease has ended goes to another device, and
what the first one may still send is not looked at. So does an order whose answer is not good: only when `attempts`
devices had no good one is it the client's failure. Orders that a device held together when it failed have not failed
yet, since one of them may have taken the others with it: each is lent by itself from then on. An answer that was read
is written to the round's updates in the coordinator's name; from there on all is as with other backends.

A coordinator that starts again finds in the letters which device holds which order of the round, and waits for it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Literal

from fl_engine.backends.agents import seats
from fl_engine.backends.agents.devices import LOOK_S, Devices
from fl_engine.backends.agents.keeper import SAY_EVERY_S, Invited, Keeper
from fl_engine.backends.agents.leases import why_ended
from fl_engine.backends.agents.lending import chosen, suits
from fl_engine.backends.agents.loans import key_under, reachable
from fl_engine.backends.agents.open_round import OpenRound
from fl_engine.backends.agents.post import Agent, Held, Post
from fl_engine.backends.agents.settings import AgentsConfig
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, ConfigError, FlexfleetError, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan, WorkOrder
from fl_engine.exchange.assigning import assignment
from fl_engine.exchange.letters import LEASES, Leased, Loan, pause
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import KeyOf, fits_nobody
from fl_engine.fleet.faults import Fault
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.records import round_folder
from fl_engine.storage.store import canonical, sha256
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")

LOST: Literal["pod"] = "pod"
"""The stage of the failure of a client whose order no device has answered."""
NOT_GOOD = ("train", "evaluate", "validate")
"""Stages of answers that may be the device's fault, so that another one is asked. `drop` and `prune` may be lies: they
count where they follow from the order."""
REST_S, LONGEST_REST_S = 2.0, 300.0
"""Seconds without an order after a device's first failure, doubled with each further one in a row."""
SIGN_S = 600.0
"""Seconds between two letters to a device that has nothing new to read: they are the coordinator's sign of life, and
bring fresh URLs."""


class Agents:
    """`post`: where the devices' letters are. `mailbox` needs a key, with which answers are signed. `check` raises
    Replaced where another coordinator has the letters now. `keeper` sees to it that devices are there; None: people
    do. `memory`: what training each level takes, for observe=cgroup. `site_sums`: see `Assignment.site`; they are not
    read from the store, which others may write. `befalls`: what `rounds.faults` make of an order."""

    durable = True
    phases: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        options: AgentsConfig,
        run_id: str,
        fleet: Sequence[Device],
        mailbox: Mailbox,
        post: Post,
        should_stop: Callable[[], bool] = lambda: False,
        code: str | None = None,
        check: Callable[[], None] = lambda: None,
        keeper: Keeper | None = None,
        memory: Peaks | None = None,
        site_sums: Mapping[str, str] = MappingProxyType({}),
        befalls: Callable[[WorkOrder], Fault | None] = lambda _: None,
    ) -> None:
        if mailbox.key is None:
            raise ConfigError("devices sign their updates: the mailbox needs a key")
        self._options, self._run, self._fleet = options, run_id, fleet
        self._keeper = keeper or Invited(fleet, post.roster.store.uri())
        self._devices = Devices(options, post, self._keeper, check)
        self._agents = self._devices.by_name
        self._mailbox, self._post = mailbox, post
        self._should_stop, self._code, self._memory = should_stop, code, memory
        self._befalls = befalls
        self._site_sums, self._site = dict(site_sums), sha256(canonical(dict(site_sums)))
        own_data = mailbox.rules is not None and mailbox.rules.most is not None
        self._seats: Mapping[str, int] | None = {} if own_data else None
        """By device, the client that it is, where devices hold their own data (`seats`); None: they do not."""

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped where no device takes an order for `wait_s`, and where `should_stop` says so; Replaced where
        another coordinator has the devices."""
        if not plan.orders:
            return
        names, clients = self._mailbox.put_orders(plan), [order.client for order in plan.orders]
        now = time.monotonic()
        asked = Counter(map(self._keeper.place, clients))
        r = OpenRound(algorithm, plan, names, asked, set(clients), deque(clients), moved=now, hopeful=now, said=now)
        self._keeper.begin(plan)
        self._keep(r)
        self._meet()
        self._adopt(r)
        while r.open_:
            if self._should_stop():
                raise Stopped(ON_REQUEST)
            if self._keep(r):
                self._meet()
            self._devices.listen()
            yield from self._answered(r)
            yield from self._ended(r)
            yield from self._absent(r)
            self._lend(r)
            if r.open_:
                self._check_waiting(r)
                time.sleep(pause(time.monotonic() - r.moved, min(LOOK_S, self._options.lease_s / 12), 0.05))

    def finish(self) -> None:
        """Tells the devices that the run is over. What it cannot tell is no failure of the run: they learn it from the
        next one."""
        try:
            self._devices.dismiss()
        except FlexfleetError as error:
            log.warning("the run is over; not all devices could be told: %s", error)

    # ------------------------------------------------------------------------------------------- who is there
    def _keep(self, r: OpenRound) -> bool:
        self._devices.still_mine()
        asked, waiting = (Counter(map(self._keeper.place, clients)) for clients in (r.open_, r.waiting))
        return self._keeper.keep(asked, waiting, self._devices.silent())

    def _meet(self) -> None:
        members = self._devices.meet()
        if self._seats is not None:
            self._seats = seats.kept(self._mailbox.store, members, self._fleet)

    def _adopt(self, r: OpenRound) -> None:
        """Waits for orders of this round that devices hold from an earlier coordinator, or from before a stop. A loan
        counts only if its key is the one that this configuration of the run would lend with; the letter gets fresh URLs
        for a device that has not begun."""
        for agent in self._agents.values():
            agent.held, loan = None, agent.letter.loan
            if loan is None or agent.letter.run != self._run or agent.letter.site != self._site:
                continue
            told, key = loan.assignment, self._key(loan.id)
            if (told.round, told.evaluates) != (r.plan.round, r.plan.evaluates):
                continue
            waiting = [client for client in told.clients if client in r.waiting]
            clients = [client for client in waiting if told.keys[client] == key(r.plan.order_of[client]).hex()]
            if not clients:
                continue
            r.killed.update(dict.fromkeys(clients, told.failures))
            held = self._lend_to(agent, r, clients, loan.id)
            held.alone = len(told.clients) == 1
            if agent.beat is not None and agent.beat.loan == loan.id:
                held.taken, held.boots = True, {agent.beat.boot}
            who = ", ".join(map(str, clients))
            log.info("round %d, client %s: waiting for %s, which has its order", r.plan.round + 1, who, agent.name)

    # ------------------------------------------------------------------------------------------ lending orders
    def _lend(self, r: OpenRound) -> None:
        agents = self._devices.there
        for agent, clients in chosen(r, agents, self._keeper, self._seats, time.monotonic()):
            self._lend_to(agent, r, clients, secrets.token_hex(8))

    def _lend_to(self, agent: Agent, r: OpenRound, clients: Sequence[int], loan: str) -> Held:
        for client in clients:
            r.waiting.remove(client)
        orders = [r.plan.order_of[client] for client in clients]
        told = assignment(
            self._mailbox,
            orders,
            self._key(loan),
            self._options,
            self._site_sums,
            self._code,
            self._memory,
            self._keeper.device(clients[0]),
            max(r.killed[client] for client in clients),
        )
        told = reachable(told, self._mailbox, orders, r.names, loan, self._options, self._post.verb)
        lent = Loan(id=loan, seconds=self._options.deadline_s, assignment=told)
        self._devices.say(agent, lent, run=self._run, site=self._site)
        now = time.monotonic()
        agent.held = held = Held(loan, list(clients), len(clients) == 1, now, now)
        return held

    def _key(self, loan: str) -> KeyOf:
        key = self._mailbox.key
        assert key is not None
        return key_under(key, self._site, loan)

    # ------------------------------------------------------------------------------------------ how leases end
    def _follows(self, failure: ClientFailure, order: WorkOrder, algorithm: Algorithm) -> bool:
        """Whether every device would answer so. What the device alone knows may be a lie: another one is asked."""
        if failure.stage == "drop":
            struck = None if order.evaluates else self._befalls(order)
            return struck is not None and struck.kind == "drop"
        if failure.stage == "prune":
            return fits_nobody(order, self._mailbox.rules, algorithm)
        return failure.stage not in NOT_GOOD

    def _answered(self, r: OpenRound) -> Iterator[Outcome]:
        """The answers under leases that run. Others are not looked at: their orders belong to other devices now."""
        folder = f"{round_folder(r.plan.round, r.plan.evaluates)}{LEASES.strip('/')}/"
        there = set(self._mailbox.store.list(folder))
        for agent in list(self._agents.values()):
            if (held := agent.held) is None:
                continue
            box = Mailbox(Leased(self._mailbox.store, held.loan), self._mailbox.rules, self._key(held.loan))
            clients = [c for c in held.clients if f"{folder}{held.loan}/{c}.json" in there]

            def taken(client: int, box: Mailbox = box) -> Outcome:
                outcome = box.receive(r.plan, client)
                if isinstance(outcome, ClientUpdate):
                    self._mailbox.put_outcome(r.plan, outcome)
                return outcome

            answers = overlapped(box.store, box.held_by(r.plan, clients), taken, clients)
            for client, outcome in zip(clients, answers, strict=True):
                order = r.plan.order_of[client]
                if isinstance(outcome, ClientFailure) and not self._follows(outcome, order, r.algorithm):
                    self._rest(agent)
                    yield from self._lost(r, agent, [outcome], counts=True)
                    continue
                held.clients.remove(client)
                if not held.clients:
                    agent.held = None
                agent.failures, agent.why, r.moved = 0, "", time.monotonic()
                agent.boot = "" if agent.beat is None else agent.beat.boot
                r.hopeful = r.moved
                r.answered[agent.name, self._keeper.place(client)] += 1
                said = {
                    "answers": agent.letter.account.answers + 1,
                    "last": f"{self._run}, round {r.plan.round + 1}, client {client}"[:300],
                    "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                }
                account = agent.letter.account.model_copy(update=said)
                agent.letter = agent.letter.model_copy(update={"account": account})  # goes with the next letter
                r.open_.discard(client)
                yield outcome

    def _ended(self, r: OpenRound) -> Iterator[Outcome]:
        """Takes orders back from devices that are gone, hang or have failed; gives the failures of clients whose
        orders were taken back too often."""
        for agent in list(self._agents.values()):
            held = agent.held
            ended = None if held is None else why_ended(agent, held, r, self._options, self._post, self._keeper)
            if held is not None and ended is not None:
                why, failed, untaken = ended
                if failed or untaken:  # one whose beat is new would get the next order first
                    self._rest(agent, LONGEST_REST_S if failed else self._options.lease_s)
                if untaken and agent.heard > held.since:
                    r.idle.add(agent.name)
                if failed:
                    r.alone.update(held.clients)  # one of them may have taken the others with it
                failures = [ClientFailure(r.plan.round, client, LOST, why) for client in held.clients]
                yield from self._lost(r, agent, failures, counts=failed and held.alone)
            elif agent.revoked:
                self._devices.say(agent, None, run="", site="", revoked=True)
            elif held is None and agent.begins_again:  # was killed after it had answered, and does not know it
                self._devices.say(agent, None)
            elif time.monotonic() - agent.written > SIGN_S:
                self._devices.say(agent, agent.letter.loan)
            if agent.revoked:
                del self._agents[agent.name]

    def _can_go_on(self, r: OpenRound) -> bool:
        """Whether the round does without the clients that are missing, as some have answered."""
        return (self._seats is not None or self._keeper.spares) and (
            r.plan.adopted > 0 or len(r.open_) < len(r.plan.orders)
        )

    def _may_take_one(self, r: OpenRound) -> bool:
        """Whether a device is there that has not failed since its last answer, nor let an order lie: it is asked before
        the run stops, however long others let orders lie."""
        there = self._devices.there
        return any(
            suits(a, client, r, there, self._keeper, self._seats) for a in there if not a.failures for client in r.open_
        )

    def _absent(self, r: OpenRound) -> Iterator[ClientFailure]:
        """Gives up clients whose devices stay away, where nothing has moved for `wait_s`, or the keeper knows that none
        come."""
        if not self._can_go_on(r):
            return
        late, waited = self._waited(r) > self._options.wait_s, f"for {self._options.wait_s:g} s"
        for client in [c for c in r.waiting if late or self._keeper.gave_up(self._keeper.place(c))]:
            r.waiting.remove(client)
            r.open_.discard(client)
            who = "".join(
                f" ({name}, which beats)"
                for name in sorted(r.idle & self._agents.keys())
                if suits(self._agents[name], client, r, (), self._keeper, self._seats)
            )
            place = self._keeper.place(client)
            if self._seats is not None:
                own = (a for a in self._agents.values() if a.why and suits(a, client, r, (), self._keeper, self._seats))
                failed = "".join(f"; its last order failed, and it rests: {a.why}" for a in own)
                why = f"the device that holds its data{who} has not taken the order {waited} (agents.wait_s){failed}"
            else:
                known, what = self._keeper.why(place), f"has taken the order {waited}" if late else "takes orders"
                why = f"no device of {place}{who} {what}{known and f': {known}'}"
            yield ClientFailure(r.plan.round, client, LOST, why)

    def _waited(self, r: OpenRound) -> float:
        """Seconds since a device was last at work, or on its way."""
        return time.monotonic() - max(r.hopeful, self._keeper.moved)

    @staticmethod
    def _rest(agent: Agent, longest_s: float = LONGEST_REST_S) -> None:
        """The device has failed, or has let an order lie; then it may just be slow to start."""
        agent.failures += 1
        agent.rests = time.monotonic() + min(longest_s, REST_S * 2 ** min(agent.failures - 1, 20))

    def _lost(
        self, r: OpenRound, agent: Agent, failures: Sequence[ClientFailure], counts: bool
    ) -> Iterator[ClientFailure]:
        """The device had no good answers: others get these orders. `counts`: they have failed with it, and are their
        clients' failures once their attempts are used up."""
        held = agent.held
        assert held is not None
        for failure in failures:
            held.clients.remove(failure.client)
            if counts:
                agent.why = failure.reason
                r.tried[failure.client].add(agent.name)
                r.lost[failure.client] += 1
        account = agent.letter.account.model_copy(update={"lost": agent.letter.account.lost + len(failures)})
        if held.clients:  # goes on with them
            agent.letter = agent.letter.model_copy(update={"account": account})
        else:
            agent.held = None
            self._devices.say(agent, None, account=account, revoked=agent.revoked)
        again = [failure for failure in failures if r.lost[failure.client] < self._options.attempts]
        if again:
            who = ", ".join(str(failure.client) for failure in again)
            log.warning("round %d, client %s: %s; asking again", r.plan.round + 1, who, again[0].reason)
            r.waiting.extendleft(failure.client for failure in reversed(again))
        for failure in failures:
            if failure not in again:
                r.open_.discard(failure.client)
                yield failure

    def _check_waiting(self, r: OpenRound) -> None:
        """Says what the round waits for; raises Stopped where it waits in vain."""
        now = time.monotonic()
        if at_work := {a.name for a in self._agents.values() if a.held is not None and a.held.taken}:
            r.hopeful = now
            r.idle -= at_work
        waited, places = self._waited(r), sorted({*map(self._keeper.place, r.waiting)})
        if waited > self._options.wait_s and not self._can_go_on(r) and not self._may_take_one(r):
            idle = ", ".join(sorted(r.idle & self._agents.keys()))  # they cannot read their letters, or lie
            what = f"{idle} beat, but took none: see what they log, or revoke them. " if idle else ""
            raise Stopped(
                f"round {r.plan.round + 1}: no device has taken an order for {waited:.0f} s; "
                f"{len(r.open_)} of {len(r.plan.orders)} clients have not answered. {what}"
                f"{self._keeper.advice(sorted(self._agents), places)}, then go on with --resume"
            )
        if r.waiting and now - r.said > SAY_EVERY_S:
            r.said = now
            there = sum(not agent.away for agent in self._agents.values())
            log.info(
                "round %d: %d orders wait for a device of tier %s; %d of %d devices are there",
                r.plan.round + 1, len(r.waiting), " or ".join(places), there, len(self._agents),
            )  # fmt: skip
