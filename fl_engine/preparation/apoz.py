"""Preparation that pre-trains the global model on the proxy data and measures each layer's APoZ, the average percentage
of zero activations (FlexFL, arXiv:2407.12729, Sec. III-A, steps 1 and 2). The pre-trained weights are discarded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar

from fl_engine.core import pool, seeds
from fl_engine.core.contracts import ModelFamily, PreparationContext
from fl_engine.core.records import Strict
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, Adam, LocalTask, Params
from fl_engine.training import local

log = logging.getLogger("flexfleet")


class ApozLayer(Strict):
    group: str
    size: int
    """Number of parameters in the layer."""
    apoz: float
    adjustment: float


class ApozScores(Strict):
    """Scores of all prunable layers, in network order."""

    layers: tuple[ApozLayer, ...]
    reference: tuple[float, ...] | None = None
    """APoZ of each layer after pre-training on all training data; None if not measured."""
    proxy_samples: int = 0
    proxy_accuracy: float | None = None
    seconds: float = 0.0

    @property
    def scores(self) -> tuple[float, ...]:
        """APoZ scores A_i of the layers."""
        return tuple(layer.apoz for layer in self.layers)

    def as_reference(self) -> ApozScores | None:
        """Return the scores after pre-training on all training data, or None if these scores were not measured."""
        if not self.reference:
            return None
        pairs = zip(self.layers, self.reference, strict=True)
        return self.model_copy(update={"layers": tuple(y.model_copy(update={"apoz": a}) for y, a in pairs)})


@dataclass(frozen=True)
class MeasureApoz:
    settings: ClassVar[tuple[str, ...]] = ()
    needs_data: ClassVar[bool] = True
    artifact: ClassVar[Any] = ApozScores

    def prepare(self, family: ModelFamily, server: PreparationContext) -> ApozScores:
        started = time.monotonic()
        params, scores = _measure(family, server)
        data = server.data
        accuracy = server.evaluate(FULL, params)
        reference = _measure(family, server.reference)[1] if server.reference is not None else None
        found = of_scores(family, scores)
        figures = {
            "reference": reference,
            "proxy_samples": len(data.train_y) + len(data.test_y),
            "proxy_accuracy": accuracy if isfinite(accuracy) else None,
            "seconds": round(time.monotonic() - started, 3),
        }
        return found.model_copy(update=figures)

    def assumed(self, family: ModelFamily) -> ApozScores:
        """Return placeholders with an APoZ of 0.5 for every layer."""
        return of_scores(family, (0.5,) * len(family.prunable()))


def of_scores(family: ModelFamily, scores: Sequence[float]) -> ApozScores:
    """Combine the APoZ scores with the layers' adjustment weights, which depend only on the network."""
    sizes = pool.layer_sizes(family)
    layers = zip(family.prunable(), sizes, scores, pool.adjustment_weights(sizes), strict=True)
    return ApozScores(layers=tuple(ApozLayer(group=p.group, size=n, apoz=a, adjustment=w) for p, n, a, w in layers))


def pretraining(family: ModelFamily, server: PreparationContext, purpose: str) -> tuple[LocalTask, Params]:
    """Return the task of a training with Adam on the server's data, and the initial weights. `purpose` determines the
    task's random numbers."""
    settings = server.settings
    task = LocalTask(
        spec=FULL,
        optimizer=Adam(settings["pretrain.lr"]),
        epochs=settings["pretrain.epochs"],
        batch_size=settings["pretrain.batch_size"],
        drop_last=True,
        seed=seeds.derive(server.seed, purpose),
    )
    log.info("%s: training on %d samples for %d epochs", purpose, len(server.data.train_y), task.epochs)
    start = initial_params(family, seeds.derive(server.seed, "init"))
    return task, {name: tensor.to(server.device) for name, tensor in start.items()}


def _measure(family: ModelFamily, server: PreparationContext) -> tuple[Params, tuple[float, ...]]:
    """Pre-train the network and measure APoZ. Return the weights and the scores, even if the training diverges."""
    data, (task, start) = server.data, pretraining(family, server, "pretrain")
    x, y = data.normalise(data.train_x.to(server.device)), data.train_y.to(server.device)
    trained = local.train(family, data.task, [local.TrainingJob(task, start, x, y)])[0]
    return trained.params, pool.measure_apoz(family, trained.params, data.normalise(data.test_x.to(server.device)))
