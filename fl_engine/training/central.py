"""Central training: one client that holds all training samples, in the one local loop, looked at after every epoch.

The bits are those of `local.train` with that one job and `single` numerics, also where training is stopped and goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import Data
from fl_engine.core.types import LocalTask, Params
from fl_engine.training import local
from fl_engine.training.evaluation import Score, evaluate
from fl_engine.training.numerics import SINGLE, Numerics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Epoch:
    """What there is after an epoch. `number` counts from 1; `loss` is the mean over the epoch's steps of what the task
    minimises; `score` is on the test samples; `params` are the weights; with `snapshot`, `train_centrally` goes on."""

    number: int
    loss: float
    score: Score
    params: Params
    snapshot: Params


def train_centrally(
    family: ModelFamily,
    data: Data,
    task: LocalTask,
    start: Params,
    numerics: Numerics = SINGLE,
    device: str = "cpu",
    since: Params | None = None,
) -> Iterator[Epoch]:
    """Trains the sub-model `task.spec` from the weights `start` on all training samples, epoch by epoch, and tells each
    in a line of the log. Who takes no more epochs has stopped; `since` is the last one's snapshot, after which the rest
    has the bits of a training that was not stopped. Raises ModelError where training diverges, where the task cannot
    take these data, and for a snapshot of another training."""
    job = local.Job(task, start, data.normalise(data.train_x.to(device)), data.train_y.to(device))
    with local.opened(family, data.task, [job], replace(numerics, strategy="single")) as session:
        if since is not None:
            session.restore(since)
        while session.done < task.epochs:
            began, steps, total = time.monotonic(), session.steps, session.total.clone()
            session.epoch()
            loss = float((session.total - total) / (session.steps - steps))
            (found,) = session.trained()
            if not found.finite:
                raise ModelError(
                    f"central training diverged in epoch {session.done} (learning rate {task.optimizer.lr:g}): "
                    "set a smaller rate, or training.clip_norm"
                )
            params = {name: tensor.cpu().clone() for name, tensor in found.params.items()}
            score = evaluate(family, params, task.spec, data, data.test_x, data.test_y, device)
            metric, seconds = data.task.metric.name, time.monotonic() - began
            log.info(
                "epoch %d of %d: loss %.4f, %s %.4f, %.1f s",
                session.done, task.epochs, loss, metric, score.value, seconds,
            )  # fmt: skip
            yield Epoch(session.done, loss, score, params, session.snapshot())


def weights_in(snapshot: Params) -> Params:
    """The weights of an `Epoch.snapshot`: float32, its `params`."""
    prefix = "weights/"
    lanes = {name.removeprefix(prefix): t for name, t in snapshot.items() if name.startswith(prefix)}
    return {name: t[0].float().contiguous() for name, t in lanes.items()}
