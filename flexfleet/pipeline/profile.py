"""The measured speed of this device in training: an entry of `fleet.tiers` for the simulated clock."""

from __future__ import annotations

import logging
import math
import os
import platform
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import fl_engine
from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, printable
from fl_engine.core.text import write_yaml
from fl_engine.core.types import Pool
from fl_engine.fleet.devices import Tier
from fl_engine.remote.messages import Invitation
from fl_engine.storage.s3 import open_store
from fl_engine.storage.store import PROBE, FolderStore, bits_per_second
from fl_engine.storage.urls import UrlStore
from fl_engine.training import cgroup, memory, pace, power
from fl_engine.training.memory import Peaks, Trial
from flexfleet.config import Config
from flexfleet.pipeline.check import first_round
from flexfleet.pipeline.enrollment import MAILBOXES
from flexfleet.pipeline.level_memory import trials_of
from flexfleet.pipeline.partition import cut
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.site import numerics_of

log = logging.getLogger("flexfleet")

SECONDS = 5.0
"""How long each level is trained."""


@dataclass(frozen=True)
class Level:
    name: str
    size: float
    """Parameters in % of the full model's."""
    fits: bool
    """Whether its peak fits into the memory. A level that does not fit is not timed."""
    peak_bytes: int | None
    """Bytes at the peak of training minus those before; None if training failed."""
    samples_per_second: float | None
    macs_per_sample: float | None
    """Multiply-adds of a training step per sample, as the simulated clock counts them."""
    joules_per_sample: float | None


@dataclass(frozen=True)
class Profile:
    tier: dict[str, Any]
    """An entry of `fleet.tiers`."""
    levels: tuple[Level, ...]
    room_bytes: int
    """Bytes that training may take."""
    sensors: tuple[str, ...]
    """Names of the power sensors that were read."""
    left_out: dict[str, str]
    """Map what was not measured to the reason."""
    about: dict[str, Any]
    """Configuration, machine and versions."""


def profile(
    resolved: Resolved,
    invitation: Invitation | None = None,
    name: str | None = None,
    share: float = 1.0,
    room: float | None = None,
    seconds: float = SECONDS,
    on: str = "cpu",
) -> Profile:
    """Train each level of the configured pool on this machine as clients do, and measure it.

    Args:
        name: Name of the tier.
        share: Share of the tier in the fleet.
        room: Bytes that training may take; by default what is free.
        seconds: How long each level is trained.
        on: A torch device.

    Raises:
        BadInput: `flexfleet check` refuses the configuration.
        EnvironmentFailure: torch does not have the device, or no level can be trained.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(f"--seconds must be greater than 0, got {seconds:g}")
    if room is not None and not (math.isfinite(room) and room > 0):
        raise ConfigError(f"--memory must be greater than 0 MB, got {room / 1e6:g}")
    if not 0 < share <= 1:
        raise ConfigError(f"--share must be greater than 0 and at most 1, got {share:g}")
    check_device(on, "--device")
    config = resolved.config
    run = config.run.model_copy(update={"devices": (on,)})
    resolved = Resolved(config.model_copy(update={"run": run}), resolved.algorithm)
    tier = Tier(name or (invitation and invitation.tier) or platform.node() or "device", share, 100.0)
    bandwidth, left_out = _bandwidth(config, invitation)
    levels, pool, peaks, room = _levels(resolved, None if room is None else math.ceil(room), seconds)
    timed = [level for level in levels if level.samples_per_second is not None]
    macs = sum(level.macs_per_sample or 0.0 for level in timed)
    took = sum(1 / (level.samples_per_second or math.inf) for level in timed)
    entry: dict[str, Any] = {"name": tier.name, "share": share, "memory": _shown(memory.free(room, peaks, pool), pool)}
    entry["speed"] = float(f"{macs / took / 1e9:.4g}")
    if bandwidth is not None:
        entry["bandwidth"] = float(f"{bandwidth / 1e6:.4g}")
    sensors = tuple(each.name for each in power.sensors())
    if not sensors:
        left_out["joules"] = "no power sensor can be read under /sys (only root can read RAPL's counters)"
    return Profile(entry, tuple(levels), room, sensors, left_out, _about(resolved))


def _levels(resolved: Resolved, room: int | None, seconds: float) -> tuple[list[Level], Pool, Peaks, int]:
    config, algorithm, family = resolved.config, resolved.algorithm, resolved.family
    parts = cut(resolved)
    run, _, plan = first_round(resolved, parts)
    goal, pool = resolved.data.task, run.site.pool
    numerics = numerics_of(config, algorithm, family, goal, None)
    # A device with data of its own trains on what it reads here.
    samples = len(resolved.data.train_y) if run.site.most is not None else max(map(len, run.site.partition.clients))
    (on,) = config.run.devices
    prepare = partial(prepare_process, (on,))
    room = _room(on) if room is None else room
    trials = trials_of(run, plan.orders)
    given = (samples, numerics, prepare)
    found = [_peak(trial, partial(memory.measured, family, resolved.data, trial, *given, on)) for trial in trials]
    if not any(found):
        raise EnvironmentFailure("no level of the pool can be trained here: the errors are above")
    base = max(before for before, _ in filter(None, found))
    needs = [room + 1 if each is None else max(1, each[1] - each[0]) for each in found]
    fits = [need <= room for need in needs]
    if not any(fits):
        raise EnvironmentFailure(
            f"training the smallest level takes {min(needs) / 1e6:.0f} MB, and {room / 1e6:.0f} MB are free: free "
            "memory on this machine, or choose a smaller network"
        )
    timed = [trial for trial, fit in zip(trials, fits, strict=True) if fit]
    paces = iter(pace.level_paces(family, goal, timed, *given, seconds, on))
    levels = []
    for trial, member, each, need, fit in zip(trials, pool, found, needs, fits, strict=True):
        went = next(paces) if fit else None
        levels.append(
            Level(
                name=trial.name,
                size=100 * member.share,
                fits=fit,
                peak_bytes=None if each is None else need,
                samples_per_second=None if went is None else 1 / went.seconds,
                macs_per_sample=None if went is None else went.macs,
                joules_per_sample=None if went is None else went.joules,
            )
        )
    return levels, pool, Peaks(base, tuple(base + need for need in needs)), room


def _peak(trial: Trial, measured: Callable[[], tuple[int, int]]) -> tuple[int, int] | None:
    """Bytes before and at the peak; None if the process died, for example for lack of memory."""
    try:
        before, peak = measured()
    except EnvironmentFailure as error:
        log.warning("%s does not fit: %s", trial.name, error)
        return None
    log.info("training %s takes %.1f MB", trial.name, (peak - before) / 1e6)
    return before, peak


def _room(on: str) -> int:
    """Free bytes of the container or the system, or of a GPU."""
    if on.startswith("cuda"):
        return int(torch.cuda.mem_get_info(on)[0])
    try:
        return cgroup.room_of_device(memory.resident_peak())
    except EnvironmentFailure as error:
        raise EnvironmentFailure(f"{error}: give --memory MB") from error


def _shown(free: float, pool: Pool) -> float:
    """`free` with two decimals, unless another number of levels would fit."""
    short = round(free, 2)
    return short if all((short > 100 * m.share) == (free > 100 * m.share) for m in pool) else free


def _bandwidth(config: Config, invitation: Invitation | None) -> tuple[float | None, dict[str, str]]:
    """Bits per second to the object store and back, or why it is not measured."""
    try:
        if invitation is not None:
            if invitation.probe is None:
                return None, {"bandwidth": "the invitation names a folder"}
            probe = invitation.probe
            return bits_per_second(UrlStore({PROBE: probe.read}, {PROBE: probe.write})), {}
        if config.run.remote is None:
            return None, {"bandwidth": "neither run.remote nor --invite names an object store"}
        store = open_store(f"{config.run.remote.rstrip('/')}/{MAILBOXES}")
        if isinstance(store, FolderStore):
            return None, {"bandwidth": "run.remote is a folder"}
        key = f"profile-{secrets.token_hex(8)}/{PROBE}"
        try:
            return bits_per_second(store, key), {}
        finally:
            store.delete(key)
    except ConfigError:
        raise
    except FlexfleetError as error:
        log.warning("the bandwidth cannot be measured: %s", error)
        return None, {"bandwidth": str(error)}


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


# ------------------------------------------------------------------------------------------------------ as text
def text(found: Profile) -> str:
    """A configuration with this tier in YAML, with the measurements as comments."""
    a = found.about
    trained_on = "one thread" if a["device"].startswith("cpu") else f"the {a['device']}"
    assumed = {"bandwidth": f" It is then {Tier('', 1.0, 1.0).bandwidth:g} million bits a second, which is assumed."}
    lines = [
        f"Measured by `flexfleet profile`: {a['model']} on {a['dataset']} with {a['algorithm']}; {trained_on} of a "
        f"{a['machine']}; flexfleet {a['flexfleet']}, torch {a['torch']}, Python {a['python']}.",
        f"{found.room_bytes / 1e6:,.0f} MB of memory are free for training.",
        f"{'level':>10}{'size %':>9}{'samples/s':>12}{'peak MB':>10}{'J/sample':>11}",
        *(_row(level) for level in found.levels),
        *(f"No {what}: {printable(why).rstrip('.')}.{assumed.get(what, '')}" for what, why in found.left_out.items()),
        *([f"Joules are those of {', '.join(found.sensors)}."] if found.sensors else []),
    ]
    comments = "".join(f"# {line}\n" for line in lines)
    return comments + write_yaml({"fleet": {"tiers": [found.tier]}})


def _row(level: Level) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    peak = None if level.peak_bytes is None else level.peak_bytes / 1e6
    return (
        f"{level.name:>10}{level.size:>9.2f}{shown(level.samples_per_second, ',.1f'):>12}{shown(peak, ',.1f'):>10}"
        f"{shown(level.joules_per_sample, '.3g'):>11}{'' if level.fits else '  does not fit'}"
    )
