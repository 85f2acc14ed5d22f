"""Central training: one client has all training samples and is evaluated after each epoch.

The weights equal, bit for bit, those of `local.train` with the same job and `single` numerics, also after a resume.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import Diverged
from fl_engine.core.samples import Data
from fl_engine.core.text import PERCENT
from fl_engine.core.types import LocalTask, Params
from fl_engine.training import local
from fl_engine.training.evaluation import Score, evaluate
from fl_engine.training.numerics import SINGLE, Numerics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Epoch:
    """The state after an epoch."""

    number: int
    """From 1."""
    loss: float
    """The mean training loss over the epoch's steps."""
    score: Score
    """On the test samples."""
    params: Params
    snapshot: Params
    """`train_centrally` can resume from it."""


def train_centrally(
    family: ModelFamily,
    data: Data,
    task: LocalTask,
    start: Params,
    numerics: Numerics = SINGLE,
    device: str = "cpu",
    since: Params | None = None,
) -> Iterator[Epoch]:
    """Train the sub-model `task.spec` from the weights `start` on all training samples, or resume after the epoch whose
    snapshot is `since`. Training stops when the caller takes no more epochs."""
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
                raise Diverged(
                    f"central training diverged in epoch {session.done} (learning rate {task.optimizer.lr:g}): "
                    "set a smaller rate (central.lr, or noise.lr if noise.labels is set)"
                )
            params = {name: tensor.cpu().clone() for name, tensor in found.params.items()}
            score = evaluate(family, params, task.spec, data, data.test_x, data.test_y, device)
            name, seconds = data.task.metric.name, time.monotonic() - began
            value = f"{100 * score.value:.2f} %" if name in PERCENT else f"{score.value:.4f}"
            log.info(
                "epoch %d of %d: loss %.4f, %s %s, %.1f s",
                session.done, task.epochs, loss, name, value, seconds,
            )  # fmt: skip
            yield Epoch(session.done, loss, score, params, session.snapshot())


def weights_in(snapshot: Params) -> Params:
    """The weights in an `Epoch.snapshot`, float32: equal to the epoch's `params`."""
    prefix = "weights/"
    lanes = {name.removeprefix(prefix): t for name, t in snapshot.items() if name.startswith(prefix)}
    return {name: t[0].float().contiguous() for name, t in lanes.items()}
