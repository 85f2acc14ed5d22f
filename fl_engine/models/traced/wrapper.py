"""What surrounds a user's forward: constants on the samples' device, random numbers from the client's seed."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_engine.core.seeds import drawing
from fl_engine.models.traced.graph import unused

BITS = 62

Shape = tuple[int, ...]


class Around(nn.Module):
    """Mixed into the class of a network. Clients train one at a time: what a forward does between layers is not known
    to leave lanes apart."""

    runs_alone = True
    draws: bool
    """Whether its training draws from torch's own generator, otherwise than by nn.Dropout."""
    die_at: str
    """The name of the child that draws the seed of such a step: an nn.Dropout, which the engine gives the client's
    seed."""
    views: bool
    """Whether it may call `view` on maps, which are channels last in memory here."""

    def forward(self, x: Tensor) -> Any:
        self._move(x.device)
        drawn = drawing(self._seed(x.device), x.device) if self.draws and self.training else nullcontext()
        with drawn, _Reshaped() if self.views else nullcontext():
            return super().forward(x)

    def _seed(self, device: torch.device) -> int:
        drawn = self.get_submodule(self.die_at)(torch.ones(1, BITS, device=device)).flatten().tolist()
        return sum(1 << place for place, number in enumerate(drawn) if number > 0)

    def _move(self, device: torch.device) -> None:
        if self.__dict__.get("_at", torch.device("cpu")) == device:
            return
        for layer in self.modules():
            for name in layer._non_persistent_buffers_set:
                buffer = layer._buffers.get(name)
                if buffer is not None and buffer.device.type != "meta":
                    layer._buffers[name] = buffer.to(device)
        self._at = device


def _lstm_flops(x_tbf: Shape, weight_ih: Shape, weight_hh: Shape, *_: Any, **__: Any) -> int:
    steps = x_tbf[0] * x_tbf[1]
    return 2 * steps * (math.prod(weight_ih) + math.prod(weight_hh))


def _attention_flops(query_bhte: Shape, key_bhse: Shape, value_bhsv: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(query_bhte[:3]) * key_bhse[2] * (query_bhte[3] + value_bhsv[3])


UNCOUNTED: dict[Any, Any] = {
    torch.ops.aten.mkldnn_rnn_layer: _lstm_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
}
"""Kernels of a CPU that torch's own counter takes for nothing, with their operations by the shapes of what they take: a
layer of an LSTM in one direction, and attention."""


class Counted(Around):
    """Counts its multiply-adds itself, from the matrix products and convolutions that it calls: for networks with
    weights that no layer of torch holds."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # whose one kernel is not counted
        try:
            counting = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
            # In inference mode the counter sees torch._weight_norm whole, and fails on it.
            with torch.inference_mode(False), torch.no_grad(), counting as counter:
                self.forward(given)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        return int(counter.get_total_flops()) // 2


def surround(module: nn.Module, *, draws: bool, views: bool, counts: bool = False) -> nn.Module:
    """The same module, in place, with `Around` around its forward."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Counted if counts else Around, kind), {"__module__": kind.__module__})
    die = unused(module, "die")
    module.draws, module.views, module.die_at = draws, views, die  # type: ignore[assignment]
    if draws:
        module.add_module(die, nn.Dropout(0.5))
    return module


class _Reshaped(TorchFunctionMode):
    """`view` as `reshape`: what a convolution gives lies channels last in memory, where `view` fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))
