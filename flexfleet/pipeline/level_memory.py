"""The memory that a client needs to train each level of the pool, measured."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fl_engine.backends.in_process import prepare_process
from fl_engine.core.errors import ClientError, ConfigError
from fl_engine.core.types import LocalTask, TaskContext, WorkOrder
from fl_engine.rounds.run import Run
from fl_engine.training.memory import BATCHES, Peaks, Trial, level_peaks

log = logging.getLogger("flexfleet")


def peaks_of(run: Run, initial: Any) -> Peaks:
    """Measure the peak of training each level: activations, gradients, optimizer, teachers, the largest batch and the
    samples of the client that has most, with the data set that every client reads. Takes seconds for each level.

    Args:
        initial: The algorithm's state before the first round.

    Raises:
        ConfigError: A device trains a level with less free memory than its size (FlexFL's `rule: authors`), so that the
            peak may not fit.
    """
    site, data = run.site, run.site.data
    orders = run.algorithm.plan(initial, run.context(0, run.begins(0, 0.0))).orders
    check_prunes(run, orders)
    trials = trials_of(run, orders)
    if site.most is None:
        samples = max(map(len, site.partition.clients))
    else:  # the server does not know how many samples devices have
        samples = min(site.most, BATCHES * max(trial.task.batch_size for trial in trials))
    log.info("measuring how much memory training each of %d levels takes", len(trials))
    prepare = partial(prepare_process, ("cpu",))
    found = level_peaks(site.family, data, trials, samples, site.numerics, prepare)
    held = sum(part.nbytes for part in (data.train_x, data.train_y, data.test_x, data.test_y))
    for trial, need in zip(trials, found.needs, strict=True):
        log.info("training %s takes %.1f MiB", trial.name, need / 2**20)
    return Peaks(found.base + held, tuple(peak + held for peak in found.levels))


def trials_of(run: Run, orders: Sequence[WorkOrder]) -> list[Trial]:
    """The task of a client of each level in the last round, when a distillation that begins later is active. A level
    that is reached only by pruning is trained by a client that was sent the next larger one. Assignments for a missing
    level are copies of the first one."""
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
    order, size = _order(run, orders, sent), 100 * run.site.pool[level].share
    return Trial(run.site.pool[level].name, order.spec, _task(run, order, math.nextafter(size, math.inf)))


def _order(run: Run, orders: Sequence[WorkOrder], sent: int) -> WorkOrder:
    """The assignment of a client that is sent this level, in the last round."""
    order = next((order for order in orders if order.level == sent), None)
    if order is None:
        spec = run.site.pool[sent].spec
        other = orders[0] if orders else WorkOrder(0, 0, spec, {}, 0, sent)
        order = replace(other, level=sent, spec=spec)
    return replace(order, round=run.terms.stop - 1)


def _task(run: Run, order: WorkOrder, free: float) -> LocalTask:
    site = run.site
    return run.algorithm.task(order, TaskContext(site.layout, site.pool, site.fleet[order.client], free))


def check_prunes(run: Run, orders: Sequence[WorkOrder]) -> None:
    """Raise ConfigError if a device trains a level with less free memory than its size."""
    pool = run.site.pool
    largest = max(i for i in range(len(pool)) if pool[i].dispatched)
    for member in pool[1:largest]:
        try:
            task = _task(run, _order(run, orders, largest), 100 * member.share)
        except ClientError:
            continue
        if task.spec == member.spec:
            raise ConfigError(
                f"observe=cgroup does not fit this algorithm: a device trains {member.name} with no more free memory "
                f"than its size ({100 * member.share:.2f} %). Set algorithm.rule=closest (FlexFL), or observe=simulated"
            )
