"""A loss or an optimizer of one's own: functions that `training.objective` and `training.optimizer` name.

    objective(model, x, y, start) -> Tensor              # the loss of a batch, a scalar
    optimizer(parameters, lr) -> torch.optim.Optimizer   # a new one for each client and round

The objective gets the client's sub-model as an ordinary module: its parameters have the names and shapes of its
`state_dict`, and hooks, gradients and `model.fc` work as usual. Its layers compute with the kernels of `lanes`, so the
same loss gives the same bits as the built-in one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError, FlexfleetError, ModelError, first_line, line_in
from fl_engine.core.registry import resolve
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import blank, is_statistic
from fl_engine.core.types import LocalTask, OwnOptimizer, Params
from fl_engine.training.lanes import Network
from fl_engine.training.losses import mask_absent
from fl_engine.training.networks import divide_outputs
from fl_engine.training.objective import Objective, Setting

OBJECTIVE, OPTIMIZER = "training.objective", "training.optimizer"


def function(name: str, what: str) -> Callable[..., Any]:
    """Return the function that the parameter `what` names, or the class of an optimizer."""
    found: Any = resolve({}, name, what)
    wrong_class = isinstance(found, type) and (what != OPTIMIZER or not issubclass(found, torch.optim.Optimizer))
    if wrong_class or not callable(found):
        raise ConfigError(f"{what} must name a function, got {name!r}, which is {found!r}")
    return found  # type: ignore[no-any-return]


def is_own(task: LocalTask) -> bool:
    return task.objective is not None or isinstance(task.optimizer, OwnOptimizer)


def replaced(task: LocalTask) -> list[str]:
    """The parts of the algorithm's own loss that an objective would replace. Proximal and linear terms, clipping,
    HeteroFL's scaler and masks act on gradients, samples or outputs, so they stay."""
    found = []
    if task.distillation is not None and task.distillation.weight > 0:
        found.append("self-distillation (algorithm.kd_weight=0 leaves it out)")
    if task.exits is not None:
        found.append("a loss at every exit")
    if task.widths:
        found.append("a loss of sub-models that each step draws")
    return found


def check(task: LocalTask) -> None:
    """Raise ModelError if an objective would replace parts of the algorithm's loss."""
    if task.objective is not None and (parts := replaced(task)):
        raise ModelError(
            f"{OBJECTIVE} = {task.objective!r} is the whole loss, but the algorithm has {' and '.join(parts)}. Turn "
            "that off, choose another algorithm, or leave the objective out"
        )


# -------------------------------------------------------------------------------------------------- the weights
def parameters_of(weights: Params) -> dict[str, nn.Parameter]:
    """Leaves in the shapes of the network's own, in the memory of these weights (1, ...)."""
    return {name: nn.Parameter(w.detach()[0]) for name, w in weights.items()}


def hand_gradients(parameters: Mapping[str, nn.Parameter], weights: Params) -> None:
    """Let the weights' gradients be the parameters' gradients, in the same memory."""
    for name, parameter in parameters.items():
        weights[name].grad = None if parameter.grad is None else parameter.grad.unsqueeze(0)


# ----------------------------------------------------------------------------------------------- the optimizer
def stepper(task: LocalTask, parameters: Mapping[str, nn.Parameter], weights: Params) -> Callable[[float], None]:
    """A function of the learning rate that takes a step of the task's optimizer with the gradients of `weights`. A
    group of parameters that has a learning rate of its own keeps its ratio to the task's rate."""
    o = task.optimizer
    assert isinstance(o, OwnOptimizer)
    device, taken = next(iter(weights.values())).device, 0
    with _named(OPTIMIZER, o.name) as make, drawing(seeds.derive(task.seed, "optimiser"), device):
        optimizer = make(list(parameters.values()), o.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(f"{OPTIMIZER} = {o.name!r} must return a torch.optim.Optimizer, got {optimizer!r}")
    rates = [group.get("lr") for group in optimizer.param_groups]

    def step(rate: float) -> None:
        nonlocal taken
        for name, parameter in parameters.items():
            gradient = weights[name].grad
            parameter.grad = None if gradient is None else gradient[0]
        for group, first in zip(optimizer.param_groups, rates, strict=True):
            if first is not None:
                group["lr"] = rate if first == o.lr else first * (rate / o.lr)
        with _named(OPTIMIZER, o.name), drawing(seeds.derive(task.seed, "optimiser", taken + 1), device):
            optimizer.step()
        taken += 1

    return step


# ----------------------------------------------------------------------------------------------- the objective
def objective(setting: Setting, start: Params, parameters: Mapping[str, nn.Parameter]) -> Objective:
    """The user's loss, float32 (1,), of a batch (B, ...) and its targets (B, 1, ...). `start`: the weights that the
    client received."""
    task, device = setting.tasks[0], setting.device
    check(task)
    name = task.objective
    assert name is not None
    network = setting.lent(task)
    network.bind(setting.state, setting.generators("dropout"))
    setting.borrowed.callback(network.module.train)
    present = setting.goal.present(setting.targets[0]) if task.mask_labels else None
    model = _client_network(setting, network, parameters, present)
    began = MappingProxyType({key: t.detach().to(device, copy=True) for key, t in start.items()})
    taken = 0

    def loss(x: Tensor, y: Tensor) -> Tensor:
        nonlocal taken
        with _named(OBJECTIVE, name) as call, drawing(seeds.derive(task.seed, "objective", taken), device):
            value = call(model, x, y.flatten(0, 1), began)
        taken += 1
        if not isinstance(value, Tensor) or value.dim() != 0 or not value.is_floating_point():
            said = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"{OBJECTIVE} = {name!r} must return a scalar, the mean loss of the batch, got {said}")
        if not value.requires_grad:
            raise ModelError(f"{OBJECTIVE} = {name!r} returned a loss that does not depend on the model's weights")
        if not math.isfinite(number := value.item()):
            raise ModelError(f"{OBJECTIVE} = {name!r} must return a finite loss, got {number} in step {taken}")
        return value.float().reshape(1)

    return loss


def _client_network(
    setting: Setting, network: Network, parameters: Mapping[str, nn.Parameter], present: Tensor | None
) -> nn.Module:
    """The sub-model as its family builds it, in training mode, with these parameters. A layer that `network` replaces
    computes by the replacement, with views of the parameters. Outputs are float32; classes that are not `present` are
    masked."""
    task, state = setting.tasks[0], setting.state
    model = blank(setting.family, task.spec).train()
    layers = dict(model.named_modules())
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        if is_statistic(name):
            layers[path]._buffers[leaf] = tensor[0]
        else:
            layers[path]._parameters[leaf] = parameters[name]
    ours, done = dict(network.module.named_modules()), list[str]()
    for path, layer in layers.items():
        if any(not above or path.startswith(f"{above}.") for above in done) or type(layer) is type(ours[path]):
            continue
        done.append(path)
        within = f"{path}." if path else ""
        held = [name.removeprefix(within) for name in state if name.startswith(within)]
        layer.forward = partial(_through, ours[path], layer, held)
    divide_outputs(setting.family, task, {path: layers[path] for path in network.weighted if path not in done})
    plain = model.forward

    def forward(x: Tensor) -> Tensor | tuple[Tensor, ...]:
        with setting.numerics.autocast(x.device):
            out = plain(x)
        return tuple(shaped(each) for each in out) if isinstance(out, tuple) else shaped(out)

    def shaped(out: Tensor) -> Tensor:
        rows = out.float().reshape(len(out), -1, *out.shape[2:])
        return rows if present is None else mask_absent(rows, present.repeat(len(rows), 1))

    model.forward = forward
    return model


def _through(ours: nn.Module, layer: nn.Module, held: list[str], *inputs: Tensor) -> Any:
    """The output of `ours`, a layer of `lanes`, with the weights of the layer that it replaces."""
    if ours.training != layer.training:
        ours.train(layer.training)
    for name in held:
        path, _, leaf = name.rpartition(".")
        tensor = getattr(layer.get_submodule(path), leaf)
        setattr(ours.get_submodule(path), leaf, tensor.unsqueeze(0))
    return ours(*inputs)


@contextmanager
def _named(what: str, name: str) -> Iterator[Callable[..., Any]]:
    """The function. An error of its code becomes a ModelError with the parameter and the line."""
    try:
        call = function(name, what)
    except ConfigError as error:
        raise ModelError(str(error)) from error
    try:
        yield call
    except (FlexfleetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = f"{type(error).__name__}: {first_line(error)}{line_in(call, error)}"
        raise ModelError(f"{what} = {name!r} failed: {told}") from error
