"""Chooses whether clients train one at a time or in parallel lanes (`lanes`), and the number of lanes.

The strategy affects rounding, so the choice must not depend on the load of the machine. Therefore the choice follows
fixed rules, which are based on the measurements in docs/performance.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.costs import count_params, macs_of
from fl_engine.core.slicing import blank, initial_params, made_up, random_targets
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, LocalTask
from fl_engine.training import local
from fl_engine.training.lanes import can_run
from fl_engine.training.numerics import Numerics, Precision

log = logging.getLogger("flexfleet")

SMALL_STEP = 3e8
"""Maximum multiply-adds per training step for training in parallel. In larger steps, kernel overhead is negligible."""
AT_ONCE = 1.2e9
"""Maximum multiply-adds per step, summed over all lanes. The tensors of larger steps do not fit into the CPU caches."""
MOST_LANES = 512
"""Maximum number of lanes. More lanes require more memory but are not faster."""
WEIGHTS_AT_ONCE = 2**26
"""Maximum size in bytes of the weights in all lanes. The gradients and the momentum each require the same amount of
memory as the weights."""
WORTH_A_THREAD = 1e8
"""Minimum multiply-adds per step, summed over all clients, for which a second thread reduces the time."""


def choose(
    family: ModelFamily,
    goal: Task,
    batch_size: int,
    clients: int,
    precision: Precision,
    devices: Sequence[str] = ("cpu",),
) -> Numerics:
    """Return the numerics for rounds with `clients` clients on `devices`. On a GPU, clients train one at a time,
    because cuDNN's rounding depends on the number of lanes."""
    single = Numerics(precision=precision)
    if precision == "fp16" or any(not name.startswith("cpu") for name in devices):
        return single
    if not can_run(blank(family)) or 3 * macs_of(family) * batch_size > SMALL_STEP:
        return single
    if not _agrees(family, goal, batch_size, precision):
        log.warning(
            "%s mixes channels in a layer without weights, so clients train one at a time", type(family).__name__
        )
        return single
    return batched(family, batch_size, clients, precision, devices)


def batched(
    family: ModelFamily, batch_size: int, clients: int, precision: Precision, devices: Sequence[str] = ("cpu",)
) -> Numerics:
    """Return numerics for training in lanes. The number of lanes is chosen for speed and does not affect results."""
    step = 3 * macs_of(family) * batch_size
    lanes = min(clients, int(AT_ONCE // step), MOST_LANES, WEIGHTS_AT_ONCE // (4 * count_params(family)))
    if clients * step > WORTH_A_THREAD:
        lanes = min(lanes, -(-clients // len(devices)))
    return Numerics("batched", max(2, lanes), precision)


def _agrees(family: ModelFamily, goal: Task, batch_size: int, precision: Precision) -> bool:
    """Return True if a step in lanes gives two clients the same weights as separate steps, up to rounding."""
    generator = torch.Generator().manual_seed(seeds.derive(0, "strategy"))
    x = made_up(family, batch_size, generator)
    y = random_targets(family, goal, x, generator)
    task = LocalTask(FULL, SGD(0.01), epochs=1, batch_size=batch_size, drop_last=True, seed=0)
    jobs = [local.TrainingJob(replace(task, seed=i), initial_params(family, i), x, y) for i in range(2)]
    alone = local.train(family, goal, jobs, Numerics(precision=precision))
    try:
        together = local.train(family, goal, jobs, Numerics("batched", 2, precision))
    except (RuntimeError, ValueError, IndexError):  # A layer cannot process two clients in one batch.
        return False
    close = 1e-3 if precision == "fp32" else 3e-2
    pairs = [(a.params[name], b.params[name]) for a, b in zip(together, alone, strict=True) for name in a.params]
    return all(torch.allclose(a, b, rtol=close, atol=close / 10) for a, b in pairs)
