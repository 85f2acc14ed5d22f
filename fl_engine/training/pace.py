"""How quickly this machine trains the levels of a pool, and what energy that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fl_engine.core import costs
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import made_up
from fl_engine.core.task import Task
from fl_engine.training import memory, power
from fl_engine.training.local import Job, train
from fl_engine.training.memory import Trial
from fl_engine.training.numerics import Numerics


@dataclass(frozen=True)
class Pace:
    """The cost of one sample, each time that it is seen, in training a level."""

    macs: float
    """Multiply-adds, as the simulated clock counts them."""
    seconds: float
    """Real time."""
    joules: float | None
    """Energy of everything that the sensors cover, not only of the training; None without sensors."""


def level_paces(
    family: ModelFamily,
    goal: Task,
    trials: Sequence[Trial],
    samples: int,
    numerics: Numerics,
    prepare: Callable[[], None],
    seconds: float,
    device: str = "cpu",
) -> list[Pace]:
    """The pace of each trial, trained repeatedly for `seconds` as a client with `samples` samples trains it; with fewer
    samples or epochs if its training takes longer. Runs in a process of its own, which `prepare` sets up like a
    client's."""
    what, short = "training each level for its pace", "free memory on this machine, or choose a smaller network"
    given = family, goal, trials, samples, numerics, prepare, seconds, device
    found: list[Pace] = memory.in_child_process(what, short, _measure, *given)
    return found


def _measure(
    family: ModelFamily,
    goal: Task,
    trials: Sequence[Trial],
    samples: int,
    numerics: Numerics,
    prepare: Callable[[], None],
    seconds: float,
    device: str,
) -> list[Pace]:
    prepare()
    paces = []
    for trial in trials:
        x = made_up(family, samples, torch.Generator().manual_seed(0))
        whole = memory.made_up_job(family, goal, trial, memory.made_up_weights(family, trial.sent), x, device)
        step = _cut(whole, 1)
        train(family, goal, [step], numerics)  # prepares what later runs use again
        started = time.perf_counter()
        train(family, goal, [step], numerics)
        job = _cut(whole, max(1, int(seconds / (time.perf_counter() - started))))
        sensors, seen, began = power.sensors(), 0, time.perf_counter()
        with power.metered(sensors) as used:
            while (took := time.perf_counter() - began) < seconds or not seen:
                (trained,) = train(family, goal, [job], numerics)
                seen += trained.samples
        joules = used.joules / seen if sensors else None
        paces.append(Pace(costs.macs_per_sample(family, trial.task), took / seen, joules))
    return paces


def _cut(job: Job, steps: int) -> Job:
    """A part of the client's training with about so many steps: whole epochs, or a part of the first."""
    task, samples = job.task, len(job.y)
    an_epoch = len(costs.batches(task, samples))
    if steps >= an_epoch:
        return replace(job, task=replace(task, epochs=min(task.epochs, steps // an_epoch)))
    count = min(samples, steps * task.batch_size)
    return replace(job, task=replace(task, epochs=1), x=job.x[:count], y=job.y[:count])
