"""What training each level of the pool takes of a pod's memory, measured as the run's clients train it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fl_engine.backends.in_process import prepare_process
from fl_engine.core.errors import ClientError
from fl_engine.core.types import TaskContext, WorkOrder
from fl_engine.rounds.run import Run
from fl_engine.training.memory import Peaks, Trial, level_peaks

log = logging.getLogger("flexfleet")


def peaks_of(run: Run, initial: Any) -> Peaks:
    """Of each level of the pool: activations, gradients, optimiser, teachers, the largest batch that some client has,
    and the samples of the client that has most; with the data set, which every client reads. `initial`: the algorithm's
    state before the first round. Takes seconds for each level."""
    site, data = run.site, run.site.data
    samples = max(map(len, site.partition.clients))
    trials = trials_of(run, run.algorithm.plan(initial, run.context(0, run.begins(0, 0.0))).orders)
    log.info("measuring how much memory training each of %d levels takes", len(trials))
    prepare = partial(prepare_process, ("cpu",))
    found = level_peaks(site.family, data.task, trials, samples, site.numerics, prepare)
    held = sum(part.nbytes for part in (data.train_x, data.train_y, data.test_x, data.test_y))
    for trial, need in zip(trials, found.needs, strict=True):
        log.info("training %s takes %.1f MiB", trial.name, need / 2**20)
    return Peaks(found.base + held, tuple(peak + held for peak in found.levels))


def trials_of(run: Run, orders: Sequence[WorkOrder]) -> list[Trial]:
    """What the client of each level does in the last round, when a distillation that begins later is under way. A level
    that is reached only by pruning is trained by a client that was sent the next larger one, if the algorithm prunes on
    the device. A level that none of the orders has is asked for as the first of them."""
    pool = run.site.pool
    found = []
    for level in range(len(pool)):
        sent = next((i for i in range(level, len(pool)) if pool[i].dispatched), level)
        try:
            found.append(_trial(run, orders, level, sent))
        except ClientError:
            if sent == level:
                raise
            found.append(_trial(run, orders, level, level))
    return found


def _trial(run: Run, orders: Sequence[WorkOrder], level: int, sent: int) -> Trial:
    site, pool = run.site, run.site.pool
    order = next((order for order in orders if order.level == sent), None)
    if order is None:
        other = orders[0] if orders else WorkOrder(0, 0, pool[sent].spec, {}, 0, sent)
        order = replace(other, level=sent, spec=pool[sent].spec)
    order = replace(order, round=run.terms.stop - 1)
    room = math.nextafter(100 * pool[level].share, math.inf)
    context = TaskContext(site.layout, pool, site.fleet[order.client], room)
    return Trial(pool[level].name, order.spec, run.algorithm.task(order, context))
