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


class Wrapped(nn.Module):
    """Mixed into the class of a network. Clients train one at a time, because the forward may mix lanes."""

    runs_alone = True
    draws: bool
    """Whether training draws from torch's generator other than by nn.Dropout."""
    die_at: str
    """The name of a child, an nn.Dropout, that draws the seed of such a step from the client's seed."""
    views: bool
    """Whether the forward may call `view` on maps, whose channels are last in memory here."""

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
"""CPU kernels that torch's own counter counts as nothing, with their operations by the shapes of their inputs."""


class Counted(Wrapped):
    """Counts its multiply-adds from the matrix products and convolutions that it calls, because no layer of torch holds
    some of its weights."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # its kernel is not counted
        try:
            counting = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
            # In inference mode the counter sees torch._weight_norm whole, and fails on it.
            with torch.inference_mode(False), torch.no_grad(), counting as counter:
                self.forward(given)
        finally:
            torch.backends.mha.set_fastpath_enabled(before)
        return int(counter.get_total_flops()) // 2


def wrap(module: nn.Module, *, draws: bool, views: bool, counts: bool) -> None:
    """Put `Wrapped` around the module's forward, in place."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Counted if counts else Wrapped, kind), {"__module__": kind.__module__})
    die = unused(module, "die")
    module.draws, module.views, module.die_at = draws, views, die  # type: ignore[assignment]
    if draws:
        module.add_module(die, nn.Dropout(0.5))


class _Reshaped(TorchFunctionMode):
    """`view` as `reshape`, because `view` fails on the channels-last output of a convolution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))
