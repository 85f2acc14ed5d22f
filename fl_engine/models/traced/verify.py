"""Compare a traced network with the user's module on random samples. Outputs, gradients and statistics must agree.

Random sub-models are compared with a full network in which the dropped channels are set to zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fl_engine.core.errors import first_line
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import is_statistic, places, take
from fl_engine.core.types import FULL, HEAD, ParamLayout, Params, SubmodelSpec
from fl_engine.models.traced.graph import cannot_cut, unusable
from fl_engine.models.traced.user_module import draws_numbers

SPECS, TRAINED = 8, 2
"""Number of sub-models that are checked in evaluation, and number of sub-models that are also checked in training."""
SAME = 1e-4
"""Maximum difference between the traced network and the user's module, which use the same float32 kernels."""
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Maximum difference between a sub-model and the network with zeroed channels, in which sums have more terms."""
SMALL = 1e-2
"""Minimum scale of a gradient's tolerance, relative to the largest value in all gradients."""
OUTPUTS = "outputs"

Make = Callable[[SubmodelSpec], nn.Module]
"""Function that creates the network of a sub-model without storage."""


def check_same(name: str, original: nn.Module, make: Make, x: Tensor, weights: Params, cure: str) -> None:
    """Raise ModelError unless the full network and the user's module give the same results with the same `weights`. The
    error message ends with `cure`."""
    user, network, learning = copy.deepcopy(original), make(FULL), make(FULL)
    learning.draws = False  # type: ignore[assignment]  # so that it draws the same numbers as the user's module
    with torch.no_grad():
        for n, tensor in user.state_dict(keep_vars=True).items():
            if n in weights:
                tensor.copy_(weights[n])
        trainee = copy.deepcopy(user)
        wanted, found = ({OUTPUTS: _outputs(each.eval(), x.clone())} for each in (user, _with(network, weights)))
    _compare(name, "evaluation", found, wanted, cure)
    trained = {n: tensor.clone().requires_grad_(not is_statistic(n)) for n, tensor in weights.items()}
    bound = _bind(learning.train(), trained)
    wanted = _step(trainee.train(), x.clone(), lambda: {n: trainee.state_dict(keep_vars=True)[n] for n in bound})
    try:
        found = _step(learning, x.clone(), lambda: {n: trained[n] for n in bound})
    except Exception as error:  # User code may raise any error.
        raise unusable(f"{name}: training fails ({type(error).__name__}: {first_line(error)}). {cure}") from error
    _compare(name, "training", found, wanted, cure)


def _compare(name: str, mode: str, found: Params, wanted: Params, cure: str) -> None:
    if (different := _different(found, wanted, SAME)) is not None:
        raise unusable(f"{name}: network and module must be equal in {mode}, but {different} would differ. {cure}")


def check_submodels(name: str, make: Make, layout: ParamLayout, x: Tensor, weights: Params) -> None:
    """Raise ModelError unless random sub-models give the same results as the full network with all other channels
    zeroed. Some sub-models are also compared in training. The precision is float64 if the forward supports float64."""
    if set(layout.groups) == {HEAD}:
        return
    generator = torch.Generator().manual_seed(1)
    for precision in (torch.float64, torch.float32):
        weights = {n: tensor.to(precision) for n, tensor in weights.items()}
        x = x.to(precision) if x.is_floating_point() else x
        try:
            with drawing(0, x.device):
                draws = draws_numbers(_with(make(FULL), weights).train(), x)
            break
        except RuntimeError:  # Even in a float64 network, `forward` may create float32 tensors.
            if precision is torch.float32:
                raise
    for number in range(SPECS):
        spec = _random_spec(layout, generator)
        rest = _with(make(FULL), _zeroed(weights, layout, spec))
        sub = _with(make(spec), take(weights, layout, spec))
        kept = f"with only the channels {', '.join(f'{group}: {keep}' for group, keep in spec.keep[:2])[:120]}"
        try:
            trains = number < TRAINED and not draws
            steps = ((each.train(trains), partial(each.state_dict, keep_vars=True)) for each in (rest, sub))
            wanted, found = (_step(run, x, state) for run, state in steps)
        except Exception as error:  # User code may raise any error.
            why = f"its forward fails ({type(error).__name__}: {first_line(error)})"
            raise cannot_cut(name, f"{kept}, {why}, so a size in the forward does not match the channels") from error
        if not (outputs := wanted.pop(OUTPUTS)).isfinite().all():
            raise cannot_cut(name, "its outputs for random samples are not finite, so sub-models cannot be checked")
        wanted = {OUTPUTS: outputs, **take(wanted, layout, spec)}
        if (different := _different(found, wanted, CLOSE[precision])) is not None:
            why = "so an operation depends on the number of channels, or changes the samples in place"
            raise cannot_cut(name, f"{kept}, {different} would differ from the full network, {why}")


def _outputs(run: nn.Module, x: Tensor) -> Tensor:
    with drawing(0, x.device):
        out: Tensor = run(x)
    return out


def _step(run: nn.Module, x: Tensor, state: Callable[[], Params]) -> Params:
    """Run a training step and return the outputs, the gradients and the new statistics by name. The loss is the scalar
    product of the outputs and a random tensor. `state` returns the parameters and statistics."""
    out = _outputs(run, x)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * direction).sum().backward()  # type: ignore[no-untyped-call]
    found = {OUTPUTS: out.detach()}
    for name, tensor in state().items():
        after = tensor.detach() if is_statistic(name) else tensor.grad
        found[name] = torch.zeros_like(tensor) if after is None else after
    return found


def _different(found: Params, wanted: Params, close: float) -> str | None:
    """Return a description of the first tensor that differs, or None. NaN and infinities must be in the same places."""
    gradients = [t for n, t in wanted.items() if n != OUTPUTS and not is_statistic(n)]
    most = max((_largest(t) for t in gradients), default=0.0)
    for name, one in found.items():
        exact = name == OUTPUTS or is_statistic(name)
        scale = max(1.0 if exact else SMALL * most, _largest(wanted[name]))
        if not torch.allclose(one, wanted[name], rtol=0.0, atol=close * scale, equal_nan=True):
            return "the outputs" if name == OUTPUTS else name if exact else f"the gradient of {name}"
    return None


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _bind(module: nn.Module, weights: Params) -> list[str]:
    """Set the weights as attributes of the module's layers, as in training. Return the names of the weights in use. If
    a layer has several names, only the weights of the last name are in use."""
    used: dict[tuple[nn.Module, str], str] = {}
    for name, tensor in weights.items():
        path, _, leaf = name.rpartition(".")
        layer = module.get_submodule(path)
        layer._parameters.pop(leaf, None)
        layer._buffers.pop(leaf, None)
        setattr(layer, leaf, tensor)
        used[layer, leaf] = name
    return list(used.values())


def _with(module: nn.Module, weights: Params) -> nn.Module:
    if (precision := next(iter(weights.values())).dtype) != torch.float32:
        module.to(precision)
    module.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    return module


def spread(weights: Params) -> Params:
    """Return the weights, but with random values in vectors and all-zero tensors, because equal initial values would
    hide a wrong order of channels."""
    generator, out = torch.Generator().manual_seed(1), dict(weights)
    for name, tensor in weights.items():
        if tensor.dim() < 2 or not bool(tensor.count_nonzero()):
            noise = torch.rand(tensor.shape, generator=generator)
            out[name] = noise + 0.5 if name.endswith("running_var") else noise - 0.3
    return out


def _random_spec(layout: ParamLayout, generator: torch.Generator) -> SubmodelSpec:
    """Return a sub-model that keeps, in each group, all channels, the first channels, or random channels."""
    keep: dict[str, int | list[int]] = {}
    for group, size in layout.groups.items():
        mode, count = (int(torch.randint(high, (), generator=generator)) for high in (3, size))
        if group != HEAD and mode:
            some = torch.randperm(size, generator=generator)[: count + 1].sort().values.tolist()
            keep[group] = count + 1 if mode == 1 else some
    return SubmodelSpec.of(keep)


def _zeroed(weights: Params, layout: ParamLayout, spec: SubmodelSpec) -> Params:
    keep = layout.channels(spec)
    out = {}
    for name, tensor in weights.items():
        kept = torch.ones_like(tensor)
        for dim, axis in enumerate(layout.slots[name].axes):
            at, line = places(keep, axis, tensor.shape[dim], layout.groups), torch.zeros(tensor.shape[dim])
            line[at] = 1
            kept *= line.view([-1 if d == dim else 1 for d in range(tensor.dim())])
        out[name] = tensor if name.endswith(("running_mean", "running_var")) else tensor * kept
    return out
