"""The task's metrics and the loss of each pool model on held-out data."""

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
from fl_engine.core.slicing import runnable, take
from fl_engine.core.task import Task, measured
from fl_engine.core.types import FULL, ParamLayout, Params, Pool, PoolModel, SubmodelSpec

BATCH = 128
"""Samples in a batch. Where batch norm takes the statistics of the batch, scores depend on it."""


@dataclass(frozen=True)
class Score:
    value: float
    """The task's deciding metric: accuracy in [0, 1], R2."""
    loss: float
    """The mean over the samples."""
    metrics: Mapping[str, float] = field(default_factory=dict, compare=False)
    """All metrics of the task by name."""
    confusion: Tensor = field(default_factory=lambda: torch.empty(0, 0), compare=False, repr=False)
    """As in `Measured`."""


def evaluate(
    family: ModelFamily,
    params: Params,
    spec: SubmodelSpec,
    data: Data,
    x: Tensor,
    y: Tensor,
    device: str = "cpu",
    batch_size: int = BATCH,
    *,
    ensemble: bool = False,
    static_bn: bool = False,
    statistics_x: Tensor | None = None,
) -> Score:
    """Score one sub-model on samples `x` with targets `y`.

    Networks without running statistics normalise by the current batch in evaluation too, as in the authors' code. The
    batches have a fixed size and a fixed permutation, so the score is reproducible. A last batch of one sample joins
    the batch before it. A network with early exits is scored by its last output.

    Args:
        params: The sub-model's weights.
        ensemble: Score the mean of all exits instead of the last one.
        static_bn: Take the statistics of batch norm from one pass over the training data (HeteroFL, ICLR 2021, Sec. 3).
        statistics_x: The samples for `static_bn`, instead of the training data.
    """
    network = _network(family, params, spec, data, device, batch_size, static_bn, statistics_x)
    return _one_pass([(network, ensemble)], data, x, y, device, batch_size)[0]


def _network(
    family: ModelFamily,
    params: Params,
    spec: SubmodelSpec,
    data: Data,
    device: str,
    batch_size: int,
    static_bn: bool,
    statistics_x: Tensor | None = None,
) -> nn.Module:
    module = runnable(family, spec, {k: _maps_last(v.to(device)) for k, v in params.items()}).eval()
    if static_bn:
        collect_statistics(module, data, data.train_x if statistics_x is None else statistics_x, device, batch_size)
    return module


def _maps_last(tensor: Tensor) -> Tensor:
    """Weights of two-dimensional convolutions with the channels last in memory, like their inputs."""
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _one_pass(
    networks: Sequence[tuple[nn.Module, bool]],
    data: Data,
    x: Tensor,
    y: Tensor,
    device: str,
    batch_size: int,
    watch: Callable[[int, Tensor, Tensor], None] | None = None,
) -> list[Score]:
    """Score several networks, each with a flag whether its exits are averaged. Normalises the samples once.
    `watch` gets a network's position, its outputs and the samples' positions."""
    goal = data.task
    observed: list[list[Tensor]] = [[] for _ in networks]
    losses = [torch.zeros((), dtype=torch.float64, device=device) for _ in networks]
    with torch.no_grad():
        for chunk in _batches(len(y), batch_size):
            inputs, wanted = _inputs(data, x, chunk, device), y[chunk].to(device)
            for i, (network, ensemble) in enumerate(networks):
                exits = outputs_of(network(inputs))
                outputs = torch.stack(exits).mean(0) if ensemble else exits[-1]
                observed[i].append(goal.observe(outputs, wanted))
                losses[i] += goal.loss(outputs, wanted, "sum")
                if watch is not None:
                    watch(i, outputs, chunk)
    scores = []
    for parts, loss in zip(observed, losses, strict=True):
        values, confusion = measured(goal, parts)
        scores.append(Score(values[goal.metric.name], loss.item() / len(y), values, confusion))
    return scores


def _inputs(data: Data, x: Tensor, chunk: Tensor, device: str) -> Tensor:
    return batch_layout(data.normalise(x[chunk].to(device)))


def _batches(count: int, batch_size: int) -> list[Tensor]:
    order = torch.from_numpy(seeds.rng(0, "evaluate").permutation(count))
    chunks = list(torch.split(order, batch_size))
    if len(chunks) > 1 and len(chunks[-1]) == 1:
        chunks[-2:] = [torch.cat(chunks[-2:])]
    return chunks


def score(network: nn.Module, data: Data, ensemble: bool) -> Score:
    """Score a network on the CPU on the test samples."""
    return _one_pass([(network, ensemble)], data, data.test_x, data.test_y, "cpu", BATCH)[0]


def losses_of(
    family: ModelFamily,
    goal: Task,
    params: Params,
    spec: SubmodelSpec,
    x: Tensor,
    y: Tensor,
    static_bn: bool = False,
) -> Tensor:
    """float32 (N,): the loss of each normalised sample at the network's last output, in the batches of `evaluate`.
    With `static_bn`, batch norm uses the statistics of the batch, because evaluation does not use the stored ones."""
    module = runnable(family, spec, params).eval()
    for norm in [m for m in module.modules() if isinstance(m, _BatchNorm)] if static_bn else ():
        norm.running_mean = norm.running_var = None
        norm.forward = partial(_BatchNorm.forward, norm)  # type: ignore[method-assign]
    found = torch.empty(len(y), device=x.device)
    with torch.no_grad():
        for chunk in _batches(len(y), BATCH):
            last = outputs_of(module(batch_layout(x[chunk])))[-1]
            found[chunk] = goal.loss(last.float(), y[chunk]).float()
    return found


def collect_statistics(module: nn.Module, data: Data, x: Tensor, device: str, batch_size: int) -> None:
    """Set the statistics of every batch norm to the means over all batches of the batch's mean and variance.

    The scores of the rounds (HeteroFL, FedRolex) use all training data, the server's proxy included. Outside of a
    simulation, clients would have to send sums of activations for every level, which show the server more than
    federated averaging does. An exported model uses only the proxy.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm)]
    for norm in norms:
        norm.running_mean = torch.zeros(norm.num_features, device=device)
        norm.running_var = torch.ones(norm.num_features, device=device)
        norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=device)
        norm.track_running_stats, norm.momentum = True, None  # None: the plain mean over all batches
        norm.forward = partial(_BatchNorm.forward, norm)  # type: ignore[method-assign]
        norm.train()
    with torch.no_grad():
        for chunk in _batches(len(x), batch_size):
            module(_inputs(data, x, chunk, device))
    for norm in norms:
        norm.eval()


def recalibrated(
    family: ModelFamily,
    params: Params,
    spec: SubmodelSpec,
    data: Data,
    x: Tensor,
    device: str = "cpu",
) -> Params:
    """The sub-model's weights with the running statistics of samples `x` (`collect_statistics`)."""
    module = runnable(family, spec, {k: v.to(device) for k, v in params.items()}).eval()
    collect_statistics(module, data, x, device, BATCH)
    state = module.state_dict()
    return {name: state[name].detach().cpu() for name in params}


def weights_of(published: Params, layout: ParamLayout, model: PoolModel) -> Params:
    """Return a pool model's own weights, stored as `<level>/<name>` (Decoupled), or its slice of the global model."""
    prefix = f"{model.name}/"
    own = {name.removeprefix(prefix): t for name, t in published.items() if name.startswith(prefix)}
    if own:
        return own
    return take({name: t for name, t in published.items() if name in layout.slots}, layout, model.spec)


def published(state: Any) -> Params:
    """The weights that a state publishes: the global model, and the levels that have weights of their own."""
    params: Params = getattr(state, "published", state.params)
    return params


def evaluate_pool(
    family: ModelFamily,
    params: Params,
    pool: Pool,
    data: Data,
    devices: Sequence[str] = ("cpu",),
    batch_size: int = BATCH,
    watch: Callable[[str, Tensor, Tensor], None] | None = None,
) -> dict[str, Score]:
    """Score every reported pool model on the test samples, by name, smallest first.

    Args:
        params: The result of `published`.
        devices: The models are spread over these torch devices.
        watch: Called with a model's name, its outputs (B, ...) for a batch and the positions (B,) of the samples among
            the test samples; with several devices from several threads.
    """
    layout = family.layout()
    reported = [m for m in pool if m.reported]

    def score(place: int) -> list[Score]:
        device = devices[place]
        mine = reported[place :: len(devices)]
        networks = [
            (_network(family, weights_of(params, layout, m), m.spec, data, device, batch_size, m.static_bn), m.ensemble)
            for m in mine
        ]
        told = None if watch is None else lambda i, outputs, places: watch(mine[i].name, outputs, places)
        return _one_pass(networks, data, data.test_x, data.test_y, device, batch_size, told)

    with ThreadPoolExecutor(len(devices)) as threads:
        found = list(threads.map(score, range(min(len(devices), len(reported)))))
    return {m.name: found[i % len(devices)][i // len(devices)] for i, m in enumerate(reported)}


OWNERS = ("accuracy_device_classes", "accuracy_server_classes")


def by_owner(score: Score, server_classes: Sequence[int]) -> Score:
    """Return the score with the metrics OWNERS: the accuracy on test samples of the devices' classes and of the classes
    that only the server owns. Predictions are among all classes in both. Unchanged if the server owns no classes, the
    task has none, or all test samples have the same owner."""
    if not server_classes or not score.confusion.numel():
        return score
    owned = torch.zeros(len(score.confusion), dtype=torch.bool)
    owned[list(server_classes)] = True
    parts = [score.confusion[rows] for rows in (~owned, owned)]
    right = [int(score.confusion.diagonal()[rows].sum()) for rows in (~owned, owned)]
    if not all(int(part.sum()) for part in parts):
        return score
    found = {name: r / int(part.sum()) for name, r, part in zip(OWNERS, right, parts, strict=True)}
    return replace(score, metrics={**score.metrics, **found})


def average(scores: Mapping[str, Score]) -> float:
    """`avg` of the papers' tables: the mean of the deciding metric over the reported models."""
    return sum(s.value for s in scores.values()) / len(scores)


LAST = (nn.Linear, nn.Conv2d)


def last_layer_inputs(family: ModelFamily, params: Params, data: Data, batch_size: int = BATCH) -> NDArray[np.float32]:
    """(N_train, F): the input of the network's last linear or convolution layer for each training sample, averaged over
    pixels or time steps."""
    module = runnable(family, FULL, {name: tensor.clone() for name, tensor in params.items()}).eval()
    layers = [layer for layer in module.modules() if isinstance(layer, LAST)]
    if not layers:
        raise ModelError(f"{type(family).__name__} has no linear layer and no convolution whose input could be read")
    found: list[Tensor] = []

    def look(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        x = given[0]
        if isinstance(layers[-1], nn.Conv2d):
            found.append(x.mean((2, 3)))
        else:
            found.append(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)

    def answer(x: Tensor) -> None:
        module(batch_layout(data.normalise(x)))

    parts = split(data.train_x, batch_size, answer)
    layers[-1].register_forward_pre_hook(look)
    with torch.no_grad():
        for x in parts:
            answer(x)
    return torch.cat(found).float().numpy()
