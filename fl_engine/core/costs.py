"""Compute the cost of a sub-model (parameters, multiply-adds) and the cost of training (steps, multiply-adds)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fl_engine.core.contracts import CountsMacs, ModelFamily
from fl_engine.core.errors import FlexfleetError, ModelError, first_line, memory_errors
from fl_engine.core.slicing import full_shapes, layout_of, made_up, runnable, shapes
from fl_engine.core.types import FULL, LocalTask, SubmodelSpec


def count_params(family: ModelFamily, spec: SubmodelSpec = FULL) -> int:
    """Return the number of parameters, including the running statistics of batch norm."""
    return sum(math.prod(s) for s in shapes(layout_of(family), spec, full_shapes(family)).values())


def count_macs(family: ModelFamily, spec: SubmodelSpec = FULL, linear: int = 1) -> int:
    """Return the number of multiply-adds per sample, counted as in the papers' tables (the convention of thop).

    The bias of convolutions and linear layers is not counted. Each output of a normalisation layer counts as 4
    multiply-adds. ReLU, pooling, dropout and embeddings count as 0. Recurrent layers count each weight matrix once per
    time step. Transposed convolutions count the kernel once per input element. The count of linear layers is multiplied
    by `linear`, which is 2 in FedRolex's Table 3.6. Raises ModelError if any other layer has weights, or if the forward
    pass of one sample fails.
    """
    total = 0

    def count(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        nonlocal total
        x = next(iter((*given, *named.values())))
        own = layer.macs(x, output) if isinstance(layer, CountsMacs) else _macs(layer, x, output)
        total += own * linear if isinstance(layer, nn.Linear) else own

    sizes = shapes(layout_of(family), spec, full_shapes(family))
    # Allocate the tensors on the CPU, because using torch's meta device would import torch's compiler.
    module = runnable(family, spec, {name: torch.empty(shape) for name, shape in sizes.items()}).eval()
    for layer, name in {layer: name for name, layer in _costly(module)}.items():
        if not isinstance(layer, CountsMacs | COUNTED):
            raise ModelError(
                f"{type(family).__name__}: cannot count multiply-adds of {name or 'the network'} "
                f"({type(layer).__name__}). Build the layer from torch's layers, or define a method macs(input, output)"
            )
        layer.register_forward_hook(count, with_kwargs=True)
    try:
        with torch.inference_mode(), memory_errors():
            module(made_up(family, 1))
    except (FlexfleetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # user code may raise any exception
        raise ModelError(
            f"{type(family).__name__} must accept a batch of one sample ({type(error).__name__}: {first_line(error)})"
        ) from error
    return total


class Bare(nn.Module):
    """Base class of modules that only call other layers. The module's own parameters count as 0 multiply-adds. In all
    other modules, every parameter must belong to a layer whose multiply-adds can be counted."""


COUNTED = Bare | _ConvNd | nn.Linear | _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RNNBase | nn.RNNCellBase
COUNTED |= nn.Embedding | nn.PReLU


def _costly(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of each layer that costs multiply-adds or has weights. Layers inside a `CountsMacs`
    module are skipped, because the module counts them."""
    itself = isinstance(module, CountsMacs)
    if itself or isinstance(module, COUNTED) or any(True for _ in module.parameters(recurse=False)):
        yield name, module
    for child, layer in () if itself else module.named_children():
        yield from _costly(layer, f"{name}.{child}" if name else child)


def _macs(layer: nn.Module, given: Tensor, output: Tensor) -> int:
    match layer:
        case _ConvTransposeNd():
            return given.numel() * (layer.out_channels // layer.groups * math.prod(layer.kernel_size))
        case _ConvNd():
            return output.numel() * (layer.in_channels // layer.groups * math.prod(layer.kernel_size))
        case nn.Linear():
            return output.numel() * layer.in_features
        case _NormBase() | nn.GroupNorm() | nn.LayerNorm():
            return 4 * output.numel()
        case nn.RNNBase() | nn.RNNCellBase():
            steps = given.numel() // given.shape[-1]
            return steps * sum(weight.numel() for weight in layer.parameters() if weight.dim() == 2)
    return 0


FORWARDS_PER_STEP = 3
"""Cost of a training step in units of a forward pass. A backward pass costs about as much as two forward passes."""


@runtime_checkable
class Epochs(Protocol):
    """Protocol of a task or configuration with the parameters that determine the number of training steps."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...


def batches(task: Epochs, samples: int) -> tuple[int, ...]:
    """Return the batch sizes of one epoch. An epoch consists of `samples` draws (`core.steps`)."""
    batch = min(task.batch_size, samples)
    rest = 0 if task.drop_last else samples % batch
    return (batch,) * (samples // batch) + ((rest,) if rest else ())


def steps(task: Epochs, samples: int) -> int:
    return task.epochs * len(batches(task, samples))


def draws(task: Epochs, samples: int) -> int:
    """Return the total number of samples in all training steps, counting repeated samples."""
    return task.epochs * sum(batches(task, samples)) if samples else 0


def macs(family: ModelFamily, task: LocalTask, samples: int) -> float:
    """Return the number of multiply-adds of all training steps."""
    return draws(task, samples) * macs_per_sample(family, task)


def macs_per_sample(family: ModelFamily, task: LocalTask) -> float:
    """Return the number of multiply-adds of a training step per sample, including a forward pass of each teacher."""
    trained = [macs_of(family, spec) for spec in task.widths or (task.spec,)]
    teachers = task.distillation.teachers if task.distillation else ()
    step = sum(trained) / len(trained)
    if task.sandwich is not None and len(trained) > 1:
        between = trained[1:-1]
        drawn = min(task.sandwich.random, len(between))
        step = trained[0] + trained[-1] + drawn * sum(between) / max(1, len(between))
    return FORWARDS_PER_STEP * step + sum(macs_of(family, spec) for spec in teachers)


@lru_cache(maxsize=1024)
def macs_of(family: ModelFamily, spec: SubmodelSpec = FULL) -> int:
    """Return the cached `count_macs` of the sub-model. The cache key contains widths instead of channels, because only
    the number of channels matters. Raises ModelError if the network does not have the sub-model."""
    layout = family.layout()
    layout.check(spec)
    return _macs_of_widths(family, tuple((g, layout.width(spec, g)) for g in layout.groups), spec.blocks)


@lru_cache(maxsize=1024)
def _macs_of_widths(family: ModelFamily, widths: tuple[tuple[str, int], ...], blocks: tuple[str, ...] | None) -> int:
    return count_macs(family, SubmodelSpec.of(dict(widths), blocks))
