"""Trains n clients in parallel: their networks run as one network with n lanes. Each lane has its own weights.

A batch of images has the shape (B, n*C, H, W). Lane i has the channels i*C to (i+1)*C - 1. A batch of vectors has the
shape (B, n*F). Operations that process each channel separately, such as ReLU and pooling, need no change. This module
replaces every layer that has weights. The first axis of the new weights is the index of the lane. A convolution gets n
times as many groups, and a linear layer becomes a batched matrix product.

With two or more lanes, the result of a lane does not depend on the number of lanes, bit for bit. A single lane computes
sums in a different order, so its results are rounded differently. Comments mark the PyTorch operations whose results
would depend on the number of lanes. In half precision on a CPU, oneDNN's rounding sometimes depends on the number of
groups or matrices (docs/performance.md). On CUDA, results depend on the number of lanes, so clients train one at a time
(`local.train`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from fl_engine.core.errors import ModelError
from fl_engine.core.types import Axis, ParamLayout, Params, Slot
from fl_engine.training import kernels

VECTOR = 16
"""Number of floats in the largest CPU register (AVX-512)."""


class Lane(nn.Module):
    """A layer with weights (n, ...) for n lanes. `LaneNetwork.bind` assigns the weights to plain attributes."""

    weight: Tensor
    bias: Tensor | None = None


class Conv2d(Lane):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.stride, self.padding, self.dilation, self.groups = conv.stride, conv.padding, conv.dilation, conv.groups
        self._pixels = () if isinstance(conv.padding, str) else conv.padding
        self._plain = bool(self._pixels) and set(conv.dilation) == {1}
        self._skips: tuple[int, ...] = (1, 1)
        if set(conv.kernel_size) == {1} and set(self._pixels) == {0}:
            # On a CPU without AVX-512, oneDNN's 1x1 convolution with a stride writes out of bounds for fewer than 8
            # channels. Therefore subsample the input, and convolve without a stride.
            self._skips, self.stride = conv.stride, (1, 1)

    def forward(self, x_bchw: Tensor) -> Tensor:
        if self._skips != (1, 1):
            x_bchw = F.avg_pool2d(x_bchw, 1, self._skips)  # Slicing would lose the gradient's channels-last format.
        weight, bias = self.weight.flatten(0, 1), None if self.bias is None else self.bias.flatten()
        if len(weight) == 1 and (len(x_bchw) == 1 or torch.is_autocast_enabled(weight.device.type)):
            weight = weight.contiguous()  # On CPUs without AVX-512, the backward pass fails for channels-last weights.
        groups = self.groups * len(self.weight)
        if groups == 1 and self._plain and kernels.suits_unfolding(x_bchw, weight, self.stride, self._pixels):
            return kernels.unfolded_conv2d(x_bchw, weight, bias, self.stride, self._pixels)
        if groups != 3 or x_bchw.shape[1] != 3 or len(self.weight) == 1:
            return F.conv2d(x_bchw, weight, bias, self.stride, self.padding, self.dilation, groups)
        # On a CPU without AVX-512, torch selects a special kernel, which rounds differently, for inputs with exactly
        # three channels. Append a fourth channel of zeros to avoid this kernel.
        outputs = len(weight)
        x, weight = F.pad(x_bchw, (0, 0, 0, 0, 0, 1)), F.pad(weight, (0, 0, 0, 0, 0, 0, 0, outputs // 3))
        bias = None if bias is None else F.pad(bias, (0, outputs // 3))
        out = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, 4)
        return F.pad(out, (0, 0, 0, 0, 0, -(outputs // 3)))  # Slicing would lose the gradient's channels-last format.


class Linear(Lane):
    def forward(self, x_bf: Tensor) -> Tensor:
        if len(self.weight) == 1:
            # Use `squeeze`, because autograd copies the gradient of an index like weight[0] into a tensor of zeros.
            return F.linear(x_bf, self.weight.squeeze(0), None if self.bias is None else self.bias.squeeze(0))
        return kernels.batched_linear(x_bf, self.weight, self.bias)


class BatchNorm2d(Lane):
    running_mean: Tensor | None = None
    running_var: Tensor | None = None

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        self.momentum, self.eps = norm.momentum or 0.0, norm.eps

    def forward(self, x_bchw: Tensor) -> Tensor:
        # Flattening a contiguous tensor returns a view, so batch norm updates the running statistics in place.
        vectors = [self.running_mean, self.running_var, self.weight, self.bias]
        mean, var, weight, bias = (None if v is None else v.flatten() for v in vectors)
        by_batch = self.training or mean is None
        channels = x_bchw.shape[1]
        more = 0 if len(self.weight) == 1 else -channels % VECTOR
        if not more:
            return F.batch_norm(x_bchw, mean, var, weight, bias, by_batch, self.momentum, self.eps)
        # The kernel rounds differently if the channels do not fill the last vector register, so append zero channels.
        x = F.pad(x_bchw, (0, 0, 0, 0, 0, more))
        wide = [None if v is None else F.pad(v, (0, more)) for v in (mean, var, weight, bias)]
        out = F.batch_norm(x, wide[0], wide[1], wide[2], wide[3], by_batch, self.momentum, self.eps)
        for kept, updated in ((mean, wide[0]), (var, wide[1])):
            if kept is not None and updated is not None:
                kept.copy_(updated[:channels])
        return F.pad(out, (0, 0, 0, 0, 0, -more))  # Slicing would lose the gradient's channels-last format.


class MeanOfPixels(nn.Module):
    def forward(self, x_bchw: Tensor) -> Tensor:
        return mean_of_pixels(x_bchw)


def mean_of_pixels(x_bchw: Tensor) -> Tensor:
    """Return the mean over the pixels of each channel: (B, C, H, W) -> (B, C, 1, 1). Average pooling adds the pixels of
    every channel in the same order. A plain sum over two axes uses different orders for different channels."""
    return F.avg_pool2d(x_bchw, (x_bchw.shape[2], x_bchw.shape[3]))


class Dropout(nn.Module):
    """Dropout with one generator per lane, so the mask of a lane does not depend on the other lanes."""

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


def _replacement(layer: nn.Module) -> nn.Module | None:
    """Return the layer that replaces `layer` in lanes; None if no replacement exists. A layer without a replacement can
    run in lanes only if it has no weights. The optional method `in_lanes` of a layer returns the layer's replacement,
    which has separate weights for each lane."""
    if (in_lanes := getattr(layer, "in_lanes", None)) is not None:
        return in_lanes()  # type: ignore[no-any-return]
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
    """Return True if every layer with weights can run in lanes and the network does not set `runs_alone`. Layers
    without weights are not checked here, because `strategy.choose` compares a training step with and without lanes."""
    return not getattr(module, "runs_alone", False) and all(
        _replacement(layer) is not None
        for layer in module.modules()
        if any(True for _ in chain(layer.parameters(recurse=False), layer.buffers(recurse=False)))
    )


Forward = Callable[[Tensor], "Tensor | tuple[Tensor, ...]"]


class LaneNetwork:
    """A network whose layers are replaced for lanes. The module has no weights until `bind` assigns weights (n, ...).
    If a module cannot run in lanes, its layers are not replaced, and n must be 1."""

    def __init__(self, module: nn.Module) -> None:
        self._side_by_side = can_run(module)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        """Shapes of the weights of one lane, by weight name."""
        self.module = _replace(module, self._side_by_side)
        layers = dict(self.module.named_modules())
        self._dropouts = [layer for layer in layers.values() if isinstance(layer, Dropout)]
        self._holders = {name: (layers[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in self.shapes}
        kinds = Conv2d | Linear | _ConvNd | nn.Linear
        self.weighted = {name: layer for name, layer in layers.items() if isinstance(layer, kinds)}
        """Convolutions and linear layers, by name."""

    def bind(self, params: Params, generators: Callable[[], list[torch.Generator]]) -> None:
        """Use the tensors `params` as the network's weights, without a copy. `generators` returns one dropout generator
        per lane, and is called only for networks with dropout."""
        n = len(next(iter(params.values()), ()))
        if not self._side_by_side and n > 1:
            name = type(self.module).__name__
            raise ModelError.at(f"run.strategy must be single, because {name} cannot train several clients at once")
        shapes = {name: tuple(tensor.shape[1:]) for name, tensor in params.items()}
        if shapes != self.shapes:
            wrong = ", ".join(dict.fromkeys(sorted(name for name, _ in shapes.items() ^ self.shapes.items())))
            raise ModelError(
                f"the weights must have the names and shapes of the sub-model's parameters, but differ in {wrong}"
            )
        for name, tensor in params.items():
            layer, leaf = self._holders[name]
            layer._parameters.pop(leaf, None)
            layer._buffers.pop(leaf, None)
            setattr(layer, leaf, tensor if self._side_by_side else tensor.squeeze(0))
        drawn = generators() if self._dropouts else []
        for dropout in self._dropouts:
            dropout.generators = drawn

    def release(self) -> None:
        """Drop the references to the bound tensors."""
        for layer, leaf in self._holders.values():
            setattr(layer, leaf, None)

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        out: Tensor | tuple[Tensor, ...] = self.module(x)
        return out


def set_evaluation(network: LaneNetwork) -> None:
    """Set the network to evaluation mode. Batch norm stays in training mode and uses the statistics of the batch."""
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
    """Return the layout of stacked weights (n, ...). A slice of this layout selects the same channels in all lanes."""
    lane = Axis(None)
    slots = {name: Slot(slot.block, (lane, *slot.axes)) for name, slot in layout.slots.items()}
    return ParamLayout(layout.groups, slots)


def stack(lanes: Sequence[Params], device: torch.device | None = None) -> Params:
    """Copy the weights of all lanes into one tensor (n, ...) per name. Convolution weights are stored channels last."""
    out = {}
    for name, first in lanes[0].items():
        if all(params[name] is first for params in lanes):
            tensor = first.detach().to(device).repeat(len(lanes), *[1] * first.dim())
        else:
            tensor = torch.stack([params[name].detach() for params in lanes]).to(device)
        out[name] = channels_last(tensor) if tensor.dim() == 5 else tensor
    return out


def channels_last(tensor: Tensor) -> Tensor:
    """Return the tensor (..., C, H, W) in a memory layout in which the channels are innermost."""
    return tensor.movedim(-3, -1).contiguous().movedim(-1, -3)


def unstack(params: Params) -> list[Params]:
    """Split weights (n, ...) into a dict of contiguous tensors per lane. `unstack` is the inverse of `stack`."""
    rows = {name: tensor.detach().contiguous().unbind(0) for name, tensor in params.items()}
    return [{name: row[i] for name, row in rows.items()} for i in range(len(next(iter(rows.values()))))]


def beside(value_n: Tensor, tensor: Tensor) -> Tensor:
    """Reshape `value_n`, one value per lane, so that it broadcasts over a tensor (n, ...)."""
    return value_n.view(-1, *[1] * (tensor.dim() - 1))
