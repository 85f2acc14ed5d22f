"""Measure the memory and speed of training on this machine, for each level of the pool.

`profile` measures values for an entry in `fleet.tiers`. `peaks_of` measures how much memory a run needs for each level.
"""

from __future__ import annotations

import logging
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fl_engine
from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core.errors import ClientError, ConfigError, EnvironmentFailure
from fl_engine.core.system import resident_peak
from fl_engine.core.text import write_yaml
from fl_engine.core.types import Assignment, LocalTask, TaskContext
from fl_engine.rounds.run import Run
from fl_engine.training import cgroup, memory
from fl_engine.training.memory import BATCHES, LevelTrial, Peaks, TrialSite, level_peaks
from flexfleet.pipeline.check import first_round
from flexfleet.pipeline.partition import cut, numerics_of
from flexfleet.pipeline.prepare import Resolved

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class LevelProfile:
    name: str
    size: float
    """Number of parameters as a percentage of the full model."""
    fits: bool
    """True if the level's peak memory fits into the available memory. If it does not fit, the speed is not measured."""
    peak_bytes: int | None
    """Peak memory during training minus memory before training, in bytes; None if the training failed."""
    samples_per_second: float | None
    macs_per_sample: float | None
    """Multiply-adds (MACs) per sample of a training step, as the simulated clock counts them."""


@dataclass(frozen=True)
class Profile:
    tier: dict[str, Any]
    """Entry for `fleet.tiers`."""
    levels: tuple[LevelProfile, ...]
    room_bytes: int
    """Memory that training may use, in bytes."""
    about: dict[str, Any]
    """Configuration, machine and versions."""


def profile(
    resolved: Resolved,
    name: str | None = None,
    memory_bytes: float | None = None,
    seconds: float = 5.0,
    device: str = "cpu",
) -> Profile:
    """Measure the memory and speed of training on this machine for each level of the configured pool.

    Args:
        name: Name of the tier.
        memory_bytes: Maximum memory for training in bytes; None for the free memory.
        seconds: Seconds for which each level is trained.
        device: A torch device.

    Raises:
        BadInput: The configuration is invalid.
        EnvironmentFailure: PyTorch does not support the device, or no level can be trained.
    """
    for option, value in (("--seconds", seconds), ("--memory", memory_bytes)):
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{option} must be greater than 0, got {value:g}", code="config.out_of_range")
    check_device(device, "--device")
    config = resolved.config
    here = config.run.model_copy(update={"devices": (device,)})
    resolved = Resolved(config.model_copy(update={"run": here}), resolved.algorithm)
    room = _free_bytes(device) if memory_bytes is None else math.ceil(memory_bytes)
    run, _, plan = first_round(resolved, cut(resolved))
    pool, trials = run.site.pool, trials_of(run, plan.assignments)
    # A device with its own data trains on all its samples.
    samples = len(resolved.data.train_y) if run.site.most is not None else max(map(len, run.site.partition.clients))
    prepare = partial(prepare_process, (device,))
    site = TrialSite(resolved.family, resolved.data, samples, numerics_of(resolved), prepare, device)
    base, found = 0, list[int | None]()
    for trial in trials:
        try:
            before, peak = memory.measured(site, trial)
        except EnvironmentFailure as error:  # the process was killed, for example because memory ran out
            log.warning("level %s does not fit into memory: %s", trial.name, error)
            found.append(None)
        else:
            log.info("training level %s requires %.1f MB", trial.name, (peak - before) / 1e6)
            base = max(base, before)
            found.append(max(1, peak - before))
    needs = [room + 1 if need is None else need for need in found]
    timed = [trial for trial, need in zip(trials, needs, strict=True) if need <= room]
    if not timed:
        raise EnvironmentFailure(
            f"{room / 1e6:.0f} MB of free memory are not enough to train any level (see the log). Free memory on this "
            "machine, or choose a smaller network"
        )
    paces = memory.level_paces(site, timed, seconds)
    pace_of, levels = {trial.name: pace for trial, pace in zip(timed, paces, strict=True)}, []
    for member, need in zip(pool, found, strict=True):
        pace = pace_of.get(member.name)
        speed, macs = (None, None) if pace is None else (1 / pace.seconds, pace.macs)
        levels.append(LevelProfile(member.name, 100 * member.share, pace is not None, need, speed, macs))
    free = memory.free(room, Peaks(base, tuple(base + need for need in needs)), pool)
    tier = {
        "name": name or platform.node() or "device",
        "share": 1.0,
        "memory": math.floor(100 * free) / 100,
        "speed": float(f"{sum(pace.macs for pace in paces) / sum(pace.seconds for pace in paces) / 1e9:.4g}"),
    }
    return Profile(tier, tuple(levels), room, _about(resolved))


def _free_bytes(device: str) -> int:
    """Return the free memory of the GPU, the container or the system, in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        return cgroup.room_of_device(resident_peak())
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"{error}: give --memory MB") from error


def _about(resolved: Resolved) -> dict[str, Any]:
    config = resolved.config
    (on,) = config.run.devices
    return {
        "dataset": resolved.data.name,
        "model": config.model["name"],
        "algorithm": config.algorithm["name"],
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(on) if on.startswith("cuda") else on,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "flexfleet": fl_engine.__version__,
    }


def peaks_of(run: Run, initial: Any) -> Peaks:
    """Measure the peak memory of training for each level. The peak includes the gradients, the optimizer's state,
    teacher networks, the largest batch, the samples of the largest client, and the whole data set.

    Args:
        initial: The algorithm's state before the first round.

    Raises:
        ConfigError: The algorithm lets a device train a level that needs all of the device's free memory (FlexFL's
            `rule: authors`).
    """
    site, data = run.site, run.site.data
    assignments = run.algorithm.plan(initial, run.context(0, run.begins(0, 0.0))).assignments
    check_prunes(run, assignments)
    trials = trials_of(run, assignments)
    if site.most is None:
        samples = max(map(len, site.partition.clients))
    else:  # the server does not know how many samples devices have
        samples = min(site.most, BATCHES * max(trial.task.batch_size for trial in trials))
    log.info("measuring the training memory of %d levels", len(trials))
    prepare = partial(prepare_process, ("cpu",))
    found = level_peaks(TrialSite(site.family, data, samples, site.numerics, prepare), trials)
    held = sum(part.nbytes for part in (data.train_x, data.train_y, data.test_x, data.test_y))
    for trial, need in zip(trials, found.needs, strict=True):
        log.info("training level %s requires %.1f MiB", trial.name, need / 2**20)
    return Peaks(found.base + held, tuple(peak + held for peak in found.levels))


def trials_of(run: Run, assignments: Sequence[Assignment]) -> list[LevelTrial]:
    """Return a training task of the last round for each level. By the last round, distillation has started if the
    algorithm uses it.

    If the server never sends a level, the client receives the next larger level that the server sends, and prunes it.
    If there is no assignment for a level, a copy of the first assignment is used.
    """
    pool, found = run.site.pool, []
    for level, member in enumerate(pool):
        sent = next((i for i in range(level, len(pool)) if pool[i].dispatched), level)
        assignment, free = _assignment(run, assignments, sent), math.nextafter(100 * member.share, math.inf)
        try:
            task = _task(run, assignment, free)
        except ClientError:
            if sent == level:
                raise
            assignment = _assignment(run, assignments, level)
            task = _task(run, assignment, free)
        found.append(LevelTrial(member.name, assignment.spec, task))
    return found


def _assignment(run: Run, assignments: Sequence[Assignment], sent: int) -> Assignment:
    """Return an assignment for the last round in which a client receives level `sent`."""
    assignment = next((assignment for assignment in assignments if assignment.level == sent), None)
    if assignment is None:
        spec = run.site.pool[sent].spec
        other = assignments[0] if assignments else Assignment(0, 0, spec, {}, 0, sent)
        assignment = replace(other, level=sent, spec=spec)
    return replace(assignment, round=run.options.stop - 1)


def _task(run: Run, assignment: Assignment, free: float) -> LocalTask:
    site = run.site
    return run.algorithm.task(assignment, TaskContext(site.layout, site.pool, site.fleet[assignment.client], free))


def check_prunes(run: Run, assignments: Sequence[Assignment]) -> None:
    """Raise ConfigError if the algorithm lets a device train a level that needs all of the device's free memory."""
    pool = run.site.pool
    largest = max(i for i in range(len(pool)) if pool[i].dispatched)
    for member in pool[1:largest]:
        try:
            task = _task(run, _assignment(run, assignments, largest), 100 * member.share)
        except ClientError:
            continue
        if task.spec == member.spec:
            raise ConfigError(
                "agents.observe and kubernetes.observe must be simulated for this algorithm, because a device would "
                f"train {member.name} even if its free memory only equals the model's size "
                f"({100 * member.share:.2f} %). For flexfl, you can also set algorithm.rule=closest"
            )


def text(found: Profile) -> str:
    """Return a YAML configuration that contains this tier. Comments contain the measurements."""
    a = found.about
    trained_on = "one thread" if a["device"].startswith("cpu") else f"the {a['device']}"
    lines = [
        f"Measured by `flexfleet profile`: {a['model']} on {a['dataset']} with {a['algorithm']}; {trained_on} of a "
        f"{a['machine']}; flexfleet {a['flexfleet']}, torch {a['torch']}, Python {a['python']}.",
        f"{found.room_bytes / 1e6:,.0f} MB of memory are free for training.",
        f"{'level':>10}{'size %':>9}{'samples/s':>12}{'peak MB':>10}",
    ]
    for level in found.levels:
        peak = None if level.peak_bytes is None else level.peak_bytes / 1e6
        columns = ((level.samples_per_second, ",.1f", 12), (peak, ",.1f", 10))
        values = "".join(f"{'-' if value is None else format(value, form):>{width}}" for value, form, width in columns)
        lines.append(f"{level.name:>10}{level.size:>9.2f}{values}{'' if level.fits else '  does not fit'}")
    return "".join(f"# {line}\n" for line in lines) + write_yaml({"fleet": {"tiers": [found.tier]}})
