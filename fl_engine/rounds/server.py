"""The server's own data, training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError, Diverged
from fl_engine.core.samples import Data
from fl_engine.core.types import LocalTask, Params, SubmodelSpec
from fl_engine.data.local_data import Unknown
from fl_engine.exchange.client import Site
from fl_engine.training import local
from fl_engine.training.evaluation import evaluate


@dataclass(frozen=True)
class ServerSite:
    """A `ServerContext` whose data are the proxy of the partition."""

    site: Site
    device: str = "cpu"

    @cached_property
    def samples(self) -> Mapping[int, int]:
        if self.site.most is not None:
            return Unknown(len(self.site.partition.clients))
        return {client: len(indices) for client, indices in enumerate(self.site.partition.clients)}

    @cached_property
    def data(self) -> Data:
        parts = self.site.partition
        own = torch.from_numpy(np.sort(np.concatenate([parts.proxy_train, parts.proxy_test])))
        if not len(own):
            raise ConfigError(
                "the algorithm asks for data on the server, and partition.proxy leaves it none: raise partition.proxy, "
                "or set partition.server_classes"
            )
        return self.site.data.part(own, own)

    def train(self, task: LocalTask, params: Params, anchor: Params | None = None) -> Params:
        """Raises Diverged where training does."""
        x, y = self.data.train_x.to(self.device), self.data.train_y.to(self.device)
        job = local.Job(task, self._ordered(params), self.data.normalise(x), y, anchor=anchor)
        (trained,) = local.train(self.site.family, self.data.task, [job], self.site.numerics)
        if not trained.finite:
            raise Diverged(f"training on the server diverged (learning rate {task.optimizer.lr:g})")
        return {name: tensor.cpu() for name, tensor in trained.params.items()}

    def _ordered(self, params: Params) -> Params:
        """The parameters in the order of the layout: sums over all of them depend on their order, and a file does not
        keep it."""
        return {name: params[name] for name in self.site.layout.slots if name in params}

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        """NaN where the metric is undefined on the server's samples (equal targets, images without a box)."""
        data = self.data
        return evaluate(self.site.family, params, spec, data, data.test_x, data.test_y, self.device).value


@dataclass(frozen=True)
class PreparingServer(ServerSite):
    """A `PreparationContext`: the proxy's test part is held out."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    reference: PreparingServer | None = None

    @property
    def seed(self) -> int:
        return self.site.seed

    @cached_property
    def data(self) -> Data:
        parts = self.site.partition
        train, test = (torch.from_numpy(np.sort(part)) for part in (parts.proxy_train, parts.proxy_test))
        if not len(train) or not len(test):
            raise ConfigError(
                "a preparation asks for data on the server, and partition.proxy leaves it none: raise partition.proxy, "
                "or set partition.server_classes"
            )
        return self.site.data.part(train, test)


@dataclass(frozen=True)
class LazyServer:
    """A `ServerContext` that is made when it is first used. `make` raises where there is none."""

    make: Callable[[], ServerContext]

    @cached_property
    def _server(self) -> ServerContext:
        return self.make()

    @property
    def samples(self) -> Mapping[int, int]:
        return self._server.samples

    @property
    def data(self) -> Data:
        return self._server.data

    def train(self, task: LocalTask, params: Params, anchor: Params | None = None) -> Params:
        return self._server.train(task, params, anchor)

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        return self._server.evaluate(spec, params)
