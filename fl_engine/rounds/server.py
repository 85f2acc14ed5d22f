"""Trains and evaluates on the server, with the server's own data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch

from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError, Diverged
from fl_engine.core.samples import Data
from fl_engine.core.types import LocalTask, Params, SubmodelSpec
from fl_engine.data.local_data import Unknown
from fl_engine.exchange.client import Site
from fl_engine.training import local
from fl_engine.training.evaluation import evaluate


class ServerSite:
    """A `ServerContext` with the partition's proxy data. If `site` is a function, it is called at the first access."""

    def __init__(self, site: Site | Callable[[], Site], device: str = "cpu") -> None:
        self._site = site
        self.device = device

    @cached_property
    def site(self) -> Site:
        return self._site if isinstance(self._site, Site) else self._site()

    @cached_property
    def samples(self) -> Mapping[int, int]:
        if self.site.most is not None:
            return Unknown.fromkeys(range(len(self.site.partition.clients)), 0)
        return {client: len(indices) for client, indices in enumerate(self.site.partition.clients)}

    @cached_property
    def data(self) -> Data:
        parts = self.site.partition
        own = _proxy(parts.proxy_train, parts.proxy_test)
        return self.site.data.part(own, own)

    @cached_property
    def _references(self) -> dict[LocalTask, tuple[Params, Params]]:
        """Map each task of the last seed to its initial and trained weights."""
        return {}

    def train(self, task: LocalTask, params: Params) -> Params:
        return self._trained(task, params, self.data.train_x, self.data.train_y)

    def train_on_sample(self, task: LocalTask, params: Params, most: int) -> Params:
        for other in [other for other in self._references if other.seed != task.seed]:
            del self._references[other]
        start, trained = self._references.get(task, ({}, {}))
        if start.keys() != params.keys() or not all(torch.equal(start[name], params[name]) for name in params):
            chosen = self._chosen(len(self.data.train_y), most)
            trained = self._trained(task, params, self.data.train_x[chosen], self.data.train_y[chosen])
            self._references[task] = params, trained
        return trained

    def _trained(self, task: LocalTask, params: Params, x: torch.Tensor, y: torch.Tensor) -> Params:
        x, y = x.to(self.device), y.to(self.device)
        # Restore the parameters' order, which files do not preserve, because sums depend on the order.
        ordered = {name: params[name] for name in self.site.layout.slots if name in params}
        job = local.TrainingJob(task, ordered, self.data.normalise(x), y)
        (trained,) = local.train(self.site.family, self.data.task, [job], self.site.numerics)
        if not trained.finite:
            raise Diverged(f"training on the server diverged. Decrease the learning rate, got {task.optimizer.lr:g}")
        return {name: tensor.cpu() for name, tensor in trained.params.items()}

    def evaluate(self, spec: SubmodelSpec, params: Params) -> float:
        data = self.data
        return evaluate(self.site.family, params, spec, data, data.test_x, data.test_y, self.device).value

    def loss(self, spec: SubmodelSpec, params: Params, most: int) -> float:
        data = self.data
        chosen = self._chosen(len(data.test_y), most)
        x, y = data.test_x[chosen], data.test_y[chosen]
        return evaluate(self.site.family, params, spec, data, x, y, self.device).loss

    @staticmethod
    def _chosen(samples: int, most: int) -> torch.Tensor:
        return torch.from_numpy(seeds.rng(0, "server/loss").permutation(samples)[:most])


class PreparingServer(ServerSite):
    """A `PreparationContext` that uses the test part of the proxy data for evaluation only."""

    def __init__(
        self, site: Site, device: str, settings: Mapping[str, Any], reference: PreparingServer | None = None
    ) -> None:
        super().__init__(site, device)
        self.settings = settings
        self.reference = reference

    @property
    def seed(self) -> int:
        return self.site.seed

    @cached_property
    def data(self) -> Data:
        parts = self.site.partition
        return self.site.data.part(_proxy(parts.proxy_train), _proxy(parts.proxy_test))


def _proxy(*parts: np.ndarray) -> torch.Tensor:
    """Return the indices of the proxy samples in the training data. Raises ConfigError if the result is empty."""
    own = torch.from_numpy(np.sort(np.concatenate(parts)))
    if not len(own):
        raise ConfigError.at(
            "partition.proxy must select at least one sample for the server. Increase this fraction, or set "
            "partition.server_classes"
        )
    return own
