"""The backend that leases a round's orders to workers: `run.backend` kubernetes and agents.

Any worker of the right pool may execute an order: the update follows from the order alone, and with `observe=cgroup`
from the memory that the worker has free. An order whose lease has ended goes to another worker, and the first one's
later result is not read. The same happens to an order without a good result: only if `attempts` workers had none, its
client has failed. Orders that a worker held together when it failed have not failed yet, because one of them may be the
reason for all; each is leased by itself from then on. A result that was read is written to the round's updates in the
coordinator's name; from there on everything is as with other backends.

A coordinator that is restarted reads in the messages which worker holds which orders of the round, and waits for them.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from types import MappingProxyType
from typing import Literal

from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, ConfigError, FlexfleetError, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import KeyOf
from fl_engine.exchange.updates import fits_nobody
from fl_engine.remote.leases import Assigner, OpenRound, Options, why_ended
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import pause, result_key
from fl_engine.remote.provisioner import Lost, Need, Provisioner
from fl_engine.remote.registry import clients_of_devices
from fl_engine.remote.workers import Held, Worker, Workers
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_files import round_folder
from fl_engine.storage.store import canonical, sha256
from fl_engine.training.memory import Peaks

log = logging.getLogger("flexfleet")

LOST: Literal["pod"] = "pod"
"""The stage of the failure of a client whose order has no result."""
NOT_GOOD = ("train", "evaluate", "validate")
"""Stages of failures that may be the worker's fault, so that another one is asked."""
LOOK_S, LEAST_LOOK_S = 2.0, 0.05
"""The most and the least seconds between two looks for results."""
REPORT_S = 30.0
REST_S, LONGEST_REST_S = 2.0, 300.0
"""Seconds without an order after a worker's first failure, doubled with each further one in a row."""


class Remote:
    """`mailbox` needs the key with which the coordinator signs. `check` raises Replaced if another coordinator has the
    mailboxes. `code`: the sha256 of the wheel with the run's own code. `memory`: what training each level takes, for
    observe=cgroup. `site_sums`: see `Assignment.site`; they are not read from the store, which others may write."""

    durable = True

    def __init__(
        self,
        options: Options,
        lease_s: float,
        run_id: str,
        fleet: Sequence[Device],
        mailbox: Mailbox,
        mailboxes: Mailboxes,
        provisioner: Provisioner,
        check: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
        code: str | None = None,
        memory: Peaks | None = None,
        site_sums: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        if mailbox.key is None:
            raise ConfigError("workers sign their results: the mailbox needs a key")
        self._options, self._lease_s, self._run, self._fleet = options, lease_s, run_id, fleet
        self._mailbox, self._provisioner = mailbox, provisioner
        self.workers = Workers(mailboxes, provisioner, lease_s, check)
        self._should_stop, self._site = should_stop, sha256(canonical(dict(site_sums)))
        self._assigner = Assigner(mailbox, mailboxes, options, lease_s, site_sums, code, memory)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped if fewer than the quorum have a result, if no worker takes an order for `wait_s`, and if
        `should_stop` returns True; Replaced if another coordinator has the workers. The other clients are given up once
        there are as many updates as the plan wants."""
        if not plan.orders:
            return
        names, now = self._mailbox.put_orders(plan), time.monotonic()
        before = max(self._mailbox.ordered(plan.round, plan.evaluates) - len(plan.orders), 0)
        wanted = before + len(plan.orders) if plan.wanted is None else plan.wanted
        enough = math.ceil(wanted * self._provisioner.quorum - 1e-9)
        updates, results = plan.adopted, before
        self._provisioner.begin(plan)
        try:
            self.workers.refresh(at_once=True)
            r = OpenRound(algorithm, plan, names, self._provisioner, self._clients(), moved=now, hopeful=now)
            self._adopt(r, list(self.workers.by_name.values()))
            while r.open_ and updates < wanted:
                for outcome in self._turn(r):
                    results += 1
                    updates += isinstance(outcome, ClientUpdate)
                    yield outcome
                    if updates >= wanted:
                        break
        finally:
            self._provisioner.end()
        lost = [failure for failure in r.failed.values() if failure.stage == LOST]
        results += len(r.failed) - len(lost)
        if results < enough:
            why = "; ".join(sorted({failure.reason for failure in lost})[:5])
            raise Stopped(
                f"round {plan.round + 1}: {results} of {wanted} clients have a result, {enough} are needed "
                f"(kubernetes.quorum): {why}. What arrived is kept. "
                f"{self._provisioner.advice(sorted(self.workers.by_name), [])}, then resume with --resume"
            )
        for client in sorted(r.open_ | r.failed.keys()):
            late = ClientFailure(plan.round, client, "straggle", "the round had enough updates before this one")
            yield r.failed.get(client, late)

    def _clients(self) -> Mapping[str, int] | None:
        """See `OpenRound.own`."""
        if not self._assigner.own_data:
            return None
        return clients_of_devices(self._mailbox.store, self.workers.members(), self._fleet)

    def finish(self) -> None:
        """Tell the workers that the run is over. An error is only logged: they learn it from the next run."""
        try:
            self.workers.dismiss()
        except FlexfleetError as error:
            log.warning("the run is over, but not all workers could be told: %s", error)

    def _turn(self, r: OpenRound) -> Iterator[Outcome]:
        if self._should_stop():
            raise Stopped(ON_REQUEST)
        if new := self._refresh():
            r.own = self._clients()
            self._adopt(r, new)
        self.workers.listen()
        # Read before the results, because a worker writes its result before it ends.
        held = [w for w in self.workers.by_name.values() if w.held is not None]
        lost = {w.name: self._provisioner.lost(w.name, w.held.worker) for w in held if w.held is not None}
        yield from self._results(r)
        self._end_leases(r, lost)
        self._give_up(r)
        self._assign(r)
        self._need(r)
        if r.open_:
            self._check_waiting(r)
            time.sleep(pause(time.monotonic() - r.moved, min(LOOK_S, self._lease_s / 12), LEAST_LOOK_S))

    def _refresh(self) -> list[Worker]:
        """Returns the new workers."""
        new = self.workers.refresh()
        self.workers.renew()
        return new

    def _need(self, r: OpenRound) -> None:
        present = {worker.process: worker.member.tier for worker in self.workers.present}
        silent = frozenset(w.name for w in self.workers.by_name.values() if w.is_silent)
        self._provisioner.need(Need(r.count(r.open_), r.count(r.waiting), present, silent))

    # ------------------------------------------------------------------------------------------ giving leases
    def _adopt(self, r: OpenRound, workers: Sequence[Worker]) -> None:
        """Wait for orders of this round that workers hold from an earlier coordinator, or from before a stop. The
        message gets fresh URLs for a worker that has not begun."""
        for worker in workers:
            worker.held, message, lease = None, worker.message, worker.message.lease
            if lease is None or (message.run, message.site) != (self._run, self._site) or not message.worker:
                continue
            given = lease.assignment
            if (given.round, given.evaluates) != (r.plan.round, r.plan.evaluates):
                continue
            sums = self._mailbox.order_sums
            clients = [c for c in given.clients if c in r.waiting and given.orders.get(c) == sums[c]]
            if not clients or worker.process not in ("", message.worker):
                continue
            r.killed.update(dict.fromkeys(clients, given.failures))
            worker.process = message.worker
            held = self._lease(worker, r, clients, lease.id)
            held.alone = len(given.clients) == 1
            heartbeat = worker.heartbeat
            held.taken = heartbeat is not None and heartbeat.lease == lease.id
            who = ", ".join(map(str, clients))
            log.info(
                "round %d, client %s: waiting for %s, which has the assignment", r.plan.round + 1, who, worker.name
            )

    def _assign(self, r: OpenRound) -> None:
        for worker, clients in r.assigned(self.workers.present, time.monotonic()):
            self._lease(worker, r, clients, secrets.token_hex(8))

    def _lease(self, worker: Worker, r: OpenRound, clients: Sequence[int], id: str) -> Held:
        for client in clients:
            r.waiting.remove(client)
        lease = self._assigner.lease(r, clients, id)
        self.workers.send(worker, lease, run=self._run, site=self._site)
        now = time.monotonic()
        worker.held = Held(id, worker.process, list(clients), len(clients) == 1, now, now)
        return worker.held

    def _box(self, lease: str, key: KeyOf | None = None) -> Mailbox:
        """Where the results of a lease are."""
        return Mailbox(self._mailbox.store, self._mailbox.rules, key, lease=lease)

    # ------------------------------------------------------------------------------------------ how leases end
    def _results(self, r: OpenRound) -> Iterator[Outcome]:
        """Results under leases that have not ended. No other results are read."""
        folder = f"{round_folder(r.plan.round, r.plan.evaluates)}leases/"
        there = set(self._mailbox.store.list(folder))
        for worker in list(self.workers.by_name.values()):
            if (held := worker.held) is None:
                continue
            key = result_key(worker.member.key, self._site, held.lease)
            box = self._box(held.lease, lambda _, key=key: key)  # type: ignore[misc]
            clients = [c for c in held.clients if f"{folder}{held.lease}/{c}.json" in there]

            def received(client: int, box: Mailbox = box) -> Outcome:
                outcome = box.receive(r.plan, client)
                if isinstance(outcome, ClientUpdate):
                    self._mailbox.put_outcome(r.plan, outcome)
                return outcome

            outcomes = overlapped(box.store, box.held_by(r.plan, clients), received, clients)
            for client, outcome in zip(clients, outcomes, strict=True):
                if isinstance(outcome, ClientFailure) and not self._counts(outcome, r):
                    self._rest(worker)
                    self._lost(r, worker, [outcome], counts=True)
                    continue
                held.clients.remove(client)
                if not held.clients:
                    worker.held = None
                worker.failures, worker.why, r.moved = 0, "", time.monotonic()
                r.hopeful = r.moved
                r.results[worker.name, self._provisioner.pool(client)] += 1
                account = worker.message.account.model_copy(
                    update={
                        "results": worker.message.account.results + 1,
                        "last": f"{self._run}, round {r.plan.round + 1}, client {client}"[:300],
                        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                    }
                )
                worker.message = worker.message.model_copy(update={"account": account})  # goes with the next message
                r.open_.discard(client)
                yield outcome

    def _counts(self, failure: ClientFailure, r: OpenRound) -> bool:
        """Whether every worker would give this failure. What the worker alone knows may be wrong: another one is
        asked."""
        if failure.stage == "prune":
            return fits_nobody(r.plan.order_of[failure.client], self._mailbox.rules, r.algorithm)
        return failure.stage not in NOT_GOOD

    def _end_leases(self, r: OpenRound, lost: Mapping[str, Lost | None]) -> None:
        """Withdraw orders from workers that are gone, hang or have failed. `lost`: what was known before the results
        were read."""
        for worker in list(self.workers.by_name.values()):
            held = worker.held
            ended = why_ended(worker, r, self._lease_s, self._options.deadline_s, lost.get(worker.name))
            if held is None or ended is None:
                continue
            why, failed, untaken = ended
            if failed or untaken:  # a worker with a new heartbeat would be the first to get the next order
                self._rest(worker, LONGEST_REST_S if failed else self._lease_s)
            if untaken and worker.heard > held.since:
                r.idle.add(worker.name)
            if failed:
                r.alone.update(held.clients)  # one of them may have been the reason for all
            failures = [ClientFailure(r.plan.round, client, LOST, why) for client in held.clients]
            self._lost(r, worker, failures, counts=failed and held.alone)

    @staticmethod
    def _rest(worker: Worker, longest_s: float = LONGEST_REST_S) -> None:
        worker.failures += 1
        worker.rests = time.monotonic() + min(longest_s, REST_S * 2 ** min(worker.failures - 1, 20))

    def _lost(self, r: OpenRound, worker: Worker, failures: Sequence[ClientFailure], counts: bool) -> None:
        """The worker has no good results of these orders: others get them. `counts`: after `attempts` of them the
        client has failed."""
        held = worker.held
        assert held is not None
        for failure in failures:
            held.clients.remove(failure.client)
            if counts:
                worker.why = failure.reason
                r.tried[failure.client].add(worker.name)
                r.lost[failure.client] += 1
        account = worker.message.account
        account = account.model_copy(update={"lost": account.lost + len(failures)})
        if held.clients:  # it continues with them
            worker.message = worker.message.model_copy(update={"account": account})
        else:
            worker.held = None
            self.workers.send(worker, None, account=account)
        again = [failure for failure in failures if r.lost[failure.client] < self._options.attempts]
        if again:
            who = ", ".join(str(failure.client) for failure in again)
            log.warning("round %d, client %s: %s; trying again", r.plan.round + 1, who, again[0].reason)
            r.waiting.extendleft(failure.client for failure in reversed(again))
        for failure in failures:
            if failure not in again:
                r.give_up(failure)

    # ------------------------------------------------------------------------------------------ no workers
    def _waited(self, r: OpenRound) -> float:
        """Seconds since a worker was last at work, or about to come."""
        return time.monotonic() - max(r.hopeful, self._provisioner.moved)

    def _may_take_one(self, r: OpenRound) -> bool:
        """Whether a worker is present that has not failed since its last result, nor refused to take an order."""
        present = self.workers.present
        return any(r.suits(w, client, present) for w in present if not w.failures for client in r.open_)

    def _may_end_without(self, r: OpenRound) -> bool:
        """Whether the round may end without the clients that have no result, because others have one."""
        some = r.plan.adopted > 0 or len(r.open_) < len(r.plan.orders)
        return some and (self._provisioner.quorum > 0 or r.own is not None)

    def _give_up(self, r: OpenRound) -> None:
        """Give up waiting clients whose workers stay away, if the round may end without them."""
        late = self._waited(r) > self._provisioner.wait_s
        present = {
            pool for w in self.workers.present for pool in r.asked if self._provisioner.suits(w.member.tier, pool)
        }
        for client in list(r.waiting):
            pool = self._provisioner.pool(client)
            hopeless = pool not in present and self._provisioner.hopeless(pool)
            if not (hopeless or (late and self._may_end_without(r) and not self._may_take_one(r))):
                continue
            r.waiting.remove(client)
            r.give_up(ClientFailure(r.plan.round, client, LOST, self._why_absent(r, client, pool)))

    def _why_absent(self, r: OpenRound, client: int, pool: str) -> str:
        idle = sorted(n for n in r.idle & self.workers.by_name.keys() if r.suits(self.workers.by_name[n], client, ()))
        who = "".join(f" ({name}, which sends heartbeats)" for name in idle)
        if r.own is not None:
            own = (w for w in self.workers.by_name.values() if w.why and r.suits(w, client, ()))
            failed = "".join(f"; its last assignment failed: {w.why}" for w in own)
            return f"the device that holds its data{who} has not taken the assignment{failed}"
        why = self._provisioner.why(pool)
        return f"no worker of {pool}{who} takes assignments{why and f': {why}'}"

    def _check_waiting(self, r: OpenRound) -> None:
        """Log what the round waits for. Raises Stopped if it waits in vain."""
        now, workers = time.monotonic(), self.workers.by_name
        if at_work := {w.name for w in workers.values() if w.held is not None and w.held.taken}:
            r.hopeful = now
            r.idle -= at_work
        waited, pools = self._waited(r), sorted(r.count(r.waiting))
        if waited > self._provisioner.wait_s and not self._may_end_without(r) and not self._may_take_one(r):
            idle = ", ".join(sorted(r.idle & workers.keys()))  # they cannot read their messages, or lie
            what = f"{idle} send heartbeats but took none: see what they log, or revoke them. " if idle else ""
            raise Stopped(
                f"round {r.plan.round + 1}: no worker has taken an assignment for {waited:.0f} s; "
                f"{len(r.open_)} of {len(r.plan.orders)} clients have no result. {what}"
                f"{self._provisioner.advice(sorted(workers), pools)}, then resume with --resume"
            )
        if r.waiting and now - r.reported > REPORT_S:
            r.reported = now
            suits = self._provisioner.suits
            suited = [w for w in self.workers.present if any(suits(w.member.tier, pool) for pool in pools)]
            busy = sum(w.held is not None for w in suited)
            log.info(
                "round %d: %d %s for a worker of %s; %d of its %d present workers %s busy",
                r.plan.round + 1, len(r.waiting), "assignment waits" if len(r.waiting) == 1 else "assignments wait",
                " or ".join(pools), busy, len(suited), "is" if busy == 1 else "are",
            )  # fmt: skip
