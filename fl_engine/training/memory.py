"""How much memory training takes, and how much a pod may take.

A device that holds `limit` bytes can train a sub-model of r % of the full model's parameters, where

    r = 100 * (limit - base) / (peak - base)

with the resident memory of a client before it trains, and at the peak of training the full model. What is held besides
the interpreter (weights, gradients, activations) grows about with the parameters.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.samples import Task
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.types import FULL, SGD, LocalTask, Pool
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import Numerics

NO_LIMIT = 2**60
"""What version 1 of the cgroup file system says for "none" is near 2^63."""


def training_peak(family: ModelFamily, goal: Task, batch_size: int, numerics: Numerics) -> tuple[int, int]:
    """(base, peak) in bytes, measured in a process of its own that trains three batches."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_measure, args=(there, family, goal, batch_size, numerics)
    )
    process.start()
    there.close()
    try:
        base, peak = here.recv()
    except EOFError:
        process.join()
        raise EnvironmentFailure(
            f"training the full model once, to see how much memory it takes, ended with exit code {process.exitcode}"
        ) from None
    process.join()
    return int(base), int(peak)


def _measure(answer: Connection, family: ModelFamily, goal: Task, batch_size: int, numerics: Numerics) -> None:
    torch.set_num_threads(1)
    base = resident_peak()
    task = LocalTask(FULL, SGD(0.01, 0.5), epochs=1, batch_size=batch_size, drop_last=True, seed=0)
    x, y = made_up(family, 3 * batch_size), goal.examples(3 * batch_size, torch.Generator().manual_seed(0))
    train(family, goal, [Job(task, initial_params(family, 0), x, y)], numerics)
    answer.send((base, resident_peak()))


def resident_peak() -> int:
    """The largest resident memory of this process so far, or since `restart_peak`, in bytes. (`getrusage` begins with
    the parent's, so it is asked only where there is no /proc: on macOS, which counts in bytes too.)"""
    if not Path("/proc/self/status").exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM")


def restart_peak() -> tuple[int, int]:
    """(held, peak) in bytes: the resident memory of this process now, and the largest so far. From here on
    `resident_peak` counts anew. Where the system cannot do that (macOS, a /proc that is read-only) both are the largest
    so far."""
    peak = resident_peak()
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # proc(5): VmHWM becomes what VmRSS is
    except OSError:
        return peak, peak
    return _status("VmRSS"), peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def limit(root: Path | None = None) -> int:
    """This container's memory limit in bytes, by the cgroup file system (version 2 or 1) at `root`, by default
    FLEXFLEET_CGROUP or /sys/fs/cgroup. Raises EnvironmentFailure where there is none."""
    root = root or Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (root / name).is_file():
            text = (root / name).read_text(errors="replace").strip()
            if re.fullmatch("[0-9]{1,20}", text) and int(text) < NO_LIMIT:
                return int(text)
    raise EnvironmentFailure(
        f"kubernetes.observe=cgroup, but {root} says no memory limit: give the tier's pool one (kubernetes.pools)"
    )


def free(limit_bytes: int, measured: tuple[int, int], pool: Pool, failures: int = 0) -> float:
    """What the device can train, in % of the full model's parameters. After `failures` (out of memory, as a rule) so
    many models of the pool fewer than would fit."""
    base, peak = measured
    share = max(0.0, 100.0 * (limit_bytes - base) / max(1, peak - base))
    if failures == 0:
        return share
    fitting = [100.0 * member.share for member in pool if 100.0 * member.share <= share]
    # A hair more than that model takes: one has to have more free than it needs.
    return math.nextafter(fitting[-1 - failures], math.inf) if failures < len(fitting) else 0.0
