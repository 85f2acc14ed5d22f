"""Computes the loss and the task's metrics of each pool model on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.samples import Data, batch_layout, outputs_of, split
from fl_engine.core.slicing import runnable, take, under
from fl_engine.core.task import Task, measured
from fl_engine.core.types import FULL, ParamLayout, Params, Pool, PoolModel, SubmodelSpec

BATCH = 128
"""Number of samples per batch. Scores depend on the batch size if batch norm uses the statistics of the batch."""


@dataclass(frozen=True)
class Score:
    value: float
    """Value of the task's main metric, for example the accuracy in [0, 1] or R2."""
    loss: float
    """Mean loss over the samples."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    confusion: Tensor = field(default_factory=lambda: torch.empty(0, 0), compare=False, repr=False)
    """Confusion matrix, in the format of `Measured.confusion`."""


def evaluate(
    family: ModelFamily,
    params: Params,
    spec: SubmodelSpec,
    data: Data,
    x: Tensor,
    y: Tensor,
    device: str = "cpu",
    *,
    ensemble: bool = False,
    static_bn: bool = False,
    statistics_x: Tensor | None = None,
) -> Score:
    """Score one sub-model on samples `x` with targets `y`.

    As in the authors' code, a network without running statistics normalises by the statistics of the current batch.
    Batches have a fixed size and order, so the score is reproducible. A last batch of only one sample is merged with
    the batch before it. By default, a network with early exits is scored by the outputs of its last exit.

    Args:
        params: The sub-model's weights.
        ensemble: Score the mean output of all exits instead of the output of the last exit.
        static_bn: Compute the batch-norm statistics in one pass over the training data (HeteroFL, ICLR 2021, Sec. 3).
        statistics_x: Samples for the statistics of `static_bn`; None: all training samples.
    """
    network = _network(family, params, spec, device)
    if static_bn:
        collect_statistics(network, data, data.train_x if statistics_x is None else statistics_x, device)
    return _one_pass([(network, ensemble)], data, x, y, device)[0]


def _network(family: ModelFamily, params: Params, spec: SubmodelSpec, device: str) -> nn.Module:
    """Return the network in evaluation mode. Weights of 2-D convolutions have the memory format channels_last."""
    weights = {name: tensor.to(device) for name, tensor in params.items()}
    maps = {name: t.to(memory_format=torch.channels_last) for name, t in weights.items() if t.dim() == 4}
    return runnable(family, spec, weights | maps).eval()


def _one_pass(
    networks: Sequence[tuple[nn.Module, bool]],
    data: Data,
    x: Tensor,
    y: Tensor,
    device: str,
    watch: Callable[[int, Tensor, Tensor], None] | None = None,
) -> list[Score]:
    """Score each network in one pass over the samples. `networks` contains pairs (network, ensemble). With `ensemble`,
    the mean output of all exits is scored. `watch` is called with the network's index, the outputs and the indices of
    the samples."""
    goal = data.task
    observed: list[list[Tensor]] = [[] for _ in networks]
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in networks]
    with torch.no_grad():
        for chunk in _batches(len(y)):
            inputs, wanted = _inputs(data, x, chunk, device), y[chunk].to(device)
            for i, (network, ensemble) in enumerate(networks):
                exits = outputs_of(network(inputs))
                outputs = torch.stack(exits).mean(0) if ensemble else exits[-1]
                observed[i].append(goal.observe(outputs, wanted))
                losses[i] += goal.loss(outputs, wanted).sum()
                if watch is not None:
                    watch(i, outputs, chunk)
    scores = []
    for parts, loss in zip(observed, losses, strict=True):
        values, confusion = measured(goal, parts)
        scores.append(Score(values[goal.metric.name], loss.item() / len(y), values, confusion))
    return scores


def _inputs(data: Data, x: Tensor, chunk: Tensor, device: str) -> Tensor:
    return batch_layout(data.normalise(x[chunk].to(device)))


def _batches(count: int, batch_size: int = BATCH) -> list[Tensor]:
    order = torch.from_numpy(seeds.rng(0, "evaluate").permutation(count))
    chunks = list(torch.split(order, batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def score(network: nn.Module, data: Data, ensemble: bool) -> Score:
    """Score a network on the test samples, on the CPU."""
    return _one_pass([(network, ensemble)], data, data.test_x, data.test_y, "cpu")[0]


def losses_of(
    family: ModelFamily, goal: Task, params: Params, spec: SubmodelSpec, x: Tensor, y: Tensor, static_bn: bool = False
) -> Tensor:
    """Return the loss of each normalised sample, float32 (N,), at the network's last exit. The batches are the same as
    in `evaluate`. With `static_bn`, batch norm uses the statistics of the batch instead of stored statistics."""
    module = runnable(family, spec, params).eval()
    for norm in [m for m in module.modules() if isinstance(m, _BatchNorm)] if static_bn else ():
        norm.running_mean = norm.running_var = None
        norm.forward = partial(_BatchNorm.forward, norm)  # type: ignore[method-assign]
    found = torch.empty(len(y), device=x.device)
    with torch.no_grad():
        for chunk in _batches(len(y)):
            last = outputs_of(module(batch_layout(x[chunk])))[-1]
            found[chunk] = goal.loss(last.float(), y[chunk]).float()
    return found


def collect_statistics(module: nn.Module, data: Data, x: Tensor, device: str, batch_size: int = BATCH) -> None:
    """Set each batch norm's running mean and variance to the statistics of its inputs, averaged over all batches.

    Evaluation after a round (HeteroFL, FedRolex) uses all training data, including the server's proxy data. In a real
    deployment, clients would have to send sums of activations, which reveal more than model updates. Therefore
    statistics for an exported model are computed on the proxy data only.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.running_mean = torch.zeros(norm.num_features, device=device)
        norm.running_var = torch.ones(norm.num_features, device=device)
        norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=device)
        norm.track_running_stats, norm.momentum = True, None  # With momentum None, all batches have the same weight.
        norm.forward = partial(_BatchNorm.forward, norm)  # type: ignore[method-assign]
        norm.train()
    with torch.no_grad():
        for chunk in _batches(len(x), batch_size):
            module(_inputs(data, x, chunk, device))
    for norm in norms:
        norm.eval()


def recalibrated(
    family: ModelFamily, params: Params, spec: SubmodelSpec, data: Data, x: Tensor, device: str = "cpu"
) -> Params:
    """Return a copy of the sub-model's weights, in which the running statistics are computed on the samples `x`."""
    module = runnable(family, spec, {k: v.to(device) for k, v in params.items()}).eval()
    collect_statistics(module, data, x, device)
    state = module.state_dict()
    return {name: state[name].detach().cpu() for name in params}


def weights_of(published: Params, layout: ParamLayout, model: PoolModel) -> Params:
    """Return the weights of a pool model. By default, the weights are a slice of the global model. If the pool model
    does not share weights, `published` contains the weights with the names `<level>/<name>`."""
    if own := under(published, f"{model.name}/"):
        return own
    return take({name: t for name, t in published.items() if name in layout.slots}, layout, model.spec)


def published(state: Any) -> Params:
    """Return all weights for an evaluation: the global model, and the weights that belong to only one level."""
    params: Params = getattr(state, "published", state.params)
    return params


def evaluate_pool(
    family: ModelFamily,
    params: Params,
    pool: Pool,
    data: Data,
    devices: Sequence[str] = ("cpu",),
    watch: Callable[[str, Tensor, Tensor], None] | None = None,
) -> dict[str, Score]:
    """Score every reported pool model on the test samples. Returns the scores by name, smallest model first.

    Args:
        params: The weights that `published` returns.
        devices: Torch devices for the evaluation. Each device evaluates some of the models.
        watch: Function that is called with a model's name, the outputs (B, ...) for a batch, and the indices (B,) of
            the test samples. With several devices, several threads call the function.
    """
    reported = [m for m in pool if m.reported]

    def score(place: int) -> list[Score]:
        device, mine, networks = devices[place], reported[place :: len(devices)], []
        for m in mine:
            network = _network(family, weights_of(params, family.layout(), m), m.spec, device)
            if m.static_bn:
                collect_statistics(network, data, data.train_x, device)
            networks.append((network, m.ensemble))
        by_name = None if watch is None else lambda i, outputs, places: watch(mine[i].name, outputs, places)
        return _one_pass(networks, data, data.test_x, data.test_y, device, by_name)

    with ThreadPoolExecutor(len(devices)) as threads:
        found = list(threads.map(score, range(min(len(devices), len(reported)))))
    return {m.name: found[i % len(devices)][i // len(devices)] for i, m in enumerate(reported)}


OWNERS = ("accuracy_device_classes", "accuracy_server_classes")


def by_owner(score: Score, server_classes: Sequence[int]) -> Score:
    """Add two accuracies to the score: the accuracy on test samples of the devices' classes, and the accuracy on test
    samples of the server's classes. Predictions are not restricted to these classes. If the devices' or the server's
    classes have no test samples, or if the task has no classes, return the score unchanged."""
    if not server_classes or not score.confusion.numel():
        return score
    owned = torch.zeros(len(score.confusion), dtype=torch.bool)
    owned[list(server_classes)] = True
    parts = [score.confusion[rows] for rows in (~owned, owned)]
    right = [int(score.confusion.diagonal()[rows].sum()) for rows in (~owned, owned)]
    if not all(int(part.sum()) for part in parts):
        return score
    added = {name: r / int(part.sum()) for name, r, part in zip(OWNERS, right, parts, strict=True)}
    return replace(score, metrics={**score.metrics, **added})


def average(scores: Mapping[str, Score]) -> float:
    """Return the mean of the main metric over the reported models. The papers' tables call this mean `avg`."""
    return sum(s.value for s in scores.values()) / len(scores)


def last_layer_inputs(family: ModelFamily, params: Params, data: Data) -> NDArray[np.float32]:
    """Return the inputs of the network's last linear or convolution layer for all training samples, (N_train, F). The
    inputs are averaged over pixels or time steps."""
    module = runnable(family, FULL, {name: tensor.clone() for name, tensor in params.items()}).eval()
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if not layers:
        raise ModelError(f"{type(family).__name__} must have a linear or convolution layer, whose inputs are recorded")
    found: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if isinstance(layers[-1], nn.Conv2d):
            found.append(x.mean((2, 3)))
        else:
            found.append(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)

    def run(x: Tensor) -> None:
        module(batch_layout(data.normalise(x)))

    parts = split(data.train_x, BATCH, run)
    layers[-1].register_forward_pre_hook(look)
    with torch.no_grad():
        for x in parts:
            run(x)
    return torch.cat(found).float().numpy()
