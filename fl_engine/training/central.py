"""Central training: a single client trains on all training samples, and its model is evaluated after each epoch.

With `single` numerics, central training returns the same weights as `local.train` bit for bit, even after a resume.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import Diverged
from fl_engine.core.samples import Data
from fl_engine.core.slicing import under
from fl_engine.core.text import PERCENT
from fl_engine.core.types import LocalTask, Params
from fl_engine.training import local
from fl_engine.training.evaluation import Score, evaluate
from fl_engine.training.numerics import SINGLE, Numerics

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Epoch:
    """Results and training state after an epoch."""

    number: int
    """Number of the epoch, starting at 1."""
    loss: float
    """Mean training loss over the epoch's steps."""
    score: Score
    """Score on the test samples."""
    params: Params
    snapshot: Params
    """Training state from which `train_centrally` can resume."""


def train_centrally(
    family: ModelFamily,
    data: Data,
    task: LocalTask,
    start: Params,
    numerics: Numerics = SINGLE,
    device: str = "cpu",
    since: Params | None = None,
) -> Iterator[Epoch]:
    """Train the sub-model `task.spec` on all training samples, starting from the weights `start` or from the snapshot
    `since`. Yields an `Epoch` after each epoch. Training stops when the caller stops iterating."""
    job = local.TrainingJob(task, start, data.normalise(data.train_x.to(device)), data.train_y.to(device))
    with local.Session(family, data.task, [job], replace(numerics, strategy="single")) as session:
        if since is not None:
            session.restore(since)
        while session.done < task.epochs:
            began, steps, total = time.monotonic(), session.steps, session.total.clone()
            session.epoch()
            loss = float((session.total - total) / (session.steps - steps))
            (found,) = session.trained()
            if not found.finite:
                raise Diverged(f"central training diverged in epoch {session.done}. Lower central.lr or noise.lr")
            params = {name: tensor.cpu().clone() for name, tensor in found.params.items()}
            score = evaluate(family, params, task.spec, data, data.test_x, data.test_y, device)
            name, seconds = data.task.metric.name, time.monotonic() - began
            value = f"{100 * score.value:.2f} %" if name in PERCENT else f"{score.value:.4f}"
            log.info("epoch %d/%d: loss %.4f, %s %s, %.1f s", session.done, task.epochs, loss, name, value, seconds)
            yield Epoch(session.done, loss, score, params, session.snapshot())


def weights_in(snapshot: Params) -> Params:
    """Return the float32 weights in an epoch's snapshot, which are the same as the epoch's `params`."""
    return {name: t[0].float().contiguous() for name, t in under(snapshot, "weights/").items()}
