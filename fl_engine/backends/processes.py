"""Clients in worker processes of this machine: one per entry of `run.devices`, for as long as the run lasts.

Orders and results travel through a pipe. A worker process that dies is replaced, and another one gets its orders.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401 - tensors go to a worker through shared memory

from fl_engine.backends.in_process import by_cost, check_devices, prepare_process
from fl_engine.core import allowed
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import EnvironmentFailure, FlexfleetError, Stopped, first_line
from fl_engine.core.system import told_exit, without_main
from fl_engine.core.types import ClientFailure, Outcome, Params, RoundPlan, WorkOrder
from fl_engine.exchange.client import Site, Work, accept_all, delivered, train
from fl_engine.storage.code import Handed
from fl_engine.storage.store import decode, encode

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
    has: set[Key] = field(default_factory=set)
    """The tensors that it was sent in this round."""


Key = tuple[int, ...]
"""Identifies tensors, as long as the round's plan exists."""


@dataclass(frozen=True)
class _Asked:
    """A message to a worker process."""

    turn: int
    """Of `Processes.run`: tensors of other turns are dropped."""
    algorithm: Algorithm
    orders: list[WorkOrder]
    """Without their tensors."""
    tensors: list[tuple[Key, Key]]
    """Payload and memory of each order."""
    new: list[Key]
    """Tensors that the process does not have yet. They follow, each as a message of its own."""


class Processes:
    """Outcomes come as clients finish, those of clients that trained side by side together."""

    durable = False

    def __init__(
        self,
        site: Site,
        devices: Sequence[str],
        code: tuple[Path, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`code`: the file of the run's own wheel, and its sha256, which workers verify before they import from it.
        `should_stop` is asked while no worker answers. Raises EnvironmentFailure if workers cannot be given the
        data."""
        self._should_stop = should_stop
        self._code = None if code is None else Handed(*code)
        self._site, self._turn = site, 0
        check_devices(devices)
        # Workers are forked from a small process that has loaded torch: quick, and safe while this one has threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._workers = [self._start(device) for device in devices]

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped if `should_stop` returns True and no worker does anything for STOP_S."""
        groups, failures = accept_all(algorithm, plan.orders, self._site)
        yield from failures
        waiting, tried = by_cost(groups, self._site), dict[int, int]()
        self._turn += 1
        for worker in self._workers:
            worker.has.clear()
        while waiting or any(worker.group for worker in self._workers):
            for worker in self._workers:
                if worker.group is None and waiting:
                    worker.group = waiting.pop()
                    self._ask(worker, algorithm, [work.order for work in worker.group])
            for place, worker in self._finished():
                group, worker.group = worker.group or [], None
                answer = _answer(worker.link)
                if isinstance(answer, FlexfleetError):
                    raise answer  # the algorithm's code is wrong
                if answer is not None:
                    while answer:  # each outcome is let go once it was yielded, because its tensors may be large
                        outcome = _unpacked(*answer.pop())
                        yield delivered(algorithm, outcome, plan.order_of[outcome.client], self._site)
                        del outcome
                    continue
                worker.process.join()
                reason = f"its worker process ended with {told_exit(worker.process.exitcode)}"
                self._workers[place] = self._start(worker.device)
                first = group[0].order.client
                tried[first] = tried.get(first, 0) + 1
                if tried[first] < ATTEMPTS:
                    log.warning("round %d, client %d: %s; trying again", plan.round + 1, first, reason)
                    waiting.append(group)
                else:
                    for work in group:
                        yield ClientFailure(plan.round, work.order.client, "train", reason)

    def _ask(self, worker: _Worker, algorithm: Algorithm, orders: Sequence[WorkOrder]) -> None:
        keys = [tuple(tuple(map(id, of.values())) for of in (order.payload, order.memory)) for order in orders]
        new = {
            key: of
            for order, pair in zip(orders, keys, strict=True)
            for key, of in zip(pair, (order.payload, order.memory), strict=True)
            if key not in worker.has
        }
        worker.has |= new.keys()
        bare = [replace(order, payload={}, memory={}, encoded=None) for order in orders]
        asked = pickle.dumps(_Asked(self._turn, algorithm, bare, keys, list(new)))  # type: ignore[arg-type]
        messages = [asked, *(encode(dict(of)) for of in new.values())]
        # In a thread, because a process that hangs reads nothing.
        threading.Thread(target=_write, args=(worker.link, messages), daemon=True, name="orders").start()

    def close(self) -> None:
        """Ends the workers, and drops the orders that they are working on."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.link.close()

    def _start(self, device: str) -> _Worker:
        if self._code is not None:
            self._code.check()  # the worker checks it too, but ends without a word
        with without_main(), _explained():
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve,
                args=(self._code, allowed.trusted, self._site, device, there),
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


def _answer(link: Connection) -> Any:
    """The outcomes of a group, the last one first, each with its tensors as bytes; or an error. None: the worker is
    gone."""
    try:
        answer = pickle.loads(link.recv_bytes())  # noqa: S301 - from our own process
        if isinstance(answer, FlexfleetError):
            return answer
        return [(outcome, [link.recv_bytes() for _ in range(count)]) for outcome, count in answer][::-1]
    except (EOFError, ConnectionResetError):
        return None


def _write(link: Connection, messages: Sequence[bytes]) -> None:
    with suppress(OSError):  # the worker has died: who waits for its answer notices
        for message in messages:
            link.send_bytes(message)


def _parts(outcome: Outcome) -> list[Params]:
    """Payload, state, and the encoded payload if there is one."""
    if isinstance(outcome, ClientFailure):
        return []
    return [outcome.payload, outcome.state] + ([] if outcome.encoded is None else [outcome.encoded])


def _send(link: Connection, outcomes: Sequence[Outcome]) -> None:
    bare = [o if isinstance(o, ClientFailure) else replace(o, payload={}, state={}, encoded=None) for o in outcomes]
    link.send_bytes(pickle.dumps([(o, len(_parts(full))) for o, full in zip(bare, outcomes, strict=True)]))
    for outcome in outcomes:
        for part in _parts(outcome):
            link.send_bytes(encode(dict(part)))


def _unpacked(outcome: Outcome, values: list[bytes]) -> Outcome:
    if isinstance(outcome, ClientFailure):
        return outcome
    values.reverse()
    found = []
    while values:
        found.append(decode(values.pop(), "a worker's result"))
    payload, state, *encoded = found
    return replace(outcome, payload=payload, state=state, encoded=encoded[0] if encoded else None)


def _serve(code: None, trusted: set[str], site: Site, device: str, link: Connection) -> None:
    """What a worker process runs, until the coordinator closes the connection or is gone. `code` is the first argument
    because a `Handed` wheel must be enabled before the site is unpickled."""
    # Ctrl-C and the end of a terminal reach all its processes: only the coordinator acts on them.
    for name in {"SIGINT", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    allowed.trusted.update(trusted)
    prepare_process((device,))
    turn, known = 0, dict[Key, Params]()
    while True:
        try:
            asked: _Asked = pickle.loads(link.recv_bytes())  # noqa: S301 - from our own process
        except (EOFError, ConnectionResetError):
            return
        if asked.turn != turn:
            turn, known = asked.turn, {}
        known |= {key: decode(link.recv_bytes(), "an order") for key in asked.new}
        tensors = [[known[key] for key in keys] for keys in asked.tensors]
        orders = [
            replace(order, payload=payload, memory=memory)
            for order, (payload, memory) in zip(asked.orders, tensors, strict=True)
        ]
        try:
            groups, failures = accept_all(asked.algorithm, orders, site)
            outcomes = [*failures, *(outcome for group in groups for outcome in train(group, site, device))]
        except FlexfleetError as error:
            with suppress(BrokenPipeError, ConnectionResetError):  # the coordinator is gone: the next read notices
                link.send_bytes(pickle.dumps(error))
            continue
        with suppress(BrokenPipeError, ConnectionResetError):
            _send(link, outcomes)
        del outcomes, groups
