"""How a client carries out an order that evaluates: it scores the weights that it was sent on samples of its own that
it holds out from training. Nothing is trained, and no tensor comes back."""

from __future__ import annotations

import torch

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError, memory_errors
from fl_engine.core.measures import evaluation_bounds, out_of_bounds
from fl_engine.core.samples import Data
from fl_engine.core.types import ClientFailure, ClientUpdate, Outcome, PoolModel, WorkOrder
from fl_engine.data.rules import Ints
from fl_engine.training.evaluation import evaluate


def evaluated(
    order: WorkOrder, family: ModelFamily, model: PoolModel, data: Data, own: Ints, held: Ints, device: str = "cpu"
) -> Outcome:
    """The metric that decides and the mean loss, as on the server (`evaluation.evaluate`). `own` and `held` (N,) are
    the positions in the training data of the samples that the client trains on and of those that it holds out. Where
    the model's batch norm collects statistics (`PoolModel.static_bn`), it does so on the client's own.

    A metric that is not finite, or not within its bounds, is a failure at the stage `evaluate`.
    """

    def failed(why: str) -> ClientFailure:
        return ClientFailure(order.round, order.client, "evaluate", why)

    if not len(held):
        return failed("a client that holds out no samples cannot evaluate")
    own_x, chosen = data.train_x[torch.from_numpy(own)], torch.from_numpy(held)
    x, y = data.train_x[chosen], data.train_y[chosen]
    how = {"ensemble": model.ensemble, "static_bn": model.static_bn}
    try:
        with memory_errors():
            score = evaluate(family, order.payload, order.spec, data, x, y, device, statistics_x=own_x, **how)
    except (ModelError, ValueError, MemoryError, torch.OutOfMemoryError) as error:
        return failed(str(error) or "out of memory")  # batch norm refuses a batch of one value per channel
    metrics = {data.task.metric.name: score.value, "loss": score.loss}
    if wrong := out_of_bounds(metrics, evaluation_bounds(data.task)):
        return failed(wrong)
    return ClientUpdate(order.round, order.client, order.spec, {}, len(held), metrics)
