"""Decides whether clients train one at a time or side by side, and how many at once.

Fixed rules decide, not measurements: the strategy changes the bits, so the same configuration must have the same
strategy on a busy machine and an idle one. docs/performance.md has the measurements behind the rules.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params, macs_of
from fl_engine.core.slicing import blank, initial_params, made_up
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, LocalTask
from fl_engine.training import local
from fl_engine.training.lanes import can_run
from fl_engine.training.numerics import Numerics, Precision

log = logging.getLogger("flexfleet")

SMALL_STEP = 3e8
"""Most multiply-adds of a training step with which clients train side by side. Larger steps take so long that the cost
of calling kernels does not matter."""
AT_ONCE = 1.2e9
"""Most multiply-adds of a step of all lanes together. Beyond that, their tensors do not fit into the caches."""
MOST_LANES = 512
"""Most clients side by side. More are not faster, and each takes memory."""
WEIGHTS_AT_ONCE = 2**26
"""Most bytes of the weights of all lanes together. Gradients and momentum take as much again."""
WORTH_A_THREAD = 1e8
"""Fewest multiply-adds of a step of all lanes together that are worth a second thread."""


def choose(
    family: ModelFamily,
    goal: Task,
    batch_size: int,
    clients: int,
    precision: Precision,
    devices: Sequence[str] = ("cpu",),
) -> Numerics:
    """Numerics for rounds of `clients` clients on `devices`. On devices other than a CPU they train one at a time,
    because cuDNN chooses its kernels by the number of groups, so a lane's bits would depend on the number of lanes."""
    single = Numerics(precision=precision)
    if precision == "fp16" or any(not name.startswith("cpu") for name in devices):
        return single
    capable = can_run(blank(family))
    if not capable or 3 * macs_of(family) * batch_size > SMALL_STEP:
        return single
    if not _agrees(family, goal, batch_size, precision):
        log.warning("%s mixes channels in a layer without weights: clients train one at a time", type(family).__name__)
        return single
    return batched(family, batch_size, clients, precision, devices)


def batched(
    family: ModelFamily, batch_size: int, clients: int, precision: Precision, devices: Sequence[str] = ("cpu",)
) -> Numerics:
    """Numerics for training side by side with the fastest number of lanes, which does not change the bits."""
    step = 3 * macs_of(family) * batch_size
    lanes = min(clients, int(AT_ONCE // step), MOST_LANES, WEIGHTS_AT_ONCE // (4 * count_params(family)))
    if clients * step > WORTH_A_THREAD:
        lanes = min(lanes, -(-clients // len(devices)))
    return Numerics("batched", max(2, lanes), precision)


def _agrees(family: ModelFamily, goal: Task, batch_size: int, precision: Precision) -> bool:
    """Whether a step of two clients side by side equals the step of each alone, up to rounding."""
    generator = torch.Generator().manual_seed(seeds.derive(0, "strategy"))
    x, y = made_up(family, batch_size, generator), goal.examples(batch_size, generator)
    task = LocalTask(FULL, SGD(0.01), epochs=1, batch_size=batch_size, drop_last=True, seed=0)
    jobs = [local.Job(replace(task, seed=i), initial_params(family, i), x, y) for i in range(2)]
    alone = local.train(family, goal, jobs, Numerics(precision=precision))
    try:
        together = local.train(family, goal, jobs, Numerics("batched", 2, precision))
    except (RuntimeError, ValueError, IndexError):  # a layer does not accept the channels of two clients
        return False
    close = 1e-3 if precision == "fp32" else 3e-2
    pairs = [(a.params[name], b.params[name]) for a, b in zip(together, alone, strict=True) for name in a.params]
    return all(torch.allclose(a, b, rtol=close, atol=close / 10) for a, b in pairs)
