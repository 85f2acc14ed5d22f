"""Clients in this process: one thread per entry of `run.devices`, and each client on one CPU thread or accelerator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue

import torch

from fl_engine.core.contracts import Algorithm
from fl_engine.core.costs import macs_per_sample
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.system import keep_freed_memory
from fl_engine.core.types import Outcome, RoundPlan
from fl_engine.exchange.client import Site, Work, accept_all, delivered, train
from fl_engine.training.isolation import is_isolated, set_repeatable
from fl_engine.training.numerics import settle


class InProcess:
    """Outcomes arrive as clients finish; clients that trained side by side arrive together."""

    durable = False

    def __init__(self, site: Site, devices: Sequence[str] = ("cpu",)) -> None:
        self._site = site
        self._devices = tuple(devices)
        check_devices(devices)
        prepare_process(devices)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[Outcome]:
        groups, failures = accept_all(algorithm, plan.orders, self._site)
        yield from failures
        for outcome in self._trained(groups):
            yield delivered(algorithm, outcome, plan.order_of[outcome.client], self._site)
            del outcome  # its memory must be free while the next client trains

    def _trained(self, groups: list[list[Work]]) -> Iterator[Outcome]:
        if len(self._devices) == 1 or len(groups) == 1:
            groups.reverse()
            while groups:  # drop each group after its training
                yield from train(groups.pop(), self._site, self._devices[0])
        else:
            yield from self._spread(groups)

    def _spread(self, groups: list[list[Work]]) -> Iterator[Outcome]:
        free: SimpleQueue[str] = SimpleQueue()
        for name in self._devices:
            free.put(name)

        def on_a_free_device(group: list[Work]) -> list[Outcome]:
            device = free.get()
            try:
                return train(group, self._site, device)
            finally:
                free.put(device)

        waiting = by_cost(groups, self._site)
        with ThreadPoolExecutor(len(self._devices)) as threads:
            running: set[Future[list[Outcome]]] = set()
            while waiting or running:
                while waiting and len(running) < len(self._devices):
                    running.add(threads.submit(on_a_free_device, waiting.pop()))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                while done:  # drop each future after its result was yielded
                    yield from done.pop().result()


def by_cost(groups: list[list[Work]], site: Site) -> list[list[Work]]:
    """Return the groups with the longest last, so that `pop` starts long groups first."""

    def cost(group: list[Work]) -> float:
        task = group[0].task
        return macs_per_sample(site.family, task) * task.epochs * sum(len(work.indices) for work in group)

    return sorted(groups, key=cost)


def prepare_process(devices: Sequence[str]) -> None:
    """Set torch to one thread, so that bits do not depend on the number of cores. Flush denormal numbers (below 1.2e-38
    in float32) to zero, because decaying weights become denormal and slow down some processors
    (docs/performance/small-networks.md). On CUDA, use deterministic algorithms. Raises EnvironmentFailure if the
    processor cannot flush denormal numbers."""
    settle()
    torch.set_num_threads(1)
    if not torch.set_flush_denormal(True):
        raise EnvironmentFailure(
            "this processor or build of torch cannot flush denormal numbers to zero. Train on x86 or AArch64"
        )
    if any(name.startswith("cuda") for name in devices):
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        set_repeatable(True, warn_only=True)
    if not is_isolated():
        keep_freed_memory()


def check_devices(names: Sequence[str]) -> None:
    """Raise EnvironmentFailure if torch cannot use a device, or if the devices are of different models."""
    for name in names:
        check_device(name)
    models = {torch.cuda.get_device_name(name) if name.startswith("cuda") else name.partition(":")[0] for name in names}
    if len(models) > 1:
        raise EnvironmentFailure(
            f"run.devices must be of one model, got {', '.join(sorted(models))}. Otherwise bits depend on which device "
            "trains a client"
        )


def check_device(name: str, named_by: str = "run.devices") -> None:
    """Raise EnvironmentFailure if torch cannot use the device."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: a device's own package
        raise EnvironmentFailure(
            f"{named_by} must be devices that this torch can use, got {name!r}: {str(error).splitlines()[0]}"
        ) from error
