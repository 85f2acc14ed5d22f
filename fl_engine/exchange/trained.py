"""A client that has trained, as a method's measurements see it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from fl_engine.core.contracts import (
    ClientMetric,
    ModelFamily,
)
from fl_engine.core.errors import ClientError
from fl_engine.core.samples import Task
from fl_engine.core.types import LocalTask, Params, WorkOrder
from fl_engine.training.evaluation import losses_of
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
    """Evaluation collects statistics for batch norm (`PoolModel.static_bn`): those that are stored say little."""

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
        """With copies of the weights, on the device that has trained them."""

        def copied(params: Params) -> Params:
            return {name: tensor.detach().to(job.x.device, copy=True) for name, tensor in params.items()}

        return TrainedClient(goal, family, order, task, copied(received), copied(trained), job.x, job.y, static_bn)

    @cached_property
    def losses(self) -> Tensor:
        return losses_of(self.family, self.goal, self.received, self.task.spec, self.x, self.y, self.static_bn)

    def measured(self, metrics: Iterable[ClientMetric]) -> dict[str, float]:
        """Values by name. Raises ClientError for a value outside the declared bounds."""
        found = {}
        for metric in metrics:
            value = float(metric.measure(self))
            if not metric.low <= value <= metric.high:
                raise ClientError(
                    f"the client metric {metric.name} measures {value:g}, declared are {metric.low:g} to "
                    f"{metric.high:g}: bound what it measures, or declare wider bounds"
                )
            found[metric.name] = value
        return found
