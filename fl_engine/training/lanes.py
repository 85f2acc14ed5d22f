"""Lanes: n copies of a network run as one, each with its own weights, so that n clients train side by side.

A batch is (B, n*C, H, W): lane i has the channels i*C to (i+1)*C - 1; vectors are (B, n*F) likewise. So operations that
treat each channel alone (ReLU, pooling, flattening, adding branches, the mean over pixels) need no change. Layers with
weights are replaced by the ones here, whose weights have the lane as their first axis: a convolution becomes one with n
times as many groups, a linear layer a batched matrix product.

A lane's bits do not depend on how many other lanes there are, if there is at least one. (A single lane adds in another
order.) Comments name the PyTorch operations that would break this. In half precision on a CPU, oneDNN now and then
rounds differently with another number of groups or matrices (docs/performance.md). On CUDA the bits do depend on it, so
clients train one at a time there (`local.train`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fl_engine.core.errors import ModelError
from fl_engine.core.types import Axis, ParamLayout, Params, Slot
from fl_engine.training import kernels

VECTOR = 16
"""Floats in the largest register of a CPU (AVX-512)."""


class Lane(nn.Module):
    """A layer whose weights are (n, ...), for n lanes; `Network.bind` sets them as plain attributes."""

    weight: Tensor
    bias: Tensor | None = None


class Conv2d(Lane):
    def __init__(self, of: nn.Conv2d) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = of.stride, of.padding, of.dilation, of.groups
        self._pixels = () if isinstance(of.padding, str) else of.padding
        self._plain = bool(self._pixels) and set(of.dilation) == {1}
        self._skips: tuple[int, ...] = (1, 1)
        if set(of.kernel_size) == {1} and set(self._pixels) == {0}:
            # Drop the skipped pixels first: with a stride, oneDNN writes beyond its memory for fewer than 8 channels on
            # a CPU without AVX-512.
            self._skips, self.stride = of.stride, (1, 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        if self._skips != (1, 1):
            x_bchw = F.avg_pool2d(x_bchw, 1, self._skips)  # unlike a slice's, its gradient is channels last
        weight, bias = self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten()
        if len(x_bchw) == len(weight) == 1:
            weight = weight.contiguous()  # for one sample and one output, torch's gradient refuses channels last
        groups = self.groups * len(self.weight)
        if groups == 1 and self._plain and kernels.suits_unfolding(x_bchw, weight, self.stride, self._pixels):
            return kernels.unfolded_conv2d(x_bchw, weight, bias, self.stride, self._pixels)
        if groups != 3 or x_bchw.shape[1] != 3 or len(self.weight) == 1:
            return F.conv2d(x_bchw, weight, bias, self.stride, self.padding, self.dilation, groups)
        # On a CPU without AVX-512, three channels in all get a kernel for images, which rounds differently. A fourth
        # lane of zeros avoids it.
        outputs = len(weight)
        x, weight = F.pad(x_bchw, (0, 0, 0, 0, 0, 1)), F.pad(weight, (0, 0, 0, 0, 0, 0, 0, outputs // 3))
        bias = None if bias is None else F.pad(bias, (0, outputs // 3))
        out = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, 4)
        return F.pad(out, (0, 0, 0, 0, 0, -(outputs // 3)))  # unlike a slice's, its gradient is channels last


class Linear(Lane):
    def forward(self, x_bf: Tensor) -> Tensor:
        if len(self.weight) == 1:
            # squeeze: the gradient of an index, self.weight[0], is copied into zeros
            return F.linear(x_bf, self.weight.squeeze(0), None if self.bias is None else self.bias.squeeze(0))
        return kernels.batched_linear(x_bf, self.weight, self.bias)


class BatchNorm2d(Lane):
    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    def __init__(self, of: nn.BatchNorm2d) -> None:
        super().__init__()
        self.momentum, self.eps = of.momentum or 0.0, of.eps

    def forward(self, x_bchw: Tensor) -> Tensor:
        # flatten() of a contiguous tensor is a view, so batch norm updates the running statistics in place.
        vectors = [self.running_mean, self.running_var, self.weight, self.bias]
        mean, var, weight, bias = (None if v is None else v.flatten() for v in vectors)
        by_batch = self.training or mean is None
        channels = x_bchw.shape[1]
        more = 0 if len(self.weight) == 1 else -channels % VECTOR
        if not more:
            return F.batch_norm(x_bchw, mean, var, weight, bias, by_batch, self.momentum, self.eps)
        # The kernel rounds channels that do not fill a register differently, so pad with zeros to full registers.
        x = F.pad(x_bchw, (0, 0, 0, 0, 0, more))
        wide = [None if v is None else F.pad(v, (0, more)) for v in (mean, var, weight, bias)]
        out = F.batch_norm(x, wide[0], wide[1], wide[2], wide[3], by_batch, self.momentum, self.eps)
        for kept, updated in ((mean, wide[0]), (var, wide[1])):
            if kept is not None and updated is not None:
                kept.copy_(updated[:channels])
        return F.pad(out, (0, 0, 0, 0, 0, -more))  # unlike a slice's, its gradient is channels last


class MeanOfPixels(nn.Module):
    def forward(self, x_bchw: Tensor) -> Tensor:
        return mean_of_pixels(x_bchw)


def mean_of_pixels(x_bchw: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, C, 1, 1). Unlike a sum over two axes, average pooling adds the pixels of every channel in the
    same order."""
    return F.avg_pool2d(x_bchw, (x_bchw.shape[2], x_bchw.shape[3]))


class Dropout(nn.Module):
    """Each lane draws its mask from its own generator, so the mask does not depend on the other lanes."""

    generators: Sequence[torch.Generator] = ()

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        shape = (len(x), x.shape[1] // len(self.generators), *x.shape[2:])
        masks = [x.new_empty(shape).bernoulli_(1 - self.p, generator=g) for g in self.generators]
        return x * (masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)) / (1 - self.p)


@runtime_checkable
class RunsInLanes(Protocol):
    """A layer with weights that returns its own replacement for lanes."""

    def in_lanes(self) -> nn.Module: ...


def _replacement(layer: nn.Module) -> nn.Module | None:
    """The layer that replaces this one in lanes. A layer without one can stay only if it has no weights."""
    if isinstance(layer, RunsInLanes):
        return layer.in_lanes()
    if type(layer) is nn.Conv2d and layer.padding_mode == "zeros":
        return Conv2d(layer)
    if type(layer) is nn.Linear:
        return Linear()
    if type(layer) is nn.BatchNorm2d and not layer.track_running_stats:
        return BatchNorm2d(layer)
    if type(layer) is nn.AdaptiveAvgPool2d and layer.output_size in (1, (1, 1)):
        return MeanOfPixels()
    return None


def can_run(module: nn.Module) -> bool:
    """Whether every layer with weights can run in lanes, and the network does not set `runs_alone`. `strategy.choose`
    tries the layers without weights."""
    return not getattr(module, "runs_alone", False) and all(
        _replacement(layer) is not None for layer in module.modules() if _holds_weights(layer)
    )


def _holds_weights(layer: nn.Module) -> bool:
    return any(True for _ in layer.parameters(recurse=False)) or any(True for _ in layer.buffers(recurse=False))


Forward = Callable[[Tensor], "Tensor | tuple[Tensor, ...]"]
Generators = Callable[[], list[torch.Generator]]


class Network:
    """A module (without storage) prepared for lanes. `bind` sets its weights, (n, ...) each. A module that cannot run
    in lanes is unchanged and takes only n = 1."""

    def __init__(self, module: nn.Module) -> None:
        self._side_by_side = can_run(module)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        """The shapes of a single lane's weights, by name."""
        names = {type(m).__name__ for m in module.modules() if _holds_weights(m) and not _replacement(m)}
        self._odd = ", ".join(sorted(names)) or type(module).__name__
        self.module = _replace(module, self._side_by_side)
        layers = dict(self.module.named_modules())
        self._dropouts = [layer for layer in layers.values() if isinstance(layer, Dropout)]
        self._holders = {name: (layers[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in self.shapes}
        kinds = Conv2d | Linear | _ConvNd | nn.Linear
        self.weighted = {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}
        """The convolutions and linear layers, by name."""

    def bind(self, params: Params, generators: Generators) -> None:
        """Let the network compute with these tensors, without copies. `generators` returns one generator per lane for
        dropout; it is called only if the network has dropout."""
        n = len(next(iter(params.values()), ()))
        if not self._side_by_side and n > 1:
            raise ModelError(f"{self._odd} cannot train clients side by side: set run.strategy=single")
        given = {name: tuple(tensor.shape[1:]) for name, tensor in params.items()}
        if given != self.shapes:
            names = given.keys() | self.shapes.keys()
            odd = sorted(name for name in names if given.get(name) != self.shapes.get(name))[:4]
            said = ", ".join(f"{n}: {given.get(n, 'missing')} for {self.shapes.get(n, 'nothing')}" for n in odd)
            raise ModelError(f"these parameters do not fit the sub-model ({said})")
        for name, tensor in params.items():
            layer, leaf = self._holders[name]
            layer._parameters.pop(leaf, None)
            layer._buffers.pop(leaf, None)
            setattr(layer, leaf, tensor if self._side_by_side else tensor.squeeze(0))
        drawn = generators() if self._dropouts else []
        for dropout in self._dropouts:
            dropout.generators = drawn

    def release(self) -> None:
        """Drops the references to the bound tensors."""
        for layer, leaf in self._holders.values():
            setattr(layer, leaf, None)

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor | tuple[Tensor, ...] = self.module(x)
        return out


def evaluates(network: Network) -> None:
    """Put the network into evaluation mode, except batch norm, which keeps using the statistics of the batch."""
    for layer in network.module.eval().modules():
        if isinstance(layer, BatchNorm2d | _NormBase):
            layer.train()


def _replace(module: nn.Module, side_by_side: bool) -> nn.Module:
    def new(layer: nn.Module) -> nn.Module | None:
        if type(layer) is nn.Dropout:
            return Dropout(layer.p).train(layer.training)
        found = _replacement(layer) if side_by_side else None
        return None if found is None else found.train(layer.training)

    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            replaced = new(child)
            if replaced is not None:
                setattr(parent, name, replaced)
    return new(module) or module


def stacked_layout(layout: ParamLayout) -> ParamLayout:
    """The layout of weights (n, ...): all lanes are sliced alike."""
    lane = Axis(None)
    slots = {name: Slot(slot.block, (lane, *slot.axes)) for name, slot in layout.slots.items()}
    return ParamLayout(layout.groups, slots)


def stack(lanes: Sequence[Params], device: torch.device | None = None) -> Params:
    """Copy the lanes' weights into one tensor (n, ...) for each name. Convolution weights become channels last."""
    out = {}
    for name, first in lanes[0].items():
        if all(params[name] is first for params in lanes):
            tensor = first.detach().to(device).repeat(len(lanes), *[1] * first.dim())
        else:
            tensor = torch.stack([params[name].detach() for params in lanes]).to(device)
        out[name] = channels_last(tensor) if tensor.dim() == 5 else tensor
    return out


def channels_last(tensor: Tensor) -> Tensor:
    """The same tensor (..., C, H, W) with the channels innermost in memory."""
    return tensor.movedim(-3, -1).contiguous().movedim(-1, -3)


def unstack(params: Params) -> list[Params]:
    """Split weights (n, ...) into contiguous tensors of each lane: the inverse of `stack`."""
    rows = {name: tensor.detach().contiguous().unbind(0) for name, tensor in params.items()}
    return [{name: row[i] for name, row in rows.items()} for i in range(len(next(iter(rows.values()))))]


def beside(value_n: Tensor, tensor: Tensor) -> Tensor:
    """Reshape one value per lane to broadcast over a tensor (n, ...)."""
    return value_n.view(-1, *[1] * (tensor.dim() - 1))
