"""Layers with weights: the channels of their weights' axes and of their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from fl_engine.models.traced.channels import Dim, aligned, fixed, free, made, scaled, tie

Dims = tuple[Dim, ...]


@dataclass(frozen=True)
class Layer:
    weights: Mapping[str, Dims]
    """The axes of its parameters and statistics, by name."""
    sizes: Mapping[str, tuple[Dim, int]]
    """Its attributes with numbers of channels, each with the axis and the number of entries that one stands for."""
    out: Dims
    state: Dim | None = None
    """The axis of an LSTM's last state."""
    trouble: tuple[str, Dims] | None = None
    """Why it cannot be cut, and the axes concerned."""


def known(module: nn.Module) -> Callable[[Any, str, Dims], Layer] | None:
    """The rule for a layer of torch, or of a subclass with the same forward."""
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule if type(module).forward is _forward(type(module), kind) and not _computed(module) else None
    return None


def is_torchs(module: nn.Module) -> bool:
    """Whether its forward is torch's own, so that a trace need not look inside."""
    home = type(module).forward.__module__
    return home.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def _forward(kind: type[nn.Module], base: type[nn.Module]) -> Any:
    """The forward of the class of torch that `kind` is made from."""
    torchs = (each for each in kind.__mro__ if issubclass(each, base) and each.__module__.startswith("torch.nn."))
    return next(torchs).forward


def _computed(module: nn.Module) -> bool:
    """Whether a weight is computed from others (`parametrize`, `weight_norm`)."""
    return hasattr(module, "parametrizations") or hasattr(module, "weight_g")


def _present(module: nn.Module, **axes: Dims) -> dict[str, Dims]:
    """The ones of these parameters and buffers that the layer has."""
    held = module._parameters | module._buffers
    return {name: dims for name, dims in axes.items() if held.get(name) is not None}


def _linear(m: nn.Linear, path: str, x: Dims) -> Layer:
    out = made(m.out_features, path)
    sizes = {"in_features": (x[-1], 1), "out_features": (out, 1)}
    return Layer(_present(m, weight=(out, x[-1]), bias=(out,)), sizes, (*x[:-1], out))


def _conv(m: _ConvNd, path: str, x: Dims) -> Layer:
    """(B, C, ...) -> (B, C', ...)."""
    inside, kernel = x[1], tuple(fixed(n) for n in m.kernel_size)
    turned = isinstance(m, _ConvTransposeNd)
    trouble: tuple[str, Dims] | None = None
    sizes = {"in_channels": (inside, 1)}
    if m.groups == 1:
        out = made(m.out_channels, path)
        pair = (inside, out) if turned else (out, inside)
    elif m.groups == m.in_channels:
        out = scaled(inside, m.out_channels // m.groups)
        pair = (inside, fixed(m.out_channels // m.groups)) if turned else (out, fixed(1))
        sizes["groups"] = (inside, 1)
    else:
        out, each = made(m.out_channels, path), fixed((m.out_channels if turned else m.in_channels) // m.groups)
        pair = (inside, each) if turned else (out, each)
        trouble = (f"is a convolution of {m.groups} groups of {m.in_channels} channels", (inside, out))
    if free(*x[2:]):
        trouble = ("is a convolution over channels", x[2:])
    sizes["out_channels"] = (out, 1)
    weights = _present(m, weight=(*pair, *kernel), bias=(out,))
    return Layer(weights, sizes, (x[0], out, *x[2:]), trouble=trouble)


def _norm(m: _BatchNorm | _InstanceNorm, path: str, x: Dims) -> Layer:
    channels: Any = (x[1],)
    weights = _present(m, weight=channels, bias=channels, running_mean=channels, running_var=channels)
    trouble = ("normalises over channels", x[2:]) if free(*x[2:]) else None
    return Layer(weights, {"num_features": (x[1], 1)}, x, trouble=trouble)


def _group_norm(m: nn.GroupNorm, path: str, x: Dims) -> Layer:
    each, trouble = m.num_channels // m.num_groups, None
    if m.num_groups == 1:
        trouble = ("normalises over all channels, as one group", (x[1],))
    else:
        aligned(x[1], each)
    weights = _present(m, weight=(x[1],), bias=(x[1],))
    return Layer(weights, {"num_channels": (x[1], 1), "num_groups": (x[1], each)}, x, trouble=trouble)


def _layer_norm(m: nn.LayerNorm, path: str, x: Dims) -> Layer:
    over = x[len(x) - len(m.normalized_shape) :]
    whole = tuple(fixed(n) for n in m.normalized_shape)
    return Layer(_present(m, weight=whole, bias=whole), {}, x, trouble=("normalises over channels", over))


def _embedding(m: nn.Embedding, path: str, x: Dims) -> Layer:
    out = made(m.embedding_dim, path)
    return Layer({"weight": (fixed(m.num_embeddings), out)}, {"embedding_dim": (out, 1)}, (*x, out))


def _prelu(m: nn.PReLU, path: str, x: Dims) -> Layer:
    if m.num_parameters == 1:
        return Layer({"weight": (fixed(1),)}, {}, x)
    return Layer({"weight": (x[1],)}, {"num_parameters": (x[1], 1)}, x)


GATES = {"LSTM": 4, "GRU": 3}
"""Rows of a unit in a weight of a recurrent layer; otherwise 1."""


def _recurrent(m: nn.RNNBase, path: str, x: Dims) -> Layer:
    """Series (B, T, F) or (T, B, F). A unit that is left out is zero at every step."""
    ways = ("", "_reverse") if m.bidirectional else ("",)
    gates, given, weights = GATES.get(m.mode, 1), x[-1], dict[str, Dims]()
    units = [made(m.hidden_size, path) for _ in range(m.num_layers)]
    for unit in units[1:]:  # the layer has one number of units
        tie(units[0], unit)
    for level, unit in enumerate(units):
        for way in ways:
            at = f"_l{level}{way}"
            rows = unit * gates
            axes = {f"weight_ih{at}": (rows, given), f"weight_hh{at}": (rows, unit)}
            weights |= axes | _present(m, **{f"bias_ih{at}": (rows,), f"bias_hh{at}": (rows,)})
        given = unit * len(ways)
    trouble = None
    if m.proj_size:
        trouble = ("projects its outputs (proj_size)", (x[-1], *units))
    elif len(x) != 3:
        trouble = (f"gets {len(x)} axes instead of three", (x[-1], *units))
    sizes = {"input_size": (x[-1], 1), "hidden_size": (units[0], 1)}
    return Layer(weights, sizes, (*x[:-1], given), units[-1], trouble)


def tied(one: Layer, other: Layer) -> None:
    """A layer that is used twice has the same channels both times."""
    for name, dims in one.weights.items():
        for a, b in zip(dims, other.weights[name], strict=True):
            tie(a, b)


RULES: dict[type[nn.Module], Callable[[Any, str, Dims], Layer]] = {
    nn.Linear: _linear,
    _ConvNd: _conv,
    _BatchNorm: _norm,
    _InstanceNorm: _norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
    nn.PReLU: _prelu,
    nn.RNNBase: _recurrent,
}
