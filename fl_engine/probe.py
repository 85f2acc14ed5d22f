"""How clients are trained here: one at a time, or side by side, and then how many."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_engine import local, seeds
from fl_engine.lanes import can_run
from fl_engine.numerics import Numerics, Precision
from fl_engine.slicing import count_macs, initial_params
from fl_engine.types import FULL, SGD, LocalTask, ModelFamily

log = logging.getLogger("flexfleet")

SMALL_STEP = 3e8
"""Multiply-adds of a training step up to which clients train side by side. In larger ones, arithmetic takes so long
that calling kernels costs nothing beside it (docs/performance.md). A rule and not a measurement, because it decides
about bits: the same configuration gives the same model on a busy machine and an idle one."""
LANES = (2, 4, 16, 64)
SPREAD_S = 0.01
"""Seconds of a step from which on several threads gain something: in shorter ones they wait for Python's lock."""
STEPS = 3
REPEATS = 3


def choose(
    family: ModelFamily, batch_size: int, clients: int, precision: Precision, devices: Sequence[str] = ("cpu",)
) -> Numerics:
    """Numerics for rounds of `clients` clients on `devices`. The strategy follows from the network and the batch; how
    many go side by side, which moves no bit, is measured on made-up samples, in about a second."""
    single, device = Numerics(precision=precision), devices[0]
    with torch.device("meta"):
        capable = can_run(family.module(FULL))
    if not capable or 3 * count_macs(family) * batch_size > SMALL_STEP:
        return single
    if not _agrees(family, batch_size, Numerics("batched", 2, precision), device):
        log.warning("%s mixes channels where it has no weights: clients train one at a time", type(family).__name__)
        return single
    return measured(family, batch_size, clients, precision, devices)


def measured(
    family: ModelFamily, batch_size: int, clients: int, precision: Precision, devices: Sequence[str]
) -> Numerics:
    """Side by side, as many as take least time for all."""
    best, fastest = Numerics("batched", max(2, clients), precision), float("inf")
    for lanes in sorted({max(2, min(n, clients)) for n in (*LANES, -(-clients // len(devices)), clients)}):
        numerics = Numerics("batched", lanes, precision)
        step = _seconds(family, batch_size, numerics, lanes, devices[0])
        groups = -(-clients // lanes)
        at_once = min(groups, len(devices)) if step > SPREAD_S else 1
        if step * groups / at_once < fastest:
            best, fastest = numerics, step * groups / at_once
    log.info("%d clients side by side: a step of %d takes %.1f ms", best.lanes, clients, 1e3 * fastest)
    return best


def _jobs(family: ModelFamily, batch_size: int, lanes: int, steps: int, device: str) -> list[local.Job]:
    """The same samples for each lane, in another order and from other weights."""
    generator = torch.Generator().manual_seed(seeds.derive(0, "probe"))
    x = torch.randn(steps * batch_size, *family.input_chw, generator=generator).to(device)
    y = torch.randint(0, family.classes, (len(x),), generator=generator).to(device)
    task = LocalTask(FULL, SGD(0.01, momentum=0.5), epochs=1, batch_size=batch_size, drop_last=True, seed=0)
    starts = [{k: t.to(device) for k, t in initial_params(family, i).items()} for i in range(min(lanes, 2))]
    return [local.Job(replace(task, seed=i), starts[i % 2], x, y) for i in range(lanes)]


def _seconds(family: ModelFamily, batch_size: int, numerics: Numerics, lanes: int, device: str) -> float:
    """Of one step of all lanes, the best of a few attempts."""
    jobs = _jobs(family, batch_size, lanes, STEPS, device)
    return min(_timed(family, jobs, numerics, device) for _ in range(REPEATS)) / STEPS


def _timed(family: ModelFamily, jobs: Sequence[local.Job], numerics: Numerics, device: str) -> float:
    started = time.perf_counter()
    local.train(family, jobs, numerics)
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _agrees(family: ModelFamily, batch_size: int, numerics: Numerics, device: str) -> bool:
    """Whether a step side by side is the step alone, but for rounding."""
    jobs = _jobs(family, batch_size, 2, 1, device)
    together = local.train(family, jobs, numerics)
    alone = local.train(family, jobs, Numerics(precision=numerics.precision))
    close = 1e-3 if numerics.precision == "fp32" else 3e-2
    pairs = [(a.params[name], b.params[name]) for a, b in zip(together, alone, strict=True) for name in a.params]
    return all(torch.allclose(a, b, rtol=close, atol=close / 10) for a, b in pairs)
