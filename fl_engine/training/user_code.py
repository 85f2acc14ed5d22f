"""Runs a user's loss or optimizer: the functions that are set as `training.objective` and `training.optimizer`.

    objective(model, x, y, start) -> Tensor              # the loss of a batch, a scalar
    optimizer(parameters, lr) -> torch.optim.Optimizer   # called for each client and round

The objective receives the client's sub-model as an ordinary module. Parameters have the names and shapes of the
module's `state_dict`. Hooks, gradients and `model.fc` work as usual. The module's layers use the kernels of `lanes`, so
the user's implementation of a built-in loss returns the same result bit for bit.
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
from fl_engine.training.lanes import LaneNetwork
from fl_engine.training.losses import mask_absent
from fl_engine.training.objective import Objective, Setting, divide_outputs

OBJECTIVE, OPTIMIZER = "training.objective", "training.optimizer"


def function(name: str, what: str) -> Callable[..., Any]:
    """Return the function or optimizer class `name`, which is the value of the option `what`."""
    found: Any = resolve({}, name, what)
    wrong_class = isinstance(found, type) and (what != OPTIMIZER or not issubclass(found, torch.optim.Optimizer))
    if wrong_class or not callable(found):
        raise ConfigError.at(f"{what} must be the name of a function, but {name!r} is {found!r}")
    return found  # type: ignore[no-any-return]


def check(task: LocalTask) -> None:
    """Raise ModelError if a custom objective would replace terms of the algorithm's loss. Methods that change gradients
    or outputs, such as proximal terms, clipping, HeteroFL's scaler and masks, work with any objective."""
    if task.objective is None:
        return
    parts = []
    if task.distillation is not None and task.distillation.weight > 0:
        parts.append("self-distillation (set algorithm.kd_weight=0 to disable it)")
    if task.exits is not None:
        parts.append("a loss at every exit")
    if task.widths:
        parts.append("a loss of randomly drawn sub-models")
    if parts:
        text = f"{OBJECTIVE} = {task.objective!r} would replace {' and '.join(parts)}"
        raise ModelError(f"{text}. Set {OBJECTIVE}=null, or choose another algorithm", path=OBJECTIVE)


def parameters_of(weights: Params) -> dict[str, nn.Parameter]:
    """Create a parameter for each of the `weights` (1, ...), without the first axis. Parameters and weights share
    memory."""
    return {name: nn.Parameter(w.detach()[0]) for name, w in weights.items()}


def copy_gradients(parameters: Mapping[str, nn.Parameter], weights: Params) -> None:
    """Set the gradients of the weights to views of the parameters' gradients."""
    for name, parameter in parameters.items():
        weights[name].grad = None if parameter.grad is None else parameter.grad.unsqueeze(0)


def stepper(task: LocalTask, parameters: Mapping[str, nn.Parameter], weights: Params) -> Callable[[float], None]:
    """Return a function that takes a learning rate and runs a step of the task's optimizer with the gradients of
    `weights`. If a parameter group has its own learning rate, this rate stays proportional to the task's rate."""
    o = task.optimizer
    assert isinstance(o, OwnOptimizer)
    device, taken = next(iter(weights.values())).device, 0
    with _named(OPTIMIZER, o.name) as make, drawing(seeds.derive(task.seed, "optimiser"), device):
        optimizer = make(list(parameters.values()), o.lr)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _error(OPTIMIZER, o.name, f"must return a torch.optim.Optimizer, got {optimizer!r}")
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


def objective(setting: Setting, start: Params, parameters: Mapping[str, nn.Parameter]) -> Objective:
    """Return a function that computes the user's loss, float32 (1,), for a batch (B, ...) and its targets (B, 1, ...).
    `start` contains the received weights."""
    task, device = setting.tasks[0], setting.device
    check(task)
    name = task.objective
    assert name is not None
    network = setting.borrow(task)
    network.bind(setting.state, partial(setting.generators, "dropout"))
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
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise _error(OBJECTIVE, name, f"must return a scalar, the mean loss of the batch, got {got}")
        if not value.requires_grad:
            raise _error(OBJECTIVE, name, "returned a loss that does not depend on the model's weights")
        if not math.isfinite(number := value.item()):
            raise _error(OBJECTIVE, name, f"must return a finite loss, got {number} in step {taken}")
        return value.float().reshape(1)

    return loss


def _client_network(
    setting: Setting, network: LaneNetwork, parameters: Mapping[str, nn.Parameter], present: Tensor | None
) -> nn.Module:
    """Build the sub-model in training mode with the given parameters. If `network` replaces a layer, the layer calls
    the replacement with views of the parameters. Outputs are float32, and outputs of absent classes are masked."""
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
    """Run `ours`, a layer from `lanes` that replaces `layer`, with the weights of `layer`."""
    if ours.training != layer.training:
        ours.train(layer.training)
    for name in held:
        path, _, leaf = name.rpartition(".")
        tensor = getattr(layer.get_submodule(path), leaf)
        setattr(ours.get_submodule(path), leaf, tensor.unsqueeze(0))
    return ours(*inputs)


@contextmanager
def _named(what: str, name: str) -> Iterator[Callable[..., Any]]:
    """Yield the user's function. Convert errors in the user's code to a ModelError. The ModelError contains the option
    and the line of the error."""
    try:
        call = function(name, what)
    except ConfigError as error:
        raise ModelError(str(error), path=what) from error
    try:
        yield call
    except (FlexfleetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}{line_in(call, error)}"
        raise _error(what, name, f"failed: {reason}") from error


def _error(what: str, name: str, problem: str) -> ModelError:
    return ModelError.at(f"{what} = {name!r} {problem}")
