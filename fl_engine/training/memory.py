"""How much memory training takes, level by level.

The memory of training does not grow in proportion to the parameters: activations, the batch and the teachers of a
distillation take their part of it. So the coordinator measures the peak of every level of the pool, as clients train
it, and a client trains the levels whose peak has room. Algorithms and the server's checks compare what is free to a
level's share of the parameters, so room is told in that unit:

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
"""How many batches a trial trains: after the second one the optimizer has its state, and the allocator what it
keeps."""
Bytes = Annotated[int, Field(ge=0, lt=2**60)]
HEADROOM = 1.25
"""How many times the measured peak `needed` asks for: files take memory while they are read, and an allocator keeps
some."""


@dataclass(frozen=True)
class Peaks:
    """Bytes of resident memory: `base` before a client trains, with the data set; `levels` at the peak of training each
    member of the pool."""

    __pydantic_config__ = STRICT

    base: Bytes
    levels: tuple[Bytes, ...]

    @property
    def needs(self) -> tuple[int, ...]:
        """Bytes that training each member takes on top of what is held before."""
        return tuple(max(1, peak - self.base) for peak in self.levels)


@dataclass(frozen=True)
class Trial:
    """What a client of a level does: it is sent the weights of `sent`, and trains `task`."""

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
    """Measures each trial in a process of its own, which normalises `samples` made-up samples like those of `data`, as
    a client does, and trains three batches of them. `prepare` is called there first, and sets the process up as a
    client's. Raises EnvironmentFailure where such a process dies: it is killed for lack of memory, or training fails in
    it."""
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
    """One trial of `level_peaks`: (resident memory before, and at the peak) in bytes; where it trains on a GPU, what
    torch's allocator holds there. Raises as it does."""
    what = f"training {trial.name} once, to see how much memory it takes,"
    short = "give the coordinator as much memory as the largest level takes"
    nothing = torch.arange(0)
    kind = data.part(nothing, nothing)  # without samples, which would have to travel
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
    sent = made_up_weights(family, trial.sent)  # held while it trains, as a client holds its order
    job = made_up_job(family, kind.task, trial, sent, kind.normalise(_made_up_like(family, kind, samples)), device)
    task = replace(job.task, epochs=1)
    if task.widths and task.sandwich is None:  # so few steps may not draw the largest
        task = replace(task, widths=(task.spec,))
    train(family, kind.task, [replace(job, task=task)], numerics, most_steps=BATCHES)
    return before, peak()


def made_up_job(family: ModelFamily, goal: Task, trial: Trial, sent: Params, x: Tensor, device: str = "cpu") -> Job:
    """What a client trains on the torch device in a trial that was `sent` these weights and has these samples, with
    made-up targets."""
    received = take(sent, family.layout(), trial.task.spec, have=trial.sent)
    y = goal.examples(len(x), torch.Generator().manual_seed(0))
    return Job(trial.task, received, x.to(device), y.to(device))


def _made_up_like(family: ModelFamily, kind: Data, samples: int) -> Tensor:
    """Samples that are not normalised yet."""
    generator = torch.Generator().manual_seed(0)
    if not kind.has_images:
        return made_up(family, samples, generator)
    return torch.randint(256, (samples, *family.input_shape), dtype=torch.uint8, generator=generator)


def made_up_weights(family: ModelFamily, spec: SubmodelSpec) -> Params:
    """Weights in the shapes of the sub-model, without making the full network: small random ones, variances of 1."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes(family.layout(), spec, full_shapes(family)).items():
        random = 0.01 * torch.randn(shape, generator=generator)
        found[name] = torch.ones(shape) if is_statistic(name) else random
    return found


def resident_peak() -> int:
    """The largest resident memory of this process so far, or since `restart_peak`, in bytes. (`getrusage` starts from
    the parent's peak, so it is used only where there is no /proc: on macOS, where it counts in bytes too.)"""
    if not Path("/proc/self/status").exists():
        resource = of_posix("resource")
        return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return _status("VmHWM")


def restart_peak() -> tuple[int, int]:
    """(held, peak) in bytes: the resident memory of this process now, and the largest so far. From here on
    `resident_peak` counts anew. If the system cannot restart the count (macOS, a read-only /proc), both values are the
    largest so far."""
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
    """Bytes of memory with which a pod can train these levels (indices of the pool), the needs of all of them added. It
    is a bound from which `free` finds room for each."""
    return math.ceil(HEADROOM * (peaks.base + sum(peaks.needs[level] for level in levels)))


def free(room: int, peaks: Peaks, pool: Pool, failures: int = 0) -> float:
    """What a device has free, in % of the full model's parameters, where training may take `room` bytes: more than 100
    times a level's share exactly if that level and all that are smaller have room. A level that takes less than a
    smaller one counts as much as that one. Each of `failures` (usually for lack of memory) takes away the largest level
    that would still fit."""
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
    """Slightly more than a level's size, since a level fits only if more is free than its size."""
    return math.nextafter(size, math.inf)


def in_child_process(what: str, short_of_memory: str, work: Callable[..., Any], *given: Any) -> Any:
    """What `work(*given)` gives in a new process; all of it can be pickled. Raises EnvironmentFailure where the process
    dies, naming `what` it did; `short_of_memory` says what to do where it is killed, usually for lack of memory."""
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
    except BaseException:  # Ctrl-C: else this process would wait for its end
        process.kill()
        raise
    process.join()
    return answer


def _serve(answer: Connection, trusted: set[str], work: Callable[..., Any], given: tuple[Any, ...]) -> None:
    allowed.trusted.update(trusted)
    found = work(*given)
    with suppress(BrokenPipeError):  # nobody waits for it any more
        answer.send(found)
