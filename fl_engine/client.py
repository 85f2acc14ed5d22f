"""What a client does with an order, in whatever process it runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from fl_engine import devices, local
from fl_engine.errors import ClientError, ModelError
from fl_engine.partition import Partition
from fl_engine.slicing import count_macs, take
from fl_engine.types import (
    Algorithm,
    ClientFailure,
    ClientUpdate,
    Data,
    Device,
    LocalTask,
    ModelFamily,
    Outcome,
    Pool,
    SubmodelSpec,
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
        {name: tensor.to(device) for name, tensor in order.memory.items() if name in start},
    )
    try:
        trained = next(local.train(site.family, [job]))
    except (ModelError, MemoryError, torch.OutOfMemoryError) as error:
        return ClientFailure(order.round, order.client, "train", str(error) or "out of memory")
    if not math.isfinite(trained.loss) or not all(bool(t.isfinite().all()) for t in trained.params.values()):
        rate = task.optimizer.lr
        return ClientFailure(order.round, order.client, "train", f"training diverged (learning rate {rate:g})")
    metrics = {
        "loss": trained.loss,
        "steps": float(trained.steps),
        "macs": float(trained.samples * macs_per_sample(site.family, task)),
        "seconds": time.monotonic() - started,
        "free": free,
    }
    spec, payload = task.spec, trained.params
    if task.mask_labels:  # the rows of classes that the client does not hold were not trained
        held = torch.unique(site.data.train_y[indices]).tolist()
        spec = SubmodelSpec.of({**task.spec.kept, "classes": held}, task.spec.blocks)
        payload = take(payload, layout, spec, have=task.spec)
    return ClientUpdate(order.round, order.client, spec, payload, len(indices), metrics)


def macs_per_sample(family: ModelFamily, task: LocalTask) -> float:
    """Multiply-adds of one sample's training step: three times the forward pass (a backward pass costs about two),
    once for each teacher."""
    trained = [macs_of(family, spec) for spec in task.widths or (task.spec,)]
    teachers = task.distillation.teachers if task.distillation else ()
    return 3 * sum(trained) / len(trained) + sum(macs_of(family, spec) for spec in teachers)


def macs_of(family: ModelFamily, spec: SubmodelSpec) -> int:
    """`count_macs`, remembered by widths: which channels are kept does not matter."""
    layout = family.layout()
    return _macs(family, tuple((g, layout.width(spec, g)) for g in layout.groups), spec.blocks)


@lru_cache(maxsize=1024)
def _macs(family: ModelFamily, widths: tuple[tuple[str, int], ...], blocks: tuple[str, ...] | None) -> int:
    return count_macs(family, SubmodelSpec.of(dict(widths), blocks))
