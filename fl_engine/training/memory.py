"""How much memory training takes, level by level.

The memory of training is not proportional to the parameters: activations, the batch and the teachers of a distillation
take memory, too. So the coordinator measures the peak of every level of the pool, as clients train it, and a client
trains the levels whose peak fits. Algorithms and the server's checks compare what is free to a level's share of the
parameters, so free memory is converted to that unit:

    room = need of level i         ->  just above 100 * share of level i, so that level i fits (if no smaller level
                                       needs more)
    room between needs i and i+1   ->  in proportion between the two shares
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.core import allowed
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.fields import STRICT
from fl_engine.core.samples import Data
from fl_engine.core.slicing import full_shapes, is_statistic, made_up, shapes, take
from fl_engine.core.system import of_posix, told_exit, without_main
from fl_engine.core.task import Task
from fl_engine.core.types import LocalTask, Params, Pool, SubmodelSpec
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import Numerics

BATCHES = 3
"""Batches of a trial. After the second one the optimizer has its state, and the allocator what it caches."""
Bytes = Annotated[int, Field(ge=0, lt=2**60)]
HEADROOM = 1.25
"""`needed` multiplies the measured peak by this: reading files takes memory, and the allocator caches some."""


@dataclass(frozen=True)
class Peaks:
    """Resident memory."""

    __pydantic_config__ = STRICT

    base: Bytes
    """Before a client trains, with the data set."""
    levels: tuple[Bytes, ...]
    """At the peak of training each member of the pool."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Bytes that training each member takes in addition to `base`."""
        return tuple(max(1, peak - self.base) for peak in self.levels)


@dataclass(frozen=True)
class Trial:
    """A client of a level receives the weights of `sent` and trains `task`."""

    name: str
    sent: SubmodelSpec
    task: LocalTask


def level_peaks(
    family: ModelFamily,
    data: Data,
    trials: Sequence[Trial],
    samples: int,
    numerics: Numerics,
    prepare: Callable[[], None],
) -> Peaks:
    """Measure each trial in a process of its own, which normalises `samples` made-up samples like those of `data` and
    trains three batches of them. `prepare` runs there first and sets the process up like a client's."""
    found = [measured(family, data, trial, samples, numerics, prepare) for trial in trials]
    base = max(before for before, _ in found)
    return Peaks(base, tuple(base + peak - before for before, peak in found))


def measured(
    family: ModelFamily,
    data: Data,
    trial: Trial,
    samples: int,
    numerics: Numerics,
    prepare: Callable[[], None],
    device: str = "cpu",
) -> tuple[int, int]:
    """One trial of `level_peaks`: (resident memory before, at the peak) in bytes; on a GPU, what torch's allocator
    holds there."""
    what = f"training {trial.name} once, to measure its memory,"
    short = "give the coordinator as much memory as the largest level takes"
    nothing = torch.arange(0)
    kind = data.part(nothing, nothing)  # without samples, which would have to be sent to the process
    before, peak = in_child_process(what, short, _measure, family, kind, trial, samples, numerics, prepare, device)
    return int(before), int(peak)


def _measure(
    family: ModelFamily,
    kind: Data,
    trial: Trial,
    samples: int,
    numerics: Numerics,
    prepare: Callable[[], None],
    device: str,
) -> tuple[int, int]:
    prepare()
    peak = partial(torch.cuda.max_memory_reserved, device) if device.startswith("cuda") else resident_peak
    before = peak()
    sent = made_up_weights(family, trial.sent)  # referenced while it trains, as a client references what it received
    job = made_up_job(family, kind.task, trial, sent, kind.normalise(_made_up_like(family, kind, samples)), device)
    task = replace(job.task, epochs=1)
    if task.widths and task.sandwich is None:  # so few steps may not draw the largest
        task = replace(task, widths=(task.spec,))
    train(family, kind.task, [replace(job, task=task)], numerics, most_steps=BATCHES)
    return before, peak()


def made_up_job(family: ModelFamily, goal: Task, trial: Trial, sent: Params, x: Tensor, device: str = "cpu") -> Job:
    """The job of a client that received the weights `sent` and has the samples x, with made-up targets."""
    received = take(sent, family.layout(), trial.task.spec, have=trial.sent)
    y = goal.examples(len(x), torch.Generator().manual_seed(0))
    return Job(trial.task, received, x.to(device), y.to(device))


def _made_up_like(family: ModelFamily, kind: Data, samples: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if not kind.has_images:
        return made_up(family, samples, generator)
    return torch.randint(256, (samples, *family.input_shape), dtype=torch.uint8, generator=generator)


def made_up_weights(family: ModelFamily, spec: SubmodelSpec) -> Params:
    """Small random weights in the shapes of the sub-model, variances of 1; without making the full network."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes(family.layout(), spec, full_shapes(family)).items():
        random = 0.01 * torch.randn(shape, generator=generator)
        found[name] = torch.ones(shape) if is_statistic(name) else random
    return found


def resident_peak() -> int:
    """The largest resident memory of this process so far, or since `restart_peak`, in bytes."""
    # `getrusage` starts from the parent's peak, so it is used only without /proc: on macOS, where it counts bytes, too.
    if not Path("/proc/self/status").exists():
        resource = of_posix("resource")
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return _status("VmHWM")


def restart_peak() -> tuple[int, int]:
    """Restart the count of `resident_peak`. Returns (resident memory now, largest so far) in bytes; if the system does
    not restart the count (macOS, a read-only /proc), both are the largest so far."""
    peak = resident_peak()
    try:
        with open("/proc/self/clear_refs", "w", encoding="utf-8") as file:
            file.write("5")  # proc(5): sets VmHWM to VmRSS
    except OSError:
        return peak, peak
    return _status("VmRSS"), peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def needed(peaks: Peaks, levels: Sequence[int]) -> int:
    """Bytes of memory with which a pod can train these levels (indices of the pool): the needs of all of them added."""
    return math.ceil(HEADROOM * (peaks.base + sum(peaks.needs[level] for level in levels)))


def free(room: int, peaks: Peaks, pool: Pool, failures: int = 0) -> float:
    """What a device has free, in % of the full model's parameters, if training may take `room` bytes: more than 100
    times a level's share exactly if that level and all smaller ones fit. A level that takes less than a smaller one
    counts as much as the smaller one. Each of `failures` (usually out of memory) removes the largest level that would
    still fit."""
    steps = list(_steps(peaks, pool))
    if failures:
        fitting = [size for size, need in steps if need <= room]
        return _above(fitting[-1 - failures]) if failures < len(fitting) else 0.0
    (smallest, least), (largest, most) = steps[0], steps[-1]
    if room < least:
        return max(0.0, smallest * room / least)
    for (low, need), (high, next_need) in pairwise(steps):
        if need <= room < next_need:
            between = low + (high - low) * (room - need) / (next_need - need)
            return min(max(between, _above(low)), high)
    return max(largest * room / most, _above(largest))


def _steps(peaks: Peaks, pool: Pool) -> Iterator[tuple[float, int]]:
    """(100 * share, bytes to train it), both ascending, each share once."""
    found: dict[float, int] = {}
    most = 0
    for member, need in sorted(zip(pool, peaks.needs, strict=True), key=lambda pair: pair[0].share):
        most = max(most, need)
        found[100.0 * member.share] = most
    yield from found.items()


def _above(size: float) -> float:
    """Slightly more than a level's size, because a level fits only if more is free."""
    return math.nextafter(size, math.inf)


def in_child_process(what: str, short_of_memory: str, work: Callable[..., Any], *given: Any) -> Any:
    """Return `work(*given)`, computed in a new process. Raises EnvironmentFailure if the process dies.

    Args:
        what: What the process does, for the error.
        short_of_memory: What to do if the process is killed, usually for lack of memory.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, allowed.trusted, work, given))
    with without_main():
        process.start()
    there.close()
    try:
        answer = here.recv()
    except EOFError:
        process.join()
        killed = process.exitcode is not None and process.exitcode < 0
        hint = short_of_memory if killed else "its error is above"
        raise EnvironmentFailure(f"{what} ended with {told_exit(process.exitcode)}: {hint}") from None
    except BaseException:  # without the kill, Ctrl-C would wait for the process
        process.kill()
        raise
    process.join()
    return answer


def _serve(answer: Connection, trusted: set[str], work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    allowed.trusted.update(trusted)
    found = work(*given)
    with suppress(BrokenPipeError):  # the parent was interrupted
        answer.send(found)
