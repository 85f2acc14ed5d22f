"""Train clients in this process. Each entry in `run.devices` is a CPU thread or an accelerator that trains one client,
or one group of clients, at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from fl_engine.core.contracts import Algorithm
from fl_engine.core.costs import macs_per_sample
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.system import keep_freed_memory
from fl_engine.core.types import ClientResult, RoundPlan
from fl_engine.exchange.client import Site, Work, accept_all, deliver, train
from fl_engine.training.isolation import is_isolated, set_repeatable
from fl_engine.training.numerics import set_mkl_branch


class InProcess:
    """Backend that trains clients in threads. Results are yielded when a client or a group of clients finishes."""

    durable = False

    def __init__(self, site: Site, devices: Sequence[str] = ("cpu",)) -> None:
        self._site = site
        self._devices = tuple(devices)
        check_devices(devices)
        prepare_process(devices)

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        groups, failures = accept_all(algorithm, plan.assignments, self._site)
        yield from failures
        for result in self._trained(groups):
            yield deliver(algorithm, result, plan.assignment_of[result.client], self._site)
            del result  # free the result's memory before the next client trains

    def _trained(self, groups: list[list[Work]]) -> Iterator[ClientResult]:
        if len(self._devices) == 1 or len(groups) == 1:
            groups.reverse()
            while groups:  # use pop to free each group after its training
                yield from train(groups.pop(), self._site, self._devices[0])
        else:
            yield from self._spread(groups)

    def _spread(self, groups: list[list[Work]]) -> Iterator[ClientResult]:
        waiting, free = by_cost(groups, self._site), list(self._devices)
        running: dict[Future[list[ClientResult]], str] = {}
        """Map the future of each group that is training to the device of the group."""
        with ThreadPoolExecutor(len(free)) as threads:
            while waiting or running:
                while waiting and free:
                    device = free.pop()
                    running[threads.submit(train, waiting.pop(), self._site, device)] = device
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                free += [running.pop(future) for future in done]
                while done:  # use pop to free each future after its result was yielded
                    yield from done.pop().result()


def by_cost(groups: list[list[Work]], site: Site) -> list[list[Work]]:
    """Sort the groups by ascending cost, so that `pop` returns the most expensive group first."""

    def cost(group: list[Work]) -> float:
        task = group[0].task
        return macs_per_sample(site.family, task) * task.epochs * sum(len(work.indices) for work in group)

    return sorted(groups, key=cost)


def prepare_process(devices: Sequence[str]) -> None:
    """Set torch to one thread, so that results do not depend on the number of cores. Flush denormal numbers (below
    1.2e-38 in float32) to zero, because decaying weights become denormal and slow down some processors
    (docs/performance.md). On CUDA, use deterministic algorithms. Raises EnvironmentFailure if the
    processor cannot flush denormal numbers."""
    set_mkl_branch()
    torch.set_num_threads(1)
    if not torch.set_flush_denormal(True):
        raise EnvironmentFailure("the processor must support flushing denormals to zero. Train on x86 or AArch64")
    if any(name.startswith("cuda") for name in devices):
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        set_repeatable(True, warn_only=True)
    if not is_isolated():
        keep_freed_memory()


def check_devices(names: Sequence[str]) -> None:
    """Raise EnvironmentFailure if torch cannot use a device, or if the devices are not all the same model."""
    for name in names:
        check_device(name)
    models = {torch.cuda.get_device_name(name) if name.startswith("cuda") else name.partition(":")[0] for name in names}
    if len(models) > 1:
        got = ", ".join(sorted(models))
        raise EnvironmentFailure(f"run.devices must all have the same GPU model, which affects rounding, got {got}")


def check_device(name: str, named_by: str = "run.devices") -> None:
    """Raise EnvironmentFailure if torch cannot use the device."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch may fail to import a device's package
        raise EnvironmentFailure(f"{named_by}: torch cannot use {name!r}: {str(error).splitlines()[0]}") from error
