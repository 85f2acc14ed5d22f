"""Train clients in worker processes on this machine, one process for each entry in `run.devices`. Assignments and
results are sent through pipes. If a worker process dies, a new process retries its assignments."""

from __future__ import annotations

import io
import logging
import math
import multiprocessing
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing  # this import makes processes share tensors instead of copying them

from fl_engine.backends.in_process import by_cost, check_devices, prepare_process
from fl_engine.core import allowed
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ON_REQUEST, EnvironmentFailure, FlexfleetError, Stopped, first_line
from fl_engine.core.system import exit_text, without_main
from fl_engine.core.types import ClientFailure, ClientResult, RoundPlan
from fl_engine.exchange.client import Site, Work, accept_all, deliver, train
from fl_engine.storage.code import Handed
from fl_engine.storage.store import bytes_of

log = logging.getLogger("flexfleet")

ATTEMPTS = 2
"""Maximum number of attempts to execute assignments. An attempt fails if the worker dies."""
LOOK_S, STOP_S = 1.0, 60.0
"""Seconds between two calls of `should_stop`, and maximum seconds that a stopping run waits for busy workers."""
END_S = 2.0
"""Seconds from SIGTERM to SIGKILL when a worker is terminated."""
ENDED = (EOFError, ConnectionResetError)
"""Errors that a read raises if the process at the other end of the pipe has ended."""


@dataclass
class _Worker:
    process: BaseProcess
    link: Connection
    device: str
    group: list[Work] | None = None
    """The assignments that the worker executes in parallel."""


class Processes:
    """Backend that trains clients in processes. Results are yielded when a client or a group of clients finishes."""

    durable = False

    def __init__(
        self,
        site: Site,
        devices: Sequence[str],
        code: tuple[Path, str] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start the workers. `code` is the path and SHA-256 hash of the wheel with user code. Workers verify the hash
        before they import the wheel. Raises EnvironmentFailure if the workers cannot be started."""
        self._should_stop = should_stop
        self._code = None if code is None else Handed(*code)
        self._site = site
        check_devices(devices)
        # Fork workers from a separate server process that has loaded torch, because forking a process with several
        # threads is unsafe.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._workers = [self._start(device) for device in devices]

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        """Yield results. Raises Stopped if no busy worker returns a result within STOP_S after a stop request."""
        groups, failures = accept_all(algorithm, plan.assignments, self._site)
        yield from failures
        waiting, tried = by_cost(groups, self._site), Counter[int]()
        while waiting or any(worker.group for worker in self._workers):
            for worker in self._workers:
                if worker.group is None and waiting:
                    worker.group = waiting.pop()
                    message = algorithm, [work.assignment for work in worker.group]
                    # Send in a thread, because writing blocks while the worker is busy.
                    threading.Thread(target=_send, args=(worker.link, message), daemon=True, name="assignments").start()
            for place, worker in self._finished():
                group, worker.group = worker.group or [], None
                try:
                    found = _received(worker.link)
                except ENDED:
                    worker.process.join()
                    reason = f"the client's worker process ended with {exit_text(worker.process.exitcode)}"
                    self._workers[place] = self._start(worker.device)
                    first = group[0].assignment.client
                    tried[first] += 1
                    if tried[first] < ATTEMPTS:
                        log.warning("round %d, client %d: %s; trying again", plan.round + 1, first, reason)
                        waiting.append(group)
                        continue
                    found = [ClientFailure(plan.round, w.assignment.client, "train", reason) for w in group]
                if isinstance(found, FlexfleetError):
                    raise found  # an error in the algorithm ends the run
                found.reverse()
                while found:  # free each result before the next is decoded, because tensors may be large
                    yield deliver(algorithm, found[-1], plan.assignment_of[found.pop().client], self._site)

    def close(self) -> None:
        """Terminate the workers, and discard unfinished assignments."""
        for worker in self._workers:
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join(END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.link.close()

    def _start(self, device: str) -> _Worker:
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
            cure = "Raise the limit of open files (ulimit -n) or the size of /dev/shm, or set run.backend=in_process"
            raise EnvironmentFailure(f"cannot start a worker process: {first_line(error)}. {cure}") from error
        there.close()
        return _Worker(process, here, device)

    def _finished(self) -> list[tuple[int, _Worker]]:
        """Wait until a worker has a result or has ended. Return the pair (index, worker) of each such worker."""
        busy = {worker.link: (place, worker) for place, worker in enumerate(self._workers) if worker.group}
        since = math.inf
        while not (ready := wait(list(busy), LOOK_S)):
            now = time.monotonic()
            since = min(since, now) if self._should_stop() else math.inf
            if now - since > STOP_S:
                raise Stopped(f"{ON_REQUEST}. Some workers did not finish within {STOP_S:.0f} s and were terminated")
        return [busy[link] for link in ready if isinstance(link, Connection)]


class _Pickler(pickle.Pickler):
    """Pickles tensors as separate buffers, so that tensors are not copied into one large message."""

    def reducer_override(self, value: object) -> Any:
        if type(value) is not torch.Tensor:
            return NotImplemented
        memory = bytes_of(value.detach().cpu().contiguous())
        return _tensor, (pickle.PickleBuffer(memory), value.dtype, tuple(value.shape))


def _tensor(memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(shape) if memory else torch.empty(shape, dtype=dtype)


def _send(link: Connection, content: object) -> None:
    """Send an object without its tensors, and then each tensor as a separate message."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(content)
    with suppress(OSError):  # the next read detects that the other process has ended
        link.send_bytes(pickle.dumps((file.getvalue(), len(buffers))))
        for buffer in buffers:
            link.send_bytes(buffer)


def _received(link: Connection) -> Any:
    content, count = pickle.loads(link.recv_bytes())  # noqa: S301 - from our own process
    buffers = [bytearray(link.recv_bytes()) for _ in range(count)]
    return pickle.loads(content, buffers=buffers)  # noqa: S301 - from our own process


def _serve(code: None, trusted: set[str], site: Site, device: str, link: Connection) -> None:
    """Execute assignments in a worker process until the connection is closed. `code` is the first argument, because the
    wheel (`Handed`) must be importable before `site` is unpickled."""
    # Ctrl-C and a closed terminal send signals to all processes, but only the coordinator must handle them.
    for name in {"SIGINT", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    allowed.trusted.update(trusted)
    prepare_process((device,))
    with suppress(*ENDED):
        while True:
            algorithm, assignments = _received(link)
            try:
                groups, failures = accept_all(algorithm, assignments, site)
                results = [*failures, *(result for works in groups for result in train(works, site, device))]
            except FlexfleetError as error:
                _send(link, error)
                continue
            _send(link, results)
            del results, groups, assignments
