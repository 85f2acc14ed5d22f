"""What surrounds a user's forward: constants on the samples' device, random numbers from the client's seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fl_engine.models.traced.graph import unused

_one_at_a_time = threading.Lock()
"""torch has one generator for all threads."""

BITS = 62


class Around(nn.Module):
    """Mixed into the class of a network. Clients train one at a time (`lanes.RunsAlone`)."""

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
        drawing = _seeded(self, x.device) if self.draws and self.training else nullcontext()
        with drawing, _Reshaped() if self.views else nullcontext():
            return super().forward(x)

    def _move(self, device: torch.device) -> None:
        if self.__dict__.get("_at", torch.device("cpu")) == device:
            return
        for layer in self.modules():
            for name in layer._non_persistent_buffers_set:
                buffer = layer._buffers.get(name)
                if buffer is not None and buffer.device.type != "meta":
                    layer._buffers[name] = buffer.to(device)
        self._at = device


class Counted(Around):
    """Counts its multiply-adds itself, from the matrix products and convolutions that it calls: for networks with
    weights that no layer of torch holds."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        from torch.utils.flop_counter import FlopCounterMode

        before = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # whose one kernel is not counted
        try:
            with FlopCounterMode(display=False) as counter:
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


@contextmanager
def _seeded(module: Around, device: torch.device) -> Iterator[None]:
    drawn = module.get_submodule(module.die_at)(torch.ones(1, BITS, device=device)).flatten().tolist()
    seed = sum(1 << place for place, number in enumerate(drawn) if number > 0)
    with _one_at_a_time, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class _Reshaped(TorchFunctionMode):
    """`view` as `reshape`: what a convolution gives lies channels last in memory, where `view` fails."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))
