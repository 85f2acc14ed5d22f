"""What clients measure: metrics after training, and the model's score on samples that they hold out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fl_engine.core.clients import evaluation_bounds, out_of_bounds
from fl_engine.core.contracts import ClientMetric, ModelFamily
from fl_engine.core.errors import ClientError, ModelError, memory_errors
from fl_engine.core.samples import Data
from fl_engine.core.task import Task
from fl_engine.core.types import ClientFailure, ClientUpdate, LocalTask, Outcome, Params, PoolModel, WorkOrder
from fl_engine.data.partition_rules import Ints
from fl_engine.training.evaluation import evaluate, losses_of
from fl_engine.training.local import Job


@dataclass(frozen=True)
class TrainedClient:
    """A `ClientContext`."""

    goal: Task
    family: ModelFamily
    order: WorkOrder
    task: LocalTask
    received: Params
    trained: Params
    x: Tensor
    y: Tensor
    static_bn: bool = False
    """Evaluation collects statistics for batch norm (`PoolModel.static_bn`), so the stored ones mean little."""

    @staticmethod
    def of(
        order: WorkOrder,
        task: LocalTask,
        family: ModelFamily,
        goal: Task,
        job: Job,
        received: Params,
        trained: Params,
        static_bn: bool,
    ) -> TrainedClient:
        """Copy the weights on the device that has trained them."""

        def copied(params: Params) -> Params:
            return {name: tensor.detach().to(job.x.device, copy=True) for name, tensor in params.items()}

        return TrainedClient(goal, family, order, task, copied(received), copied(trained), job.x, job.y, static_bn)

    @cached_property
    def losses(self) -> Tensor:
        return losses_of(self.family, self.goal, self.received, self.task.spec, self.x, self.y, self.static_bn)

    def measured(self, metrics: Iterable[ClientMetric]) -> dict[str, float]:
        """Return the metrics' values by name. Raises ClientError for a value outside the declared bounds."""
        found = {}
        for metric in metrics:
            value = float(metric.measure(self))
            if not metric.low <= value <= metric.high:
                raise ClientError(
                    f"the client metric {metric.name} must be from {metric.low:g} to {metric.high:g}, got {value:g}. "
                    "Declare wider bounds, or limit what it measures"
                )
            found[metric.name] = value
        return found


def evaluated(
    order: WorkOrder, family: ModelFamily, model: PoolModel, data: Data, own: Ints, held: Ints, device: str = "cpu"
) -> Outcome:
    """Score the received weights on held-out samples: the deciding metric and the mean loss (`evaluation.evaluate`).
    Nothing is trained, and no tensor is returned.

    Args:
        order: The assignment of the evaluation.
        family: The network.
        model: The level whose weights were received. With `static_bn`, batch norm collects statistics on `own`.
        data: The data set.
        own: Positions (N,) of the client's training samples in the training data.
        held: Positions (N,) of the samples that the client holds out.
        device: Torch device.
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
        return failed(str(error) or "out of memory")  # batch norm raises ValueError for one value per channel
    metrics = {data.task.metric.name: score.value, "loss": score.loss}
    if wrong := out_of_bounds(metrics, evaluation_bounds(data.task)):
        return failed(wrong)
    return ClientUpdate(order.round, order.client, order.spec, {}, len(held), metrics)
