"""Rules that determine the channels of the weights and outputs of layers."""

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
    """Maps parameters and statistics of the layer to axes."""
    sizes: Mapping[str, tuple[Dim, int]]
    """Maps each attribute that stores a number of channels to a pair (axis, number of entries per channel)."""
    out: Dims
    state: Dim | None = None
    """Axis of the last state of an LSTM."""
    mixes: bool = False
    """True if the layer mixes channels, so that sub-models must keep all channels."""


def known(module: nn.Module) -> Callable[[Any, str, Dims], Layer] | None:
    """Return the rule for a torch layer or for a subclass with an inherited forward; None if no rule exists."""
    for kind, rule in RULES.items():
        if isinstance(module, kind):
            return rule if type(module).forward is _forward(type(module), kind) and not _computed(module) else None
    return None


def is_torchs(module: nn.Module) -> bool:
    """Return whether torch defines the module's forward. A trace treats such modules as leaves."""
    home = type(module).forward.__module__
    return home.startswith("torch.nn.") and not isinstance(module, nn.Sequential)


def _forward(kind: type[nn.Module], base: type[nn.Module]) -> Any:
    """Return the forward method of the torch class from which `kind` inherits."""
    torchs = (each for each in kind.__mro__ if issubclass(each, base) and each.__module__.startswith("torch.nn."))
    return next(torchs).forward


def _computed(module: nn.Module) -> bool:
    """Return whether a weight is computed from other weights (`parametrize`, `weight_norm`)."""
    return hasattr(module, "parametrizations") or hasattr(module, "weight_g")


def _present(module: nn.Module, **axes: Dims) -> dict[str, Dims]:
    """Return the entries of `axes` for parameters and buffers that exist in the layer."""
    held = module._parameters | module._buffers
    return {name: dims for name, dims in axes.items() if held.get(name) is not None}


def _linear(m: nn.Linear, path: str, x: Dims) -> Layer:
    out = made(m.out_features, path)
    sizes = {"in_features": (x[-1], 1), "out_features": (out, 1)}
    return Layer(_present(m, weight=(out, x[-1]), bias=(out,)), sizes, (*x[:-1], out))


def _conv(m: _ConvNd, path: str, x: Dims) -> Layer:
    inside, kernel = x[1], tuple(fixed(n) for n in m.kernel_size)
    turned = isinstance(m, _ConvTransposeNd)
    sizes, mixes = {"in_channels": (inside, 1)}, bool(free(*x[2:]))
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
        mixes = True
    sizes["out_channels"] = (out, 1)
    weights = _present(m, weight=(*pair, *kernel), bias=(out,))
    return Layer(weights, sizes, (x[0], out, *x[2:]), mixes=mixes)


def _norm(m: _BatchNorm | _InstanceNorm, path: str, x: Dims) -> Layer:
    channels: Any = (x[1],)
    weights = _present(m, weight=channels, bias=channels, running_mean=channels, running_var=channels)
    return Layer(weights, {"num_features": (x[1], 1)}, x, mixes=bool(free(*x[2:])))


def _group_norm(m: nn.GroupNorm, path: str, x: Dims) -> Layer:
    each = m.num_channels // m.num_groups
    if m.num_groups > 1:
        aligned(x[1], each)
    weights = _present(m, weight=(x[1],), bias=(x[1],))
    return Layer(weights, {"num_channels": (x[1], 1), "num_groups": (x[1], each)}, x, mixes=m.num_groups == 1)


def _layer_norm(m: nn.LayerNorm, path: str, x: Dims) -> Layer:
    over = x[len(x) - len(m.normalized_shape) :]
    whole = tuple(fixed(n) for n in m.normalized_shape)
    return Layer(_present(m, weight=whole, bias=whole), {}, x, mixes=bool(free(*over)))


def _embedding(m: nn.Embedding | nn.EmbeddingBag, path: str, x: Dims) -> Layer:
    """Rule for tokens (B, ...). An `EmbeddingBag` reduces the tokens (B, T) to one embedding per sample."""
    out, before = made(m.embedding_dim, path), x if isinstance(m, nn.Embedding) else x[:1]
    return Layer({"weight": (fixed(m.num_embeddings), out)}, {"embedding_dim": (out, 1)}, (*before, out))


def _prelu(m: nn.PReLU, path: str, x: Dims) -> Layer:
    if m.num_parameters == 1:
        return Layer({"weight": (fixed(1),)}, {}, x)
    return Layer({"weight": (x[1],)}, {"num_parameters": (x[1], 1)}, x)


GATES = {"LSTM": 4, "GRU": 3}
"""Number of weight rows per unit of a recurrent layer. Layers that are not listed have one row per unit."""


def _recurrent(m: nn.RNNBase, path: str, x: Dims) -> Layer:
    """Rule for series (B, T, F) or (T, B, F). A removed unit is equivalent to a unit that always outputs zero."""
    ways = ("", "_reverse") if m.bidirectional else ("",)
    gates, given, weights = GATES.get(m.mode, 1), x[-1], dict[str, Dims]()
    units = [made(m.hidden_size, path) for _ in range(m.num_layers)]
    for unit in units[1:]:  # All layers of the RNN have the same number of units.
        tie(units[0], unit)
    for level, unit in enumerate(units):
        for way in ways:
            at = f"_l{level}{way}"
            rows = unit * gates
            axes = {f"weight_ih{at}": (rows, given), f"weight_hh{at}": (rows, unit)}
            weights |= axes | _present(m, **{f"bias_ih{at}": (rows,), f"bias_hh{at}": (rows,)})
        given = unit * len(ways)
    sizes = {"input_size": (x[-1], 1), "hidden_size": (units[0], 1)}
    return Layer(weights, sizes, (*x[:-1], given), units[-1], mixes=bool(m.proj_size) or len(x) != 3)


def tied(one: Layer, other: Layer) -> None:
    """Tie the channels of two calls of the same layer."""
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
    nn.EmbeddingBag: _embedding,
    nn.PReLU: _prelu,
    nn.RNNBase: _recurrent,
}
