"""The backend that leases a round's assignments to workers: `run.backend` kubernetes and agents.

Any worker of the right pool may execute an assignment: the update follows from the assignment alone, and with
`observe=cgroup` from the worker's free memory. If the lease of an assignment ends, or its result is invalid, another
worker gets it, and later results of the first one are not read. A client has failed if `attempts` workers had no valid
result. Assignments that a worker held together when it failed do not count as failed, because one of them may be the
reason for all; from then on each is leased alone. The coordinator writes a valid result to the round's updates in its
own name, as with other backends.

A coordinator that is restarted finds the leases of the round in the messages, and waits for their results.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, ConfigError, FlexfleetError, Stopped
from fl_engine.core.types import ClientFailure, ClientUpdate, Device, Outcome, RoundPlan
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.manifest import KeyOf
from fl_engine.exchange.updates import fits_nobody
from fl_engine.remote.leases import Assigner, OpenRound, why_ended
from fl_engine.remote.messages import pause, result_key
from fl_engine.remote.provisioner import Lost, Need, Provisioner
from fl_engine.remote.registry import clients_of_devices
from fl_engine.remote.workers import Held, Worker, Workers
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_files import round_folder
from fl_engine.storage.store import canonical, sha256

log = logging.getLogger("flexfleet")

LOST: Literal["pod"] = "pod"
"""The stage of the failure of a client without a result."""
NOT_GOOD = ("train", "evaluate", "validate")
"""Stages of failures that may be the worker's fault, so that another worker gets the assignment."""
LOOK_S, LEAST_LOOK_S = 2.0, 0.05
"""The most and the least seconds between two polls for results."""
REPORT_S = 30.0
"""Seconds between two log lines about waiting assignments."""
REST_S, LONGEST_REST_S = 2.0, 300.0
"""Seconds without an assignment after a worker's first failure, doubled with each further one in a row."""


class Remote:
    """The backend of one run.

    Args:
        assigner: Writes the leases.
        run_id: The run.
        fleet: Its devices.
        provisioner: Provides the workers.
        check: Raises Replaced if another coordinator has the mailboxes.
        should_stop: Returns True if the run is to stop.
    """

    durable = True

    def __init__(
        self,
        assigner: Assigner,
        run_id: str,
        fleet: Sequence[Device],
        provisioner: Provisioner,
        check: Callable[[], None] = lambda: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        if assigner.mailbox.key is None:
            raise ConfigError("the mailbox must have a key, because workers sign their results")
        self._assigner, self._run, self._fleet, self._provisioner = assigner, run_id, fleet, provisioner
        self._mailbox, self._options, self._lease_s = assigner.mailbox, assigner.options, assigner.lease_s
        self.workers = Workers(assigner.mailboxes, provisioner, assigner.lease_s, check)
        self._should_stop, self._site = should_stop, sha256(canonical(dict(assigner.site_sums)))

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Yield the outcomes as they arrive, until there are as many updates as the plan wants.

        Raises:
            Stopped: The quorum was missed, no worker has taken an assignment for `wait_s`, or `should_stop`.
            Replaced: Another coordinator has the workers.
        """
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
                f"(kubernetes.quorum): {why}. {self._provisioner.advice(sorted(self.workers.by_name), [])}, then "
                "resume with --resume"
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
        """Write messages that the run is over. An error is only logged, because the next run writes other messages."""
        try:
            self.workers.dismiss()
        except FlexfleetError as error:
            log.warning("the run is over; not all workers have the message: %s", error)

    def _turn(self, r: OpenRound) -> Iterator[Outcome]:
        if self._should_stop():
            raise Stopped(ON_REQUEST)
        if new := self.workers.refresh():
            r.own = self._clients()
            self._adopt(r, new)
        self.workers.renew()
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

    def _need(self, r: OpenRound) -> None:
        present = {worker.process: worker.member.tier for worker in self.workers.present}
        silent = frozenset(w.name for w in self.workers.by_name.values() if w.is_silent)
        self._provisioner.need(Need(r.count(r.open_), r.count(r.waiting), present, silent))

    def _adopt(self, r: OpenRound, workers: Sequence[Worker]) -> None:
        """Wait for assignments of this round that workers hold from an earlier coordinator, or from before a stop. They
        get another message with fresh URLs."""
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
            log.info("round %d, client %s: %s has the assignment already", r.plan.round + 1, who, worker.name)

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
        """Return the mailbox with the results of a lease."""
        return Mailbox(self._mailbox.store, self._mailbox.rules, key, lease=lease)

    def _results(self, r: OpenRound) -> Iterator[Outcome]:
        """Yield the results of leases that have not ended. No other results are read."""
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
                last = f"{self._run}, round {r.plan.round + 1}, client {client}"[:300]
                account = worker.message.account
                account = account.model_copy(update={"results": account.results + 1, "last": last})
                worker.message = worker.message.model_copy(update={"account": account})  # the next message sends it
                r.open_.discard(client)
                yield outcome

    def _counts(self, failure: ClientFailure, r: OpenRound) -> bool:
        """Whether every worker would return this failure, so that no other one has to try."""
        if failure.stage == "prune":
            return fits_nobody(r.plan.order_of[failure.client], self._mailbox.rules, r.algorithm)
        return failure.stage not in NOT_GOOD

    def _end_leases(self, r: OpenRound, lost: Mapping[str, Lost | None]) -> None:
        """Withdraw assignments from workers that have ended, hang or have failed. `lost`: what was known before the
        results were read."""
        for worker in list(self.workers.by_name.values()):
            held = worker.held
            ended = why_ended(worker, r, self._lease_s, self._options.deadline_s, lost.get(worker.name))
            if held is None or ended is None:
                continue
            why, failed, untaken = ended
            if failed or untaken:  # otherwise it would be the first to get the next assignment
                self._rest(worker, LONGEST_REST_S if failed else self._lease_s)
            if failed:
                r.alone.update(held.clients)
            failures = [ClientFailure(r.plan.round, client, LOST, why) for client in held.clients]
            self._lost(r, worker, failures, counts=failed and held.alone)

    @staticmethod
    def _rest(worker: Worker, longest_s: float = LONGEST_REST_S) -> None:
        worker.failures += 1
        worker.rests = time.monotonic() + min(longest_s, REST_S * 2 ** min(worker.failures - 1, 20))

    def _lost(self, r: OpenRound, worker: Worker, failures: Sequence[ClientFailure], counts: bool) -> None:
        """Let other workers execute assignments without a valid result. `counts`: after `attempts` of them the client
        has failed."""
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
        if held.clients:  # it continues with the others
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

    def _waited(self, r: OpenRound) -> float:
        """Return the seconds since a worker was last at work, or about to come."""
        return time.monotonic() - max(r.hopeful, self._provisioner.moved)

    def _may_take_one(self, r: OpenRound) -> bool:
        """Whether a worker is present that has not failed since its last result, and has taken its last assignment."""
        present = self.workers.present
        return any(r.suits(w, client, present) for w in present if not w.failures for client in r.open_)

    def _may_end_without(self, r: OpenRound) -> bool:
        """Whether the round may end without the open clients, because others have a result."""
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
        if r.own is not None:
            own = (w for w in self.workers.by_name.values() if w.why and r.suits(w, client, ()))
            failed = "".join(f"; its last assignment failed: {w.why}" for w in own)
            return f"the device that holds its data has not taken the assignment{failed}"
        why = self._provisioner.why(pool)
        return f"no worker of {pool} takes assignments{why and f': {why}'}"

    def _check_waiting(self, r: OpenRound) -> None:
        """Log what the round waits for. Raises Stopped if it waits in vain."""
        now, workers = time.monotonic(), self.workers.by_name
        if any(w.held is not None and w.held.taken for w in workers.values()):
            r.hopeful = now
        waited, pools = self._waited(r), sorted(r.count(r.waiting))
        if waited > self._provisioner.wait_s and not self._may_end_without(r) and not self._may_take_one(r):
            raise Stopped(
                f"round {r.plan.round + 1}: no worker has taken an assignment for {waited:.0f} s; "
                f"{len(r.open_)} of {len(r.plan.orders)} clients have no result. "
                f"{self._provisioner.advice(sorted(workers), pools)}, then resume with --resume"
            )
        if r.waiting and now - r.reported > REPORT_S:
            r.reported = now
            count, of = len(r.waiting), " or ".join(pools)
            log.info(
                "round %d: %d of %d assignments wait for a worker of %s", r.plan.round + 1, count, len(r.open_), of
            )
