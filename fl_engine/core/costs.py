"""What a sub-model and its training cost: parameters, multiply-adds and steps."""

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
    """Return the number of parameters, including running statistics."""
    return sum(math.prod(s) for s in shapes(layout_of(family), spec, full_shapes(family)).values())


def count_macs(family: ModelFamily, spec: SubmodelSpec = FULL, linear: int = 1) -> int:
    """Return multiply-adds per sample as the papers' tables count them (the thop convention).

    Convolutions and linear layers count without bias; a number of a batch or group norm counts 4; ReLU, pooling,
    dropout and embeddings count 0. Recurrent layers count each weight matrix once a step, transposed convolutions their
    kernel once for each input. `linear` is the count of a linear layer's multiply-add; FedRolex's Table 3.6 counts 2.
    Runs a sample through a network with unset weights, because torch's meta device would import torch's compiler.
    Raises ModelError for another layer with weights, and for a network that fails on one sample.
    """
    total = 0

    def count(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor) -> None:
        nonlocal total
        x = next(iter((*given, *named.values())))
        own = layer.macs(x, output) if isinstance(layer, CountsMacs) else _macs(layer, x, output)
        total += own * linear if isinstance(layer, nn.Linear) else own

    sizes = shapes(layout_of(family), spec, full_shapes(family))
    module = runnable(family, spec, {name: torch.empty(shape) for name, shape in sizes.items()}).eval()
    for layer, name in {layer: name for name, layer in _costly(module)}.items():
        if not isinstance(layer, CountsMacs | COUNTED):
            raise ModelError(
                f"{type(family).__name__}: the multiply-adds of {name or 'the network'}, a {type(layer).__name__}, are "
                "not known. Make it of torch's layers, or give it a method macs(given, output)"
            )
        layer.register_forward_hook(count, with_kwargs=True)
    try:
        with torch.inference_mode(), memory_errors():
            module(made_up(family, 1))
    except (FlexfleetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of somebody else's code
        raise ModelError(
            f"{type(family).__name__} must take a batch of one sample, with which its multiply-adds are counted "
            f"({type(error).__name__}: {first_line(error)})"
        ) from error
    return total


class Bare(nn.Module):
    """A module whose own parameters count 0, and that runs other layers. Any other module's own parameters must be
    those of a layer that can be counted."""


COUNTED = (
    Bare
    | _ConvNd
    | nn.Linear
    | _NormBase
    | nn.GroupNorm
    | nn.LayerNorm
    | nn.RNNBase
    | nn.RNNCellBase
    | nn.Embedding
    | nn.PReLU
)


def _costly(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers to count, and those that hold weights themselves, by name. A layer that counts itself stands for
    its inner layers."""
    itself = isinstance(module, CountsMacs)
    if itself or isinstance(module, COUNTED) or any(True for _ in module.parameters(recurse=False)):
        yield name, module
    for child, layer in () if itself else module.named_children():
        yield from _costly(layer, f"{name}.{child}" if name else child)


def _macs(layer: nn.Module, given: Tensor, output: Tensor) -> int:
    """Return the multiply-adds of one layer."""
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
"""The cost of a training step over that of a forward pass; a backward pass costs about two."""


@runtime_checkable
class Epochs(Protocol):
    """The parts of a task, or of a configuration, that decide the number of steps."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...


def batches(task: Epochs, samples: int) -> tuple[int, ...]:
    """Return the sizes of the batches of one epoch, which has as many draws as there are samples (`core.samplers`)."""
    batch = min(task.batch_size, samples)
    rest = 0 if task.drop_last else samples % batch
    return (batch,) * (samples // batch) + ((rest,) if rest else ())


def steps(task: Epochs, samples: int) -> int:
    return task.epochs * len(batches(task, samples))


def draws(task: Epochs, samples: int) -> int:
    """Return how many samples all steps train on, with repeats."""
    return task.epochs * sum(batches(task, samples)) if samples else 0


def macs(family: ModelFamily, task: LocalTask, samples: int) -> float:
    """Return the multiply-adds of the whole training."""
    return draws(task, samples) * macs_per_sample(family, task)


def macs_per_sample(family: ModelFamily, task: LocalTask) -> float:
    """Return the multiply-adds of one sample's training step, plus a forward pass for each teacher."""
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
    """Return `count_macs`, cached by widths, since it does not matter which channels are kept. Raises ModelError for a
    sub-model that the network does not have."""
    layout = family.layout()
    layout.check(spec)
    return _macs_of_widths(family, tuple((g, layout.width(spec, g)) for g in layout.groups), spec.blocks)


@lru_cache(maxsize=1024)
def _macs_of_widths(family: ModelFamily, widths: tuple[tuple[str, int], ...], blocks: tuple[str, ...] | None) -> int:
    return count_macs(family, SubmodelSpec.of(dict(widths), blocks))
