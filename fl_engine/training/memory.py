"""How much memory training needs, and how much a pod has.

A device that holds `limit` bytes can train a sub-model of r % of the full model's parameters, where

    r = 100 * (limit - base) / (peak - base)

where `base` is a client's resident memory before it trains, and `peak` the largest while it trains the full model. What
training adds (weights, gradients, activations) is about proportional to the parameters.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import EnvironmentFailure
from fl_engine.core.samples import Task
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.system import of_posix, without_main
from fl_engine.core.types import FULL, SGD, LocalTask, Pool
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import Numerics

NO_LIMIT = 2**60
"""From this value on there is no limit: version 1 of the cgroup file system writes about 2^63 for none."""


def training_peak(family: ModelFamily, goal: Task, batch_size: int, numerics: Numerics) -> tuple[int, int]:
    """(base, peak) in bytes, measured in a process of its own that trains three batches."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_measure, args=(there, family, goal, batch_size, numerics)
    )
    with without_main():
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
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # proc(5): sets VmHWM to VmRSS
    except OSError:
        return peak, peak
    return _status("VmRSS"), peak


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


HEADROOM = 1.25
"""Of `needed`: what the files take while they are read, and what an allocator keeps."""


def needed(measured: tuple[int, int], share: float) -> int:
    """Bytes of memory with which a sub-model can be trained that has this share of the full model's parameters. It is
    a bound from which `free` finds room for that sub-model."""
    base, peak = measured
    return math.ceil(HEADROOM * (base + share * (peak - base)))


def limit(root: Path | None = None) -> int:
    """This container's memory limit in bytes, read from the cgroup file system (version 2 or 1) at `root`, by default
    FLEXFLEET_CGROUP or /sys/fs/cgroup. Raises EnvironmentFailure if there is no limit."""
    root = root or Path(os.environ.get("FLEXFLEET_CGROUP", "/sys/fs/cgroup"))
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        if (root / name).is_file():
            text = (root / name).read_text(errors="replace").strip()
            if re.fullmatch("[0-9]{1,20}", text) and int(text) < NO_LIMIT:
                return int(text)
    raise EnvironmentFailure(
        f"kubernetes.observe=cgroup, but {root} has no memory limit: set one for the tier's pool (kubernetes.pools)"
    )


def free(limit_bytes: int, measured: tuple[int, int], pool: Pool, failures: int = 0) -> float:
    """The largest model that the device can train, in % of the full model's parameters. Each of `failures` (usually for
    lack of memory) takes away the largest model of the pool that would still fit."""
    base, peak = measured
    share = max(0.0, 100.0 * (limit_bytes - base) / max(1, peak - base))
    if failures == 0:
        return share
    fitting = [100.0 * member.share for member in pool if 100.0 * member.share <= share]
    # Slightly more than that model needs, since a model fits only if more is free than it needs.
    return math.nextafter(fitting[-1 - failures], math.inf) if failures < len(fitting) else 0.0
