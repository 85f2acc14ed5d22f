"""Clients in worker processes of this machine: one process per entry of `run.devices`, for the whole run.

Assignments and results travel through a pipe. A worker process that dies is replaced, and another one gets its
assignments.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing  # noqa: F401 - tensors go to a worker through shared memory

from fl_engine.backends.in_process import by_cost, check_devices, prepare_process
from fl_engine.core import allowed
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, EnvironmentFailure, FlexfleetError, Stopped, first_line
from fl_engine.core.system import told_exit, without_main
from fl_engine.core.types import ClientFailure, Outcome, Params, RoundPlan, WorkOrder
from fl_engine.exchange.client import Site, Work, accept_all, delivered, train
from fl_engine.storage.code import Handed
from fl_engine.storage.store import decode, encode

log = logging.getLogger("flexfleet")

ATTEMPTS = 2
"""How many workers may die with the same assignments."""
LOOK_S, STOP_S = 1.0, 60.0
"""Seconds between two calls of `should_stop`, and how long a run that is to stop waits for its busy workers."""
SILENT_S = 600.0
"""Seconds without a result after which the log names the workers that are busy."""
END_S = 2.0
"""Seconds after SIGTERM until a worker is killed."""


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
class _Group:
    """A message to a worker process: assignments that train side by side."""

    turn: int
    """Number of the call of `Processes.run`. Tensors of other turns are dropped."""
    algorithm: Algorithm
    orders: list[WorkOrder]
    """Without their tensors."""
    tensors: list[tuple[Key, Key]]
    """Payload and memory of each assignment."""
    new: list[Key]
    """Tensors that the process does not have yet. Each follows as another message."""


class Processes:
    """Outcomes arrive as clients finish; clients that trained side by side arrive together."""

    durable = False

    def __init__(
        self,
        site: Site,
        devices: Sequence[str],
        code: tuple[Path, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`code`: the file of the run's own wheel, and its sha256, which workers verify before they import from it.
        Raises EnvironmentFailure if the workers cannot be started."""
        self._should_stop = should_stop
        self._code = None if code is None else Handed(*code)
        self._site, self._turn = site, 0
        check_devices(devices)
        # Workers are forked from a small process that has loaded torch: quick, and safe while this one has threads.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._workers = [self._start(device) for device in devices]

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        """Raises Stopped if the run is to stop and no busy worker has a result within STOP_S."""
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
                    while answer:  # drop each outcome after it was yielded, because its tensors may be large
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
        sent = pickle.dumps(_Group(self._turn, algorithm, bare, keys, list(new)))  # type: ignore[arg-type]
        messages = [sent, *(encode(dict(of)) for of in new.values())]
        # In a thread, because writing blocks while the process is busy.
        threading.Thread(target=_write, args=(worker.link, messages), daemon=True, name="orders").start()

    def close(self) -> None:
        """End the workers, and drop the assignments that they execute."""
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
            self._code.check()  # the worker checks it too, but ends without a message
        try:
            with without_main():
                here, there = self._context.Pipe()
                process = self._context.Process(
                    target=_serve,
                    args=(self._code, allowed.trusted, self._site, device, there),
                    daemon=True,
                    name=f"client on {device}",
                )
                process.start()
        except (OSError, RuntimeError) as error:  # torch raises RuntimeError if /dev/shm is full
            raise EnvironmentFailure(
                f"cannot start a worker process: {first_line(error)}. Raise the limit of open files (ulimit -n) or the "
                "size of /dev/shm (docker run --shm-size=2g), or set run.backend=in_process"
            ) from error
        there.close()
        return _Worker(process, here, device)

    def _finished(self) -> list[tuple[int, _Worker]]:
        busy = {worker.link: (place, worker) for place, worker in enumerate(self._workers) if worker.group}
        began = reported = time.monotonic()
        asked = math.inf
        while not (ready := wait(list(busy), LOOK_S)):
            now = time.monotonic()
            asked = min(asked, now) if self._should_stop() else math.inf
            if now - asked > STOP_S:
                raise Stopped(f"{ON_REQUEST}; workers that had no result within {STOP_S:.0f} s were not waited for")
            if now - reported > SILENT_S:
                reported, pids = now, ", ".join(str(worker.process.pid) for _, worker in busy.values())
                log.warning("no result for %.0f s; processes that train, or hang: %s", now - began, pids)
        return [busy[link] for link in ready if isinstance(link, Connection)]


def _answer(link: Connection) -> Any:
    """Return the outcomes of a group in reverse order, each with its tensors as bytes; or an error. None: the worker
    has died."""
    try:
        answer = pickle.loads(link.recv_bytes())  # noqa: S301 - from our own process
        if isinstance(answer, FlexfleetError):
            return answer
        return [(outcome, [link.recv_bytes() for _ in range(count)]) for outcome, count in answer][::-1]
    except (EOFError, ConnectionResetError):
        return None


def _write(link: Connection, messages: Sequence[bytes]) -> None:
    with suppress(OSError):  # `_answer` reports that the worker has died
        for message in messages:
            link.send_bytes(message)


def _parts(outcome: Outcome) -> list[Params]:
    """Return payload, state, and the encoded payload if there is one."""
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
    """Execute assignments in a worker process until the connection is closed. `code` is the first argument because a
    `Handed` wheel must be enabled before the site is unpickled."""
    # Ctrl-C and the end of a terminal reach all processes; only the coordinator must act on them.
    for name in {"SIGINT", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    allowed.trusted.update(trusted)
    prepare_process((device,))
    turn, known = 0, dict[Key, Params]()
    while True:
        try:
            group: _Group = pickle.loads(link.recv_bytes())  # noqa: S301 - from our own process
        except (EOFError, ConnectionResetError):
            return
        if group.turn != turn:
            turn, known = group.turn, {}
        known |= {key: decode(link.recv_bytes(), "an assignment") for key in group.new}
        tensors = [[known[key] for key in keys] for keys in group.tensors]
        orders = [
            replace(order, payload=payload, memory=memory)
            for order, (payload, memory) in zip(group.orders, tensors, strict=True)
        ]
        try:
            groups, failures = accept_all(group.algorithm, orders, site)
            outcomes = [*failures, *(outcome for works in groups for outcome in train(works, site, device))]
        except FlexfleetError as error:
            with suppress(BrokenPipeError, ConnectionResetError):  # the next read finds that the coordinator has ended
                link.send_bytes(pickle.dumps(error))
            continue
        with suppress(BrokenPipeError, ConnectionResetError):
            _send(link, outcomes)
        del outcomes, groups
