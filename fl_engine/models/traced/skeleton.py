"""A network without storage, to copy and narrow: its parameters and running statistics are only shapes.

What a client does not train stays in it: frozen parameters, integers, and buffers that training does not change. They
are neither sent nor averaged; copies share them. A batch norm's counter is removed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_engine.core.costs import Bare
from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import ParamLayout, SubmodelSpec
from fl_engine.models.traced.graph import Traced, attribute
from fl_engine.models.traced.layout import Sizes


def of_graph(traced: Traced) -> nn.Module:
    """The layers and parameters that the graph uses, in the module's own tree and order."""
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
    """The parent module of a path, created if it is missing."""
    at = root
    for name in path.split(".")[:-1]:
        if name not in at._modules:
            at.add_module(name, Bare())
        at = at.get_submodule(name)
    return at


def emptied(name: str, module: nn.Module, changing: Iterable[str]) -> list[Tensor]:
    """Remove the storage of everything that is trained or averaged, in place, and return the other tensors. `changing`:
    the buffers that training changes. Raises ModelError for a buffer that can be neither averaged nor constant."""
    kept: list[Tensor] = []
    for path, layer in module.named_modules():
        if isinstance(layer, _NormBase) and layer._buffers.get("num_batches_tracked") is not None:
            if layer.running_mean is not None and layer.momentum is None:
                raise ModelError(
                    f"{name}: {path} has momentum=None, a mean by a counter that clients cannot average: set a "
                    "momentum, such as 0.1"
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
                raise ModelError(f"{name}: {full} is {said}, but must be float32: run.precision sets another one")
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
                raise ModelError(
                    f"{name}: training changes the buffer {full}, which clients would not send: make it float and "
                    "let its name end with running_mean or running_var, so that it is averaged"
                )
            layer._non_persistent_buffers_set.add(leaf)
            kept.append(buffer)
    return kept


class _NoCounter:
    """A norm without a counter, which can be neither cut nor averaged."""

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)  # type: ignore[arg-type]


@cache
def _without_counter(kind: Any) -> Any:
    return type(kind.__name__, (_NoCounter, kind), {"__module__": kind.__module__})


def narrowed(
    skeleton: nn.Module,
    layout: ParamLayout,
    sizes: Mapping[str, tuple[Sizes, ...]],
    spec: SubmodelSpec,
    kept: Iterable[Tensor],
) -> nn.Module:
    """A copy of the skeleton with the widths of the sub-model. The copy shares the tensors `kept`."""
    module = copy.deepcopy(skeleton, {id(tensor): tensor for tensor in kept})
    if not spec.keep:
        return module

    def width(group: str) -> int:
        return layout.width(spec, group)

    for path, attributes in sizes.items():
        for attribute_, axis, full, each in attributes:
            setattr(module.get_submodule(path), attribute_, axis.length(full, width) // each)
    for name, slot in layout.slots.items():
        holder, _, leaf = name.rpartition(".")
        layer = module.get_submodule(holder)
        old: Tensor = getattr(layer, leaf)
        shape = [axis.length(size, width) for axis, size in zip(slot.axes, old.shape, strict=True)]
        empty = torch.empty(shape, device="meta")
        setattr(layer, leaf, nn.Parameter(empty) if isinstance(old, nn.Parameter) else empty)
    return module


def forward_of(graph: fx.Graph) -> Any:
    """The graph as a function of (module, batch)."""
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(code.src, names)  # torch.fx's own way to run a graph
    return names["forward"]
