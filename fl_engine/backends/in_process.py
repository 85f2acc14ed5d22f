"""Clients in this process: one thread per entry of `run.devices`, each client on one CPU thread or one accelerator."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fl_engine.client import Site, execute
from fl_engine.errors import EnvironmentFailure
from fl_engine.types import Algorithm, Outcome, RoundPlan


class InProcess:
    """Outcomes come in the order of the plan, with at most one more client in flight than there are devices."""

    def __init__(self, site: Site, devices: tuple[str, ...] = ("cpu",)) -> None:
        self._site = site
        self._devices = devices
        for name in devices:
            check_device(name)
        # The same bits whatever the machine's core count: a client is one thread (torch's own included).
        torch.set_num_threads(1)
        if any(name.startswith("cuda") for name in devices):
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.deterministic = True

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        if len(self._devices) == 1:
            for order in plan.orders:
                yield execute(algorithm, order, self._site, self._devices[0])
            return
        with ThreadPoolExecutor(len(self._devices)) as threads:
            flying: deque[Future[Outcome]] = deque()
            for i, order in enumerate(plan.orders):
                device = self._devices[i % len(self._devices)]
                flying.append(threads.submit(execute, algorithm, order, self._site, device))
                if len(flying) > len(self._devices):
                    yield flying.popleft().result()
            while flying:
                yield flying.popleft().result()


def check_device(name: str) -> None:
    """Raises EnvironmentFailure where torch does not have the device."""
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise EnvironmentFailure(
            f"run.devices names {name!r}, which this torch cannot use: {str(error).splitlines()[0]}"
        ) from error
