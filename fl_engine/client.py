"""What a client does with an order, in whatever process it runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from fl_engine import devices, local
from fl_engine.errors import ClientError, ModelError
from fl_engine.partition import Partition
from fl_engine.slicing import take
from fl_engine.types import (
    Algorithm,
    ClientFailure,
    ClientUpdate,
    Data,
    Device,
    ModelFamily,
    Outcome,
    Pool,
    TaskContext,
    WorkOrder,
)


@dataclass(frozen=True)
class Site:
    """Where clients live: the network, the pool that all know, the fleet, and who holds which samples."""

    family: ModelFamily
    pool: Pool
    fleet: tuple[Device, ...]
    data: Data
    partition: Partition
    seed: int


def execute(algorithm: Algorithm, order: WorkOrder, site: Site, device: str = "cpu") -> Outcome:
    """Carries out one order: look at what is free, prune, train, hand back. A failure is an outcome."""
    started = time.monotonic()
    layout = site.family.layout()
    free = devices.observe(site.fleet[order.client], site.seed, order.round)
    context = TaskContext(layout, site.pool, site.fleet[order.client], free)
    try:
        task = algorithm.task(order, context)
        start = take(order.payload, layout, task.spec, have=order.spec)
    except (ClientError, ModelError) as error:
        return ClientFailure(order.round, order.client, "prune", str(error))
    indices = site.partition.clients[order.client]
    job = local.Job(
        task,
        {name: tensor.to(device) for name, tensor in start.items()},
        site.data.normalise(site.data.train_x[indices].to(device)),
        site.data.train_y[indices].to(device),
    )
    try:
        trained = next(local.train(site.family, [job]))
    except (ModelError, MemoryError, torch.OutOfMemoryError) as error:
        return ClientFailure(order.round, order.client, "train", str(error) or "out of memory")
    if not math.isfinite(trained.loss) or not all(bool(t.isfinite().all()) for t in trained.params.values()):
        rate = task.optimizer.lr
        return ClientFailure(order.round, order.client, "train", f"training diverged (learning rate {rate:g})")
    metrics = {"loss": trained.loss, "steps": float(trained.steps), "seconds": time.monotonic() - started, "free": free}
    return ClientUpdate(order.round, order.client, task.spec, trained.params, len(indices), metrics)
