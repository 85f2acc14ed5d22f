"""How clients are trained fastest here: one at a time, or side by side? A short measurement before the first round."""

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

ARITHMETIC = 2e9
"""Multiply-adds per step above which one client at a time is certain to be faster on a CPU: calling kernels costs
nothing beside running them."""
GAIN = 1.3
"""Side by side has to be so much faster: nearer than that, one at a time needs less memory."""
LANES = (4, 16, 64)
STEPS = 3
REPEATS = 3


def choose(family: ModelFamily, batch_size: int, clients: int, precision: Precision, device: str = "cpu") -> Numerics:
    """Numerics for rounds of `clients` clients. Measures on made-up samples; about a second at most."""
    single = Numerics(precision=precision)
    with torch.device("meta"):
        capable = can_run(family.module(FULL))
    if not capable or clients < 2 or 3 * count_macs(family) * batch_size > ARITHMETIC:
        return single
    alone = _seconds(family, batch_size, single, 1, device)
    best, fastest = single, alone / GAIN
    for lanes in sorted({min(n, clients) for n in (*LANES, clients)}):
        numerics = Numerics("batched", lanes, precision)
        if lanes == min(LANES[0], clients) and not _agrees(family, batch_size, numerics, device):
            log.warning("%s mixes channels where it has no weights: clients train one at a time", type(family).__name__)
            return single
        seconds = _seconds(family, batch_size, numerics, lanes, device)
        if seconds >= fastest:
            break
        best, fastest = numerics, seconds
    log.info("%d client(s) side by side: %.2f ms a step each, %.2f alone", best.lanes, 1e3 * fastest, 1e3 * alone)
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
    """Of one step of one client, the best of a few attempts."""
    jobs = _jobs(family, batch_size, lanes, STEPS, device)
    return min(_timed(family, jobs, numerics, device) for _ in range(REPEATS)) / STEPS / lanes


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
