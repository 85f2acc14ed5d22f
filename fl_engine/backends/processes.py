"""Clients in worker processes of this machine: one per entry of `run.devices`, for as long as the run lasts.

Orders and updates go through the run store, as they do between a coordinator and pods: the worker reads an order,
writes the update, then its manifest. The coordinator tells a worker directly only which orders to take.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.multiprocessing  # noqa: F401 - tensors go to a worker through shared memory

from fl_engine.backends.in_process import by_cost, check_devices, prepare_process
from fl_engine.core import allowed
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, Stopped, first_line
from fl_engine.core.system import told_exit, without_main
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, RoundPlan
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, Work, accept_all, train
from fl_engine.exchange.code import Handed
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.fleet import faults
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.store import tensor_bytes

log = logging.getLogger("flexfleet")

ATTEMPTS = 2
"""When a worker dies, its orders go to another one, at most this many times."""
LOOK_S = 1.0
"""While no worker answers: seconds after which it is asked again whether to stop."""
STOP_S = 60.0
"""A run that is to stop waits for the clients in flight, but so many seconds for workers that use no processor time:
one that hangs never answers."""
SILENT_S = 600.0
"""Seconds without an answer after which the log says so, then after each doubling."""
END_S = 2.0
"""Seconds within which a worker that is told to end does; then it is killed, as one that is stopped has to be."""


@dataclass
class _Worker:
    process: BaseProcess
    link: Connection
    device: str
    group: list[Work] | None = None


class Processes:
    """Outcomes come as clients finish. A worker that dies is replaced."""

    durable = True
    phases: Mapping[str, float] = MappingProxyType({})

    def __init__(
        self,
        site: Site,
        devices: Sequence[str],
        mailbox: Mailbox,
        code: tuple[Path, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`code`: the file of one's own wheel, and its sha256, which workers verify before they import from it.
        `should_stop` is asked while no worker answers. Raises EnvironmentFailure where workers cannot be given the
        data."""
        self._should_stop = should_stop
        self._code = None if code is None else Handed(*code)
        self._site = site
        self._mailbox = mailbox
        check_devices(devices)
        # Workers are forked from a small process that has loaded torch: quick, and safe while this one has threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._workers = [self._start(device) for device in devices]

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped where `should_stop` says so and no worker does anything for STOP_S."""
        groups, failures = accept_all(algorithm, plan.orders, self._site)
        yield from failures
        self._mailbox.put_orders(plan)
        waiting = by_cost(groups, self._site)
        tried: dict[int, int] = {}
        while waiting or any(worker.group for worker in self._workers):
            for worker in self._workers:
                if worker.group is None and waiting:
                    worker.group = waiting.pop()
                    told = [work.order.client for work in worker.group]
                    _tell(worker.link, (algorithm, plan.round, plan.evaluates, told))
            for place, worker in self._finished():
                group, worker.group = worker.group or [], None
                answer = _answer(worker.link)
                if isinstance(answer, FlexfleetError):
                    raise answer  # the store failed, no client
                if answer is not None:
                    yield from self._mailbox.received(plan, [work.order.client for work in group])
                    continue
                worker.process.join()
                reason = f"its worker process ended with {told_exit(worker.process.exitcode)}"
                self._workers[place] = self._start(worker.device)
                first = group[0].order.client
                tried[first] = tried.get(first, 0) + 1
                if tried[first] < ATTEMPTS:
                    log.warning("round %d, client %d: %s; asking again", plan.round + 1, first, reason)
                    waiting.append(group)
                else:
                    for work in group:
                        yield ClientFailure(plan.round, work.order.client, "train", reason)

    def close(self) -> None:
        """Ends the workers, and drops the orders that they are working on."""
        for worker in self._workers:
            worker.link.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()

    def _start(self, device: str) -> _Worker:
        if self._code is not None:
            self._code.check()  # the worker checks it too, but ends without a word
        with without_main(), _explained():
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(self._code, allowed.trusted, self._site, self._mailbox, device, there),
                daemon=True,
                name=f"client on {device}",
            )
            process.start()
        there.close()
        return _Worker(process, here, device)

    def _finished(self) -> list[tuple[int, _Worker]]:
        busy = {worker.link: (place, worker) for place, worker in enumerate(self._workers) if worker.group}
        pids = [worker.process.pid for _, worker in busy.values()]
        begun = since = time.monotonic()
        used, told_s = None, SILENT_S
        while not (ready := wait(list(busy), LOOK_S)):
            before, used, now = used, [_processor_time(pid) for pid in pids], time.monotonic()
            if used != before or None in used or not self._should_stop():
                since = now
            if now - since > STOP_S:
                raise Stopped(
                    "stopped on request, without the clients in flight, whose processes do nothing for "
                    f"{STOP_S:.0f} s: resume with --resume"
                )
            if now - begun > told_s:
                named, told_s = ", ".join(map(str, pids)), 2 * told_s
                log.warning("no client has answered for %.0f s: these processes train, or hang: %s", now - begun, named)
        return [busy[link] for link in ready if isinstance(link, Connection)]


def _processor_time(pid: int | None) -> int | None:
    """What a process has used, in the clock's ticks; None where the system does not say."""
    try:
        used = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return int(used[11]) + int(used[12])
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def _explained() -> Iterator[None]:
    """Names what a worker lacks when it starts: open files, or room in /dev/shm, through which tensors go to it
    (containers often have 64 MB)."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise EnvironmentFailure(
            f"no worker process can be started ({error.strerror}): raise the limit of open files (ulimit -n), or give "
            "fewer run.devices"
        ) from error
    except RuntimeError as error:
        if "/torch_" not in str(error) or "No space left on device" not in str(error):
            raise
        raise EnvironmentFailure(
            f"the data do not fit into /dev/shm, through which worker processes get them ({first_line(error)}): give "
            "it more room (docker run --shm-size=2g; in a pod an emptyDir of memory), or take run.backend=in_process"
        ) from error


def _tell(link: Connection, what: Any) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # it has died: the next read of its answer notices
        link.send(what)


def _answer(link: Connection) -> Any:
    """None: the worker is gone."""
    try:
        return link.recv()
    except (EOFError, ConnectionResetError):
        return None


def _serve(code: None, trusted: set[str], site: Site, mailbox: Mailbox, device: str, link: Connection) -> None:
    """What a worker process runs, until the coordinator closes the connection or is gone. `code` is the first argument
    since a `Handed` wheel has to be there before the site is unpickled."""
    # Ctrl-C and the end of a terminal reach all its processes: only the coordinator acts on them.
    for name in {"SIGINT", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    allowed.trusted.update(trusted)
    prepare_process((device,))
    while True:
        try:
            algorithm, round, evaluates, clients = link.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            carry_out(algorithm, site, mailbox, round, clients, device, evaluates=evaluates)
        except FlexfleetError as error:
            _tell(link, error)
        else:
            _tell(link, clients)


def carry_out(
    algorithm: Algorithm,
    site: Site,
    mailbox: Mailbox,
    round: int,
    clients: Sequence[int],
    device: str,
    really_slow: bool = False,
    evaluates: bool = False,
) -> None:
    """Reads these clients' orders from the mailbox, trains them (side by side where possible), and writes their
    outcomes. `really_slow`: a client that a fault makes slow really waits. `evaluates`: the orders are those of the
    round's evaluation."""
    orders = mailbox.orders(round, clients, evaluates)
    groups, failures = accept_all(algorithm, orders.values(), site)
    faulty = {client: site.befalls(order) for client, order in orders.items()}

    def outcomes() -> Iterator[Outcome]:
        for outcome in chain(failures, (one for group in groups for one in train(group, site, device))):
            fault = faulty[outcome.client]
            if really_slow and fault is not None and isinstance(outcome, ClientUpdate):
                time.sleep((faults.slowness(fault) - 1) * outcome.metrics["seconds"])
            yield outcome

    def put(outcome: Outcome) -> None:
        fault = faulty[outcome.client]
        spoil = faults.damaged if fault is not None and fault.kind == "corrupt" else None
        mailbox.put_outcome(RoundPlan(round, (orders[outcome.client],), evaluates=evaluates), outcome, spoil)

    state = coding.bytes_of(replace(site.rules, algorithm=algorithm).client_state)
    largest = max((tensor_bytes(order.payload) for order in orders.values()), default=0)
    # An outcome, and a copy of what is sent.
    for _ in overlapped(mailbox.store, 2 * (largest + state), put, outcomes()):
        pass
