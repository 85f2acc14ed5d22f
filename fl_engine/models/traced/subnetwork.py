"""Build the skeleton of a traced network. Every sub-network is a copy of the skeleton with different widths.

A skeleton is the user's module without storage. Parameters and running statistics have shapes but no values. The
skeleton contains the constants that clients do not train: frozen parameters, integers, and buffers that training does
not change. Constants are neither sent nor averaged, and all copies share the constants. Batch counters of batch norm
are removed. `wrap` extends the user's forward to move constants to the device of the samples and to draw random numbers
from the client's seed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

from fl_engine.core.costs import Bare
from fl_engine.core.seeds import drawing
from fl_engine.core.slicing import is_statistic
from fl_engine.models.traced.graph import Traced, attribute, unusable, unused


def of_graph(traced: Traced) -> nn.Module:
    """Return a module with only the layers and parameters that the graph uses, in the same order and paths."""
    root, used = Bare(), {str(n.target) for n in traced.graph.nodes if n.op in ("call_module", "get_attr")}
    leaves = {path for path in used if isinstance(attribute(traced.module, path), nn.Module)}
    for path, module in traced.module.named_modules():
        if path in leaves:
            _holder(root, path).add_module(path.rpartition(".")[2], module)
            continue
        own = [n for n in (*module._parameters, *module._buffers) if f"{path}.{n}".lstrip(".") in used]
        own += sorted(p.rpartition(".")[2] for p in used - leaves if p.rpartition(".")[0] == path)
        for name in dict.fromkeys(own):
            value, holder = getattr(module, name), _holder(root, f"{path}.{name}".lstrip("."))
            if isinstance(value, nn.Parameter):
                holder.register_parameter(name, value)
            else:
                holder.register_buffer(name, value, persistent=name not in module._non_persistent_buffers_set)
    return root


def _holder(root: nn.Module, path: str) -> nn.Module:
    """Return the parent module of a path. Missing parent modules are created."""
    at = root
    for name in path.split(".")[:-1]:
        if name not in at._modules:
            at.add_module(name, Bare())
        at = at.get_submodule(name)
    return at


def name_once(module: nn.Module) -> None:
    """Change the module in place so that each tensor has only its first name. A submodule with several names is
    replaced by a copy under each name except the first. Layers read a tied tensor from the first layer that has the
    tensor."""
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    seen = set[nn.Module]()
    for parent in module.modules():  # the iterator also yields the modules inside a copy
        for name, child in parent._modules.items():
            if child in seen:
                parent._modules[name] = child = copy.deepcopy(child, dict(tensors))
            seen |= {child} if child is not None else set()
    first: dict[int, tuple[nn.Module, str]] = {}
    for layer in module.modules():
        for held in (layer._parameters, layer._buffers):
            for leaf, tensor in list(held.items()):
                source = first.setdefault(id(tensor), (layer, leaf))
                if tensor is not None and source != (layer, leaf):
                    del held[leaf]
                    _read(layer, leaf, *source)


def _read(layer: nn.Module, leaf: str, source: nn.Module, name: str) -> None:
    """Replace the attribute `leaf` by a property that returns the attribute `name` of `source`."""
    key, kind = f"_source_of_{leaf}", type(layer)
    layer.__dict__[key] = source  # do not register a submodule, which would repeat the tensor in the state dict
    tied = property(lambda self: getattr(self.__dict__[key], name))
    layer.__class__ = type(kind.__name__, (kind,), {leaf: tied, "__module__": kind.__module__})


def emptied(name: str, module: nn.Module, changing: Iterable[str]) -> list[Tensor]:
    """Remove the storage of all trained or averaged tensors in place, and return the remaining tensors. `changing`
    contains the names of buffers that training changes. Raises ModelError if a buffer can be neither averaged nor kept
    constant."""
    kept: list[Tensor] = []
    for path, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer._buffers.get("num_batches_tracked") is not None:
            if layer.running_mean is not None and layer.momentum is None:
                raise unusable(
                    f"{name}: {path} has momentum=None, which clients cannot average. Set momentum=0.1, for example"
                )
            layer._buffers["num_batches_tracked"] = None
            layer.__class__ = _without_counter(type(layer))  # type: ignore[arg-type]
        for leaf, parameter in list(layer._parameters.items()):
            full = f"{path}.{leaf}".lstrip(".")
            if parameter is None:
                continue
            if not parameter.requires_grad:
                del layer._parameters[leaf]
                layer.register_buffer(leaf, parameter.detach(), persistent=False)
            elif parameter.dtype != torch.float32:
                said = str(parameter.dtype).removeprefix("torch.")
                raise unusable(f"{name}: {full} is {said}, but must be float32. Set run.precision instead")
            else:
                setattr(layer, leaf, nn.Parameter(torch.empty(parameter.shape, device="meta")))
        for leaf, buffer in layer._buffers.items():
            full = f"{path}.{leaf}".lstrip(".")
            if buffer is None:
                continue
            if is_statistic(leaf) and leaf not in layer._non_persistent_buffers_set and buffer.is_floating_point():
                layer._buffers[leaf] = torch.empty(buffer.shape, device="meta")
                continue
            if full in changing:
                raise unusable(
                    f"{name}: training must not change the buffer {full}, which clients do not send. To average the "
                    "buffer, make it float and let its name end with running_mean or running_var"
                )
            layer._non_persistent_buffers_set.add(leaf)
            kept.append(buffer)
    return kept


class _NoCounter:
    """Mixin for a norm without PyTorch's batch counter. The counter can be neither cut nor averaged."""

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)  # type: ignore[arg-type]


@cache
def _without_counter(kind: Any) -> Any:
    return type(kind.__name__, (_NoCounter, kind), {"__module__": kind.__module__})


def forward_of(graph: fx.Graph) -> Any:
    """Compile the graph to a Python function with the parameters (module, batch)."""
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # torch.fx also compiles graphs with `exec`.
    return names["forward"]


BITS = 62


class Wrapped(nn.Module):
    """Mixin for the class of a user's network. Clients train one at a time, because the forward may mix samples."""

    runs_alone = True
    draws: bool
    """True if training draws random numbers from torch's generator, apart from nn.Dropout."""
    seeder: str
    """Name of an added nn.Dropout with the client's seed. In every step, the dropout mask is used as the seed of
    torch's generator."""
    views: bool
    """True if the forward may call `view` on maps, which would fail because maps are in channels-last format."""

    def forward(self, x: Tensor) -> Any:
        self._move(x.device)
        drawn = drawing(self._seed(x.device), x.device) if self.draws and self.training else nullcontext()
        with drawn, _Reshaped() if self.views else nullcontext():
            return super().forward(x)

    def _seed(self, device: torch.device) -> int:
        drawn = self.get_submodule(self.seeder)(torch.ones(1, BITS, device=device)).flatten().tolist()
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


class Counted(Wrapped):
    """Mixin for networks with weights outside of torch's layers. Multiply-adds are counted while the forward runs."""

    def macs(self, given: Tensor, output: Tensor) -> int:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with (
                warnings.catch_warnings(record=True),  # Disabling oneDNN causes a warning.
                torch.backends.mkldnn.flags(enabled=False),  # FlopCounterMode does not count oneDNN's kernels.
                sdpa_kernel(SDPBackend.MATH),
                torch.inference_mode(False),  # In inference mode, FlopCounterMode fails on torch._weight_norm.
                torch.no_grad(),
                FlopCounterMode(display=False) as counter,
            ):
                self.forward(given)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
        return int(counter.get_total_flops()) // 2


def wrap(module: nn.Module, *, draws: bool, views: bool, counts: bool) -> None:
    """Add `Wrapped` or `Counted` to the base classes of the module, in place."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (Counted if counts else Wrapped, kind), {"__module__": kind.__module__})
    name = unused(module, "seeder_dropout")
    module.draws, module.views, module.seeder = draws, views, name  # type: ignore[assignment]
    if draws:
        module.add_module(name, nn.Dropout(0.5))


class _Reshaped(TorchFunctionMode):
    """Mode that runs `reshape` instead of `view`, because `view` fails on the channels-last output of a convolution."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.view and not any(isinstance(each, torch.dtype) for each in args):
            func = Tensor.reshape
        return func(*args, **(kwargs or {}))
