"""What training each level of the pool takes of a client's memory, measured as the run's clients train it."""

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
    """Of each level of the pool: activations, gradients, optimiser, teachers, the largest batch that some client has,
    and the samples of the client that has most; with the data set, which every client reads. `initial`: the algorithm's
    state before the first round. Takes seconds for each level. Raises ConfigError where devices train a level with less
    free than its size (FlexFL's `rule: authors`), since room for its peak is told as more than that."""
    site, data = run.site, run.site.data
    orders = run.algorithm.plan(initial, run.context(0, run.begins(0, 0.0))).orders
    check_prunes(run, orders)
    trials = trials_of(run, orders)
    if site.most is None:
        samples = max(map(len, site.partition.clients))
    else:  # what devices hold is theirs to know: a trial takes a few batches
        samples = min(site.most, BATCHES * max(trial.task.batch_size for trial in trials))
    log.info("measuring how much memory training each of %d levels takes", len(trials))
    prepare = partial(prepare_process, ("cpu",))
    found = level_peaks(site.family, data, trials, samples, site.numerics, prepare)
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
    order, size = _order(run, orders, sent), 100 * run.site.pool[level].share
    return Trial(run.site.pool[level].name, order.spec, _task(run, order, math.nextafter(size, math.inf)))


def _order(run: Run, orders: Sequence[WorkOrder], sent: int) -> WorkOrder:
    """To a client that is sent this level, in the last round."""
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
    """Raises ConfigError where a device trains a level with less free than its size."""
    pool = run.site.pool
    largest = max(i for i in range(len(pool)) if pool[i].dispatched)
    for member in pool[1:largest]:
        try:
            task = _task(run, _order(run, orders, largest), 100 * member.share)
        except ClientError:
            continue
        if task.spec == member.spec:
            raise ConfigError(
                f"observe=cgroup: with this algorithm a device trains {member.name} though it has no more "
                f"free than its size ({100 * member.share:.2f} %), so its peak may have no room: a rule that compares "
                "with the models' sizes is expected (FlexFL's algorithm.rule=closest), or observe=simulated"
            )
