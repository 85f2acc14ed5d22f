"""Compares a network with the module that it was made from, once, on made-up samples: the outputs, and the result of a
training step. Random sub-models are compared with the full network whose other channels are zeroed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from fl_engine.core.errors import ModelError, first_line
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import is_statistic, places, take
from fl_engine.core.types import FULL, HEAD, ParamLayout, Params, SubmodelSpec
from fl_engine.models.traced.errors import cannot_cut

SPECS, TRAINED = 8, 2
"""Sub-models that are tried, and how many of them in training."""
SAME = 1e-4
"""Largest difference of float32 numbers between network and module, which use the same kernels."""
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference between a sub-model and the zeroed network, whose sums have more terms."""
SMALL = 1e-2
"""Differences of a gradient are relative to its own largest number, but at least to this share of the network's."""
OUTPUTS = "outputs"

Make = Callable[[SubmodelSpec], nn.Module]
"""The network of a sub-model, without storage."""


def check_same(name: str, original: nn.Module, make: Make, x: Tensor, weights: Params, cure: str) -> None:
    """Raise ModelError unless the full network, with these weights, computes and trains like the user's module. `cure`
    is the end of the error."""
    user, network, learning = copy.deepcopy(original), make(FULL), make(FULL)
    learning.draws = False  # type: ignore[assignment]  # so that it draws the same numbers as the user's module
    with torch.no_grad():
        for n, tensor in user.state_dict(keep_vars=True).items():
            if n in weights:
                tensor.copy_(weights[n])
        trainee = copy.deepcopy(user)
        wanted, found = ({OUTPUTS: _outputs(each.eval(), x.clone())} for each in (user, _with(network, weights)))
    if (odd := _odd(found, wanted, SAME)) is not None:
        raise ModelError(f"{name}: in evaluation {_called(odd)} would differ from the module's. {cure}")
    trained = {n: tensor.clone().requires_grad_(not is_statistic(n)) for n, tensor in weights.items()}
    bound = _bind(learning.train(), trained)
    wanted = _step(trainee.train(), x.clone(), lambda: {n: trainee.state_dict(keep_vars=True)[n] for n in bound})
    try:
        found = _step(learning, x.clone(), lambda: {n: trained[n] for n in bound})
    except Exception as error:  # the user's code may raise anything
        raise ModelError(f"{name}: training fails ({type(error).__name__}: {first_line(error)}). {cure}") from error
    if (odd := _odd(found, wanted, SAME)) is not None:
        raise ModelError(f"{name}: in training {_called(odd)} would differ from the module's. {cure}")


def check_submodels(name: str, make: Make, layout: ParamLayout, x: Tensor, weights: Params) -> None:
    """Raise ModelError unless random sub-models compute the same as the full network with the other channels zeroed,
    and some of them train it alike. In double precision if the forward supports it."""
    if set(layout.groups) == {HEAD}:
        return
    generator = torch.Generator().manual_seed(1)
    for precision in (torch.float64, torch.float32):
        weights = {n: tensor.to(precision) for n, tensor in weights.items()}
        x = x.to(precision) if x.is_floating_point() else x
        try:
            draws = _draws(_with(make(FULL), weights).train(), x)
            break
        except RuntimeError:  # it makes float32 tensors of its own
            if precision is torch.float32:
                raise
    for number in range(SPECS):
        spec = _drawn(layout, generator)
        rest = _with(make(FULL), _zeroed(weights, layout, spec))
        sub = _with(make(spec), take(weights, layout, spec))
        kept = f"with the channels {_said(spec)} alone"
        try:
            if number < TRAINED:
                wanted, found = (_step(each.train(not draws), x, partial(_state, each)) for each in (rest, sub))
            else:
                with torch.no_grad():
                    wanted, found = ({OUTPUTS: _outputs(each.eval(), x)} for each in (rest, sub))
        except Exception as error:  # the user's code may raise anything
            why = f"its forward fails ({type(error).__name__}: {first_line(error)})"
            raise cannot_cut(name, f"{kept}, {why}, so a size in it does not follow the channels") from error
        if not (outputs := wanted.pop(OUTPUTS)).isfinite().all():
            raise cannot_cut(name, "its outputs for random samples are not finite, so no sub-model can be checked")
        odd = _odd(found, {OUTPUTS: outputs, **take(wanted, layout, spec)}, CLOSE[precision])
        if odd is not None:
            raise cannot_cut(
                name,
                f"{kept}, {_called(odd)} would differ from the full network's with the other channels zeroed, so an "
                "operation depends on the number of channels, or changes the samples in place",
            )


def _called(name: str) -> str:
    return "the outputs" if name == OUTPUTS else name if is_statistic(name) else f"the gradient of {name}"


def _outputs(run: nn.Module, x: Tensor) -> Tensor:
    with drawing(0, x.device):
        out: Tensor = run(x)
    return out


def _step(run: nn.Module, x: Tensor, state: Callable[[], Params]) -> Params:
    """The result of a training step: the outputs, each parameter's gradient of their projection onto a random
    direction, and each statistic afterwards. `state`: the parameters and statistics."""
    out = _outputs(run, x)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    (out * direction).sum().backward()  # type: ignore[no-untyped-call]
    found = {OUTPUTS: out.detach()}
    for name, tensor in state().items():
        after = tensor.detach() if is_statistic(name) else tensor.grad
        found[name] = torch.zeros_like(tensor) if after is None else after
    return found


def _state(module: nn.Module) -> Params:
    return module.state_dict(keep_vars=True)


def _odd(found: Params, wanted: Params, close: float) -> str | None:
    """The first name whose tensors differ. Numbers that are not finite must be equal."""
    gradients = [t for n, t in wanted.items() if n != OUTPUTS and not is_statistic(n)]
    most = max((_largest(t) for t in gradients), default=0.0)
    for name, one in found.items():
        other = wanted[name]
        least = 1.0 if name == OUTPUTS or is_statistic(name) else SMALL * most
        scale = max(least, _largest(other))
        if not torch.allclose(one, other, rtol=0.0, atol=close * scale, equal_nan=True):
            return name
    return None


def _largest(tensor: Tensor) -> float:
    return float(tensor.nan_to_num(0.0, 0.0, 0.0).abs().max())


def _draws(module: nn.Module, x: Tensor) -> bool:
    """Whether its forward draws from torch's generator."""
    with drawing(0, x.device), torch.no_grad():
        before = torch.get_rng_state()
        module(x)
        return not torch.equal(before, torch.get_rng_state())


def _bind(module: nn.Module, weights: Params) -> list[str]:
    """Let these tensors be attributes of the module's layers, as in training. Returns the names in use; a layer with
    several names has the tensors of the last one."""
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
    """The weights with random numbers instead of zeros and vectors, whose initial values would hide a channel at
    another place."""
    generator, out = torch.Generator().manual_seed(1), dict(weights)
    for name, tensor in weights.items():
        if tensor.dim() < 2 or not bool(tensor.count_nonzero()):
            noise = torch.rand(tensor.shape, generator=generator)
            out[name] = noise + 0.5 if name.endswith("running_var") else noise - 0.3
    return out


def _drawn(layout: ParamLayout, generator: torch.Generator) -> SubmodelSpec:
    """A sub-model that keeps all, the first or any channels of each group."""
    keep: dict[str, int | list[int]] = {}
    for group, size in layout.groups.items():
        how, count = (int(torch.randint(high, (), generator=generator)) for high in (3, size))
        if group != HEAD and how:
            some = torch.randperm(size, generator=generator)[: count + 1].sort().values.tolist()
            keep[group] = count + 1 if how == 1 else some
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


def _said(spec: SubmodelSpec) -> str:
    return ", ".join(f"{group}: {keep}" for group, keep in spec.keep[:2])[:120]
