"""Checks a cut network once, when it is made: it computes what the module computes, and each sub-model what the whole
network computes with the rest zeroed. In double precision where the module can, on made-up samples; what fails is
refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fl_engine.core.errors import ModelError, first_line
from fl_engine.core.slicing import places, take
from fl_engine.core.types import HEAD, ParamLayout, Params, SubmodelSpec
from fl_engine.models.traced.refusals import ways_out

SPECS = 8
CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""How far apart two networks' outputs may be, relative to the largest one."""

Make = Callable[[SubmodelSpec], nn.Module]
"""The network of a sub-model, without storage."""


def check(name: str, original: nn.Module, make: Make, layout: ParamLayout, x: Tensor) -> None:
    """`original`: the user's module, with the weights that it was made with. Raises ModelError."""
    try:
        with torch.no_grad():
            copy.deepcopy(original).double().eval()(x.double() if x.is_floating_point() else x)
    except RuntimeError:  # it makes float32 tensors of its own
        _check(name, original, make, layout, x, torch.float32)
    else:
        _check(name, original, make, layout, x, torch.float64)


def _check(name: str, original: nn.Module, make: Make, layout: ParamLayout, x: Tensor, precision: torch.dtype) -> None:
    x, close = x.to(precision) if x.is_floating_point() else x, CLOSE[precision]
    names = list(layout.slots)
    with torch.random.fork_rng(devices=[]):
        generator = torch.Generator().manual_seed(1)
        user = copy.deepcopy(original).to(precision)
        state = user.state_dict()
        weights = {n: _spread(n, state[n], generator).to(precision) for n in names}
        user.load_state_dict({**state, **weights})
        for training in (False, True):
            traced: Any = _with(make(SubmodelSpec()), weights).train(training)
            traced.draws = False  # here both draw from torch's generator
            torch.default_generator.manual_seed(0)
            wanted = user.train(training)(x)
            torch.default_generator.manual_seed(0)
            if not _apart(traced(x), wanted) <= close:
                mode = "training" if training else "evaluation"
                raise ModelError(
                    f"{name} cannot be cut into sub-models: in {mode} the traced network computes something else than "
                    f"the module, so its forward changes what it holds, or what it was given; {ways_out()}"
                )
        whole = make(SubmodelSpec())
        for _ in range(SPECS if any(group != HEAD for group in layout.groups) else 0):
            spec = _drawn(layout, generator)
            sub = _with(make(spec), take(weights, layout, spec)).eval()
            rest = _with(whole, _zeroed(weights, layout, spec)).eval()
            with torch.no_grad():
                try:
                    found = sub(x)
                except Exception as error:  # of somebody else's code
                    raise ModelError(
                        f"{name} cannot be cut into sub-models: with the channels {_said(spec)} alone, its forward "
                        f"fails ({type(error).__name__}: {first_line(error)}), so a size in it does not follow the "
                        f"channels; {ways_out()}"
                    ) from error
                apart = _apart(found, rest(x))
            if not apart <= close:
                raise ModelError(
                    f"{name} cannot be cut into sub-models: with the channels {_said(spec)} alone, the outputs are "
                    f"{apart:.2g} from those of the whole network with the other channels zeroed, so an operation "
                    f"depends on the number of channels; {ways_out()}"
                )


def _apart(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max().clamp(min=1.0)).detach())


def _with(module: nn.Module, weights: Params) -> nn.Module:
    module.to(next(iter(weights.values())).dtype)
    module.load_state_dict({name: tensor.clone() for name, tensor in weights.items()}, assign=True)
    return module


def _spread(name: str, tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Fresh zeros and ones would hide a channel that is not where it should be."""
    if tensor.dim() > 1 and bool(tensor.count_nonzero()):
        return tensor.double()
    noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    return noise + 0.5 if name.endswith("running_var") else noise - 0.3


def _drawn(layout: ParamLayout, generator: torch.Generator) -> SubmodelSpec:
    """A sub-model that keeps of each group all channels, the first ones, or any."""
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
