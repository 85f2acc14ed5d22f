"""The backend for `run.backend=kubernetes` and `run.backend=agents`, which leases a round's assignments to workers.

Any worker in the client's pool may execute an assignment, because the update depends only on the assignment and, with
`observe=cgroup`, on the worker's free memory. If a lease ends without a valid result, the assignment is leased to
another worker, and later results from the first worker are ignored. A client fails after `attempts` failed attempts. If
a lease of several assignments fails, any of them may be the cause. Therefore no failed attempt is counted, and the
assignments are then leased separately. The coordinator signs each valid result with its own key, and stores the result
among the round's updates, like the other backends.

A restarted coordinator finds the round's leases in the messages, and waits for their results.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from fl_engine.core.clients import LEASE_S
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, FlexfleetError, Stopped
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, RoundPlan, changed
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.exchange.updates import fits_nobody
from fl_engine.remote.leases import OpenRound, Surroundings, why_ended
from fl_engine.remote.messages import pause, result_key
from fl_engine.remote.provisioner import Lost, Need, Provisioner
from fl_engine.remote.registry import clients_of_devices
from fl_engine.remote.workers import Held, Worker, Workers
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.run_files import round_folder
from fl_engine.storage.store import canonical, sha256

log = logging.getLogger("flexfleet")

LOST: Literal["pod"] = "pod"
"""Failure stage of a client whose workers returned no result."""
NOT_GOOD = ("train", "evaluate", "validate")
"""Failure stages for which the worker may be responsible, so another worker retries the assignment."""
LOOK_S, LEAST_LOOK_S = 2.0, 0.05
"""Maximum and minimum seconds between two polls for results."""
REPORT_S = 30.0
"""Seconds between two log lines about waiting assignments."""
REST_S, LONGEST_REST_S = 2.0, 300.0
"""Initial and maximum pause of a worker after failures, in seconds. The pause doubles with each consecutive failure."""


class WorkerBackend:
    """The backend that executes a run's assignments on workers."""

    durable = True

    def __init__(self, run: Surroundings, provisioner: Provisioner, check: Callable[[], None]) -> None:
        """`check` raises Replaced if another coordinator has taken over the mailboxes."""
        self._run, self._mailbox, self._provisioner = run, run.mailbox, provisioner
        self._site = sha256(canonical(dict(run.site_sums)))
        self.workers = Workers(provisioner, check)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        """Yield results as workers return them, until `plan.wanted` updates have arrived.

        Raises:
            Stopped: The quorum was missed, no assignment started for `wait_s` seconds, or the user requested a stop.
            Replaced: Another coordinator has taken over the workers.
        """
        if not plan.assignments:
            return
        names, now = self._mailbox.put_assignments(plan), time.monotonic()
        before = max(self._mailbox.count_assignments(plan.round, plan.evaluates) - len(plan.assignments), 0)
        wanted = before + len(plan.assignments) if plan.wanted is None else plan.wanted
        enough = math.ceil(wanted * self._provisioner.quorum - 1e-9)
        updates, results = plan.adopted, before
        self._provisioner.begin(plan)
        try:
            self.workers.refresh(at_once=True)
            r = OpenRound(algorithm, plan, names, self._provisioner, self._clients(), now)
            self._adopt(r, list(self.workers.by_name.values()))
            while r.open_ and updates < wanted:
                for result in self._turn(r):
                    results += 1
                    updates += isinstance(result, ClientUpdate)
                    yield result
                    if updates >= wanted:
                        break
        finally:
            self._provisioner.end()
        lost = [failure for failure in r.failed.values() if failure.stage == LOST]
        results += len(r.failed) - len(lost)
        if results < enough:
            why = "; ".join(sorted({failure.reason for failure in lost})[:5])
            raise Stopped(
                f"round {plan.round + 1}: {results} of {wanted} clients have a result, but kubernetes.quorum "
                f"requires {enough}: {why}. {self._provisioner.advice(sorted(self.workers.by_name), [])}, then "
                "resume with --resume"
            )
        for client in sorted(r.open_ | r.failed.keys()):
            late = ClientFailure(plan.round, client, "straggle", "the round had enough updates before this one")
            yield r.failed.get(client, late)

    def _clients(self) -> Mapping[str, int] | None:
        """See `OpenRound.own`."""
        if self._run.site.most is None:
            return None
        members = [worker.member for worker in self.workers.by_name.values() if not worker.revoked]
        return clients_of_devices(self._mailbox.store, members, self._run.site.fleet)

    def finish(self) -> None:
        """Dismiss the workers. Log errors instead of raising them, because the next run writes new messages."""
        try:
            self.workers.dismiss()
        except FlexfleetError as error:
            log.warning("the run is over, but the last messages to the workers could not be written: %s", error)

    def _turn(self, r: OpenRound) -> Iterator[ClientResult]:
        if self._run.should_stop():
            raise Stopped(ON_REQUEST)
        if new := self.workers.refresh():
            r.own = self._clients()
            self._adopt(r, new)
        self.workers.poll_due()
        # Check for lost workers before reading results. In the other order, a worker that writes its result and ends
        # between the two steps would count as lost.
        held = [w for w in self.workers.by_name.values() if w.held is not None]
        lost = {w.name: self._provisioner.lost(w.name, w.held.worker) for w in held if w.held is not None}
        yield from self._results(r)
        self._end_leases(r, lost)
        self._give_up(r)
        free = r.assigned(self.workers.present, time.monotonic())
        self._lease_all(r, [(w, clients, secrets.token_hex(8), len(clients) == 1) for w, clients in free])
        self.workers.renew()
        present = {worker.process: worker.member.tier for worker in self.workers.present}
        away = [w for w in self.workers.by_name.values() if w.away and w.held is None]
        silent = frozenset(w.name for w in away if w.heartbeat is not None and not w.is_gone)
        self._provisioner.need(Need(r.count(r.open_), r.count(r.waiting), present, silent))
        if r.open_:
            self._check_waiting(r)
            time.sleep(pause(time.monotonic() - r.result_at, min(LOOK_S, self._provisioner.lease_s / 12), LEAST_LOOK_S))

    def _adopt(self, r: OpenRound, workers: Sequence[Worker]) -> None:
        """Adopt the leases that an earlier coordinator created for this round, and send new URLs to the workers."""
        adopted = []
        for worker in workers:
            worker.held, message, lease = None, worker.message, worker.message.lease
            if lease is None or (message.run, message.site) != (self._run.run_id, self._site) or not message.worker:
                continue
            given = lease.assignment
            if (given.round, given.evaluates) != (r.plan.round, r.plan.evaluates):
                continue
            sums = self._mailbox.assignment_sums
            clients = [c for c in given.clients if c in r.waiting and given.assignments.get(c) == sums[c]]
            if not clients or worker.process not in ("", message.worker):
                continue
            for client in clients:
                r.waiting.remove(client)
            r.killed.update(dict.fromkeys(clients, given.failures))
            worker.process = message.worker
            adopted.append((worker, clients, lease.id, len(given.clients) == 1))
            who = ", ".join(map(str, clients))
            log.info("round %d, client %s: %s already has this assignment", r.plan.round + 1, who, worker.name)
        self._lease_all(r, adopted)

    def _lease_all(self, r: OpenRound, leases: Sequence[tuple[Worker, list[int], str, bool]]) -> None:
        """Send a lease to each worker. `leases` contains tuples (worker, clients, ID of the lease, `Held.alone`)."""

        def send(given: tuple[Worker, list[int], str, bool]) -> None:
            worker, clients, id, alone = given
            self.workers.send(worker, self._run.lease(r, clients, id), run=self._run.run_id, site=self._site)
            taken, now = worker.heartbeat is not None and worker.heartbeat.lease == id, time.monotonic()
            worker.held = Held(id, worker.process, clients, alone, now, now, taken)

        list(self.workers.overlapped(send, leases))

    def _results(self, r: OpenRound) -> Iterator[ClientResult]:
        """Yield the results of current leases. Results of ended leases are ignored."""
        folder = f"{round_folder(r.plan.round, r.plan.evaluates)}leases/"
        store = self._mailbox.store
        there = set(store.list(folder))
        holders = [(worker, worker.held) for worker in self.workers.by_name.values() if worker.held is not None]
        found = [(w, held, c) for w, held in holders for c in held.clients if f"{folder}{held.lease}/{c}.json" in there]

        def received(given: tuple[Worker, Held, int]) -> ClientResult:
            worker, held, client = given
            key = result_key(worker.member.key, self._site, held.lease)
            result = Mailbox(store, self._mailbox.rules, lambda _: key, lease=held.lease).receive(r.plan, client)
            if isinstance(result, ClientUpdate):
                self._mailbox.put_result(r.plan, result)
            return result

        results = overlapped(store, self._mailbox.held_by(r.plan, [client for *_, client in found]), received, found)
        for (worker, held, client), result in zip(found, results, strict=True):
            if isinstance(result, ClientFailure) and not self._counts(result, r):
                self._rest(worker)
                self._lost(r, worker, [result], counts=True)
                continue
            if isinstance(result, ClientUpdate) and held.alone and not r.plan.evaluates:
                result = changed(result, metrics={**result.metrics, LEASE_S: time.monotonic() - held.since})
            held.clients.remove(client)
            if not held.clients:
                worker.held = None
            worker.failures, worker.why, r.result_at = 0, "", time.monotonic()
            r.worked_at = r.result_at
            r.results[worker.name, self._provisioner.pool(client)] += 1
            last = f"{self._run.run_id}, round {r.plan.round + 1}, client {client}"[:300]
            worker.count(results=worker.message.account.results + 1, last=last)
            r.open_.discard(client)
            yield result

    def _counts(self, failure: ClientFailure, r: OpenRound) -> bool:
        """Return True if the assignment would fail on every worker, so a retry is useless."""
        if failure.stage == "prune":
            return fits_nobody(r.plan.assignment_of[failure.client], self._mailbox.rules, r.algorithm)
        return failure.stage not in NOT_GOOD

    def _end_leases(self, r: OpenRound, lost: Mapping[str, Lost | None]) -> None:
        """Withdraw the assignments of workers that have ended, have failed or do not respond. The caller must determine
        `lost` before it reads results."""
        for worker in list(self.workers.by_name.values()):
            held = worker.held
            ended = why_ended(worker, r, lost.get(worker.name))
            if held is None or ended is None:
                continue
            why, failed, untaken = ended
            if failed or untaken:  # pause the worker, because it would otherwise get the next assignment first
                self._rest(worker, LONGEST_REST_S if failed else self._provisioner.lease_s)
            if failed:
                r.alone.update(held.clients)
            failures = [ClientFailure(r.plan.round, client, LOST, why) for client in held.clients]
            self._lost(r, worker, failures, counts=failed and held.alone)

    @staticmethod
    def _rest(worker: Worker, longest_s: float = LONGEST_REST_S) -> None:
        worker.failures += 1
        worker.rests_until = time.monotonic() + min(longest_s, REST_S * 2 ** min(worker.failures - 1, 20))

    def _lost(self, r: OpenRound, worker: Worker, failures: Sequence[ClientFailure], counts: bool) -> None:
        """Queue assignments without a valid result again. If `counts` is True, count one failed attempt per client."""
        held = worker.held
        assert held is not None
        for failure in failures:
            held.clients.remove(failure.client)
            if counts:
                worker.why = failure.reason
                r.failed_by[failure.client].add(worker.name)
                r.lost[failure.client] += 1
        worker.count(lost=worker.message.account.lost + len(failures))
        if not held.clients:  # every client of the lease has a result or has failed
            worker.held, worker.written_at = None, -math.inf
        again = [failure for failure in failures if r.lost[failure.client] < self._provisioner.options.attempts]
        if again:
            who = ", ".join(str(failure.client) for failure in again)
            log.warning("round %d, client %s: %s; trying again", r.plan.round + 1, who, again[0].reason)
            r.waiting.extendleft(failure.client for failure in reversed(again))
        for failure in failures:
            if failure not in again:
                r.give_up(failure)

    def _waited(self, r: OpenRound) -> float:
        """Return the seconds since a worker last executed an assignment or was about to start."""
        return time.monotonic() - max(r.worked_at, self._provisioner.moved)

    def _may_end_without(self, r: OpenRound) -> bool:
        """Return whether the round has at least one result, and may end without the results that are still missing."""
        some = r.plan.adopted > 0 or len(r.open_) < len(r.plan.assignments)
        return some and (self._provisioner.quorum > 0 or r.own is not None)

    def _give_up(self, r: OpenRound) -> None:
        """Mark waiting clients without available workers as failed, if the round may end without these clients."""
        late = self._waited(r) > self._provisioner.wait_s
        present = {
            pool for w in self.workers.present for pool in r.wanted if self._provisioner.suits(w.member.tier, pool)
        }
        for client in list(r.waiting):
            pool = self._provisioner.pool(client)
            hopeless = pool not in present and self._provisioner.hopeless(pool)
            if hopeless or (late and self._may_end_without(r)):
                r.waiting.remove(client)
                r.give_up(ClientFailure(r.plan.round, client, LOST, self._why_absent(r, client, pool)))

    def _why_absent(self, r: OpenRound, client: int, pool: str) -> str:
        if r.own is not None:
            own = (w for w in self.workers.by_name.values() if w.why and r.suits(w, client, ()))
            failed = "".join(f"; its last assignment failed: {w.why}" for w in own)
            return f"the device with the client's data has not started the assignment{failed}"
        why = self._provisioner.why(pool)
        return f"no worker of {pool} executes assignments{why and f': {why}'}"

    def _check_waiting(self, r: OpenRound) -> None:
        """Log the waiting assignments. Raises Stopped if the round has waited too long."""
        now, workers = time.monotonic(), self.workers.by_name
        # A worker without failures will probably start its assignments, so its lease counts as activity.
        if any(w.held is not None and (w.held.taken or not w.failures) for w in workers.values()):
            r.worked_at = now
        waited, pools = self._waited(r), sorted(r.count(r.waiting))
        if waited > self._provisioner.wait_s and not self._may_end_without(r):
            raise Stopped(
                f"round {r.plan.round + 1}: no worker has started an assignment for {waited:.0f} s; {len(r.open_)} of "
                f"{len(r.plan.assignments)} clients have no result. "
                f"{self._provisioner.advice(sorted(workers), pools)}, then resume with --resume"
            )
        if r.waiting and now - r.reported > REPORT_S:
            r.reported = now
            count, of = len(r.waiting), " or ".join(pools)
            log.info(
                "round %d: %d of %d open assignments wait for a worker of %s", r.plan.round + 1, count, len(r.open_), of
            )
