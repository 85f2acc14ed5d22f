"""Measures the memory and time that training takes on this machine, for each level of the pool.

The memory for training is not proportional to the number of parameters, because activations, batches and distillation
teachers also take memory. Therefore the coordinator trains each level once and measures the peak memory. A client
trains only levels whose peak memory fits into the client's memory. Algorithms compare the free memory with the size of
a level, in percent of the full model's parameters. Therefore `free` converts the free memory from bytes to percent.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from fl_engine.core import allowed, costs
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.fields import Options
from fl_engine.core.samples import Data
from fl_engine.core.slicing import full_shapes, is_statistic, made_up, random_targets, shapes, take
from fl_engine.core.system import exit_text, resident_peak, restart_peak, without_main
from fl_engine.core.types import LocalTask, Params, Pool, SubmodelSpec
from fl_engine.training.local import TrainingJob, train
from fl_engine.training.numerics import Numerics

BATCHES = 3
"""Number of batches in a trial. After two batches, the optimizer's state and the allocator's cache no longer grow."""
Bytes = Annotated[int, Field(ge=0, lt=2**60)]


@dataclass(frozen=True)
class Peaks(Options):
    """Resident memory of a training process."""

    base: Bytes
    """Bytes in use before training, including the data set."""
    levels: tuple[Bytes, ...]
    """Peak memory in bytes during the training of each pool model."""

    @property
    def needs(self) -> tuple[int, ...]:
        """Memory in bytes that training each pool model requires in addition to `base`."""
        return tuple(max(1, peak - self.base) for peak in self.levels)


@dataclass(frozen=True)
class LevelTrial:
    """Trial of one level: a client receives the weights of the sub-model `sent` and trains `task`."""

    name: str
    sent: SubmodelSpec
    task: LocalTask


@dataclass(frozen=True)
class Pace:
    """Cost of training on one sample."""

    macs: float
    """Number of multiply-adds, counted in the same way as for the simulated clock."""
    seconds: float


@dataclass(frozen=True)
class TrialSite:
    """Settings of all trials. A trial trains on random samples in its own process."""

    family: ModelFamily
    data: Data
    """The random samples have the shape and type of this data set."""
    samples: int
    numerics: Numerics
    prepare: Callable[[], None]
    """Function that the new process calls first, to apply the settings of a client's process."""
    device: str = "cpu"

    def run(self, what: str, work: Callable[..., Any], *arguments: Any) -> Any:
        nothing = torch.arange(0)  # The child process does not need the samples.
        return in_child_process(what, work, replace(self, data=self.data.part(nothing, nothing)), *arguments)

    def job(self, trial: LevelTrial, sent: Params, x: Tensor) -> TrainingJob:
        """Return a training job with the received weights `sent`, the samples `x` and random targets."""
        received = take(sent, self.family.layout(), trial.task.spec, have=trial.sent)
        y = random_targets(self.family, self.data.task, x, torch.Generator().manual_seed(0))
        return TrainingJob(trial.task, received, x.to(self.device), y.to(self.device))


def level_peaks(site: TrialSite, trials: Sequence[LevelTrial]) -> Peaks:
    """Measure the memory of each trial. A trial normalises the samples and trains on three batches."""
    found = [measured(site, trial) for trial in trials]
    base = max(before for before, _ in found)
    return Peaks(base, tuple(base + peak - before for before, peak in found))


def measured(site: TrialSite, trial: LevelTrial) -> tuple[int, int]:
    """Measure one trial. Return the memory before training and the peak memory, in bytes. On a CPU, resident memory is
    measured. On a GPU, the memory that torch's allocator has reserved is measured."""
    before, peak = site.run(f"training {trial.name} once, to measure its memory,", _peak, trial)
    return int(before), int(peak)


def _peak(site: TrialSite, trial: LevelTrial) -> tuple[int, int]:
    site.prepare()
    on_gpu = site.device.startswith("cuda")
    peak = partial(torch.cuda.max_memory_reserved, site.device) if on_gpu else resident_peak
    before = peak() if on_gpu else restart_peak()[0]  # earlier peaks, such as those of imports, do not count
    # Keep a reference, because a client also stores the received weights during training.
    sent = made_up_weights(site.family, trial.sent)
    generator = torch.Generator().manual_seed(0)
    if site.data.has_images:
        x = torch.randint(256, (site.samples, *site.family.input_shape), dtype=torch.uint8, generator=generator)
    else:
        x = made_up(site.family, site.samples, generator)
    job = site.job(trial, sent, site.data.normalise(x))
    task = replace(job.task, epochs=1)
    if task.widths and task.sandwich is None:  # Train the largest width, because a short trial may not draw it.
        task = replace(task, widths=(task.spec,))
    train(site.family, site.data.task, [replace(job, task=task)], site.numerics, most_steps=BATCHES)
    return before, peak()


def level_paces(site: TrialSite, trials: Sequence[LevelTrial], seconds: float) -> list[Pace]:
    """Measure the pace (time per sample) of each trial by repeating a client's training for `seconds`. If one
    repetition would take longer than `seconds`, train on fewer samples or epochs."""
    found: list[Pace] = site.run("measuring the pace of each level", _paces, trials, seconds)
    return found


def _paces(site: TrialSite, trials: Sequence[LevelTrial], seconds: float) -> list[Pace]:
    site.prepare()
    paces = []
    for trial in trials:
        x = made_up(site.family, site.samples, torch.Generator().manual_seed(0))
        whole = site.job(trial, made_up_weights(site.family, trial.sent), x)
        step = _part(whole, 1)
        train(site.family, site.data.task, [step], site.numerics)  # Warm up caches.
        started = time.perf_counter()
        train(site.family, site.data.task, [step], site.numerics)
        job = _part(whole, max(1, int(seconds / (time.perf_counter() - started))))
        trained, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < seconds or not trained:
            trained += train(site.family, site.data.task, [job], site.numerics)[0].samples
        paces.append(Pace(costs.macs_per_sample(site.family, trial.task), took / trained))
    return paces


def _part(job: TrainingJob, steps: int) -> TrainingJob:
    """Return a shorter job with about `steps` steps: some whole epochs, or the beginning of one epoch."""
    task, samples = job.task, len(job.y)
    an_epoch = len(costs.batches(task, samples))
    if steps >= an_epoch:
        return replace(job, task=replace(task, epochs=min(task.epochs, steps // an_epoch)))
    count = min(samples, steps * task.batch_size)
    return replace(job, task=replace(task, epochs=1), x=job.x[:count], y=job.y[:count])


def made_up_weights(family: ModelFamily, spec: SubmodelSpec) -> Params:
    """Return small random weights for the sub-model without creating the full network. All running statistics are 1."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in shapes(family.layout(), spec, full_shapes(family)).items():
        random = 0.01 * torch.randn(shape, generator=generator)
        found[name] = torch.ones(shape) if is_statistic(name) else random
    return found


def free(room: int, peaks: Peaks, pool: Pool, failures: int = 0) -> float:
    """Convert free memory from bytes (`room`) to % of the full model's parameters.

    The result exceeds a level's size (in %) if and only if this level and all smaller levels fit into `room`. Between
    the requirements of two levels, the result is interpolated linearly. Each of the `failures` excludes the largest
    remaining level, because training usually fails for lack of memory.
    """
    # Map the size of a level (in % of the parameters) to the bytes that suffice for the level and all smaller levels.
    needs: dict[float, int] = {}
    most = 0
    for member, need in sorted(zip(pool, peaks.needs, strict=True), key=lambda pair: pair[0].share):
        needs[100.0 * member.share] = most = max(most, need)
    steps = list(needs.items())
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


def _above(size: float) -> float:
    """Return the next float above a level's size, because a level must be smaller than the free memory."""
    return math.nextafter(size, math.inf)


def in_child_process(what: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work(*arguments)` in a new process and return the result. If the process dies, raise EnvironmentFailure
    with a message that starts with `what`."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(there, allowed.trusted, work, arguments))
    with without_main():
        process.start()
    there.close()
    try:
        found = here.recv()
    except EOFError:
        process.join()
        killed = process.exitcode is not None and process.exitcode < 0
        hint = "Free memory on this machine, or choose a smaller network" if killed else "Its error is printed above"
        raise EnvironmentFailure(f"{what} ended with {exit_text(process.exitcode)}. {hint}") from None
    except BaseException:  # Without kill(), Ctrl-C would wait for the process.
        process.kill()
        raise
    process.join()
    return found


def _serve(result: Connection, trusted: set[str], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    allowed.trusted.update(trusted)
    found = work(*arguments)
    with suppress(BrokenPipeError):  # The parent was interrupted.
        result.send(found)
