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
    """Parameters of the sub-model: every entry of its state, running statistics (where kept) included."""
    return sum(math.prod(s) for s in shapes(layout_of(family), spec, full_shapes(family)).values())


def count_macs(family: ModelFamily, spec: SubmodelSpec = FULL, linear: int = 1) -> int:
    """Multiply-adds per sample as the papers' tables count them (the thop convention): convolutions and linear
    layers without bias, 4 for each number of a batch or group norm; ReLU, pooling, dropout and embeddings count 0.
    Recurrent layers count each weight matrix once a step, transposed convolutions their kernel once for each number
    that they take. Raises ModelError for a layer with weights that is none of these, and for a network that fails on
    one sample. `linear`: how much a multiply-add of a linear layer counts; FedRolex's Table 3.6 counts 2, its
    multiplication and its addition.

    Runs a made-up sample through a network whose weights are not set. (On torch's meta device, which computes nothing,
    the first convolution would import torch's compiler and sympy: seconds in every client's pod.)
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
                f"{type(family).__name__}: {name or 'the network'} is a {type(layer).__name__} with weights, whose "
                "multiply-adds are not known: make it of torch's linear, convolution, norm or recurrent layers, or "
                "give it a method macs(given, output)"
            )
        layer.register_forward_hook(count, with_kwargs=True)
    try:
        with torch.inference_mode(), memory_errors():
            module(made_up(family, 1))
    except (FlexfleetError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # of somebody else's code
        raise ModelError(
            f"{type(family).__name__} cannot take a batch of one sample, with which its multiply-adds are counted "
            f"({type(error).__name__}: {first_line(error)}): make its forward one for any number of samples; batch "
            "norm needs running statistics where a channel has one number a sample"
        ) from error
    return total


class Bare(nn.Module):
    """A module that computes with parameters of its own one by one, which counts 0, and runs other layers. Otherwise a
    module's own parameters have to be those of a layer that can be counted."""


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
    """By name, the layers to count and those that hold weights themselves. One that counts itself stands for all that
    it is made of."""
    itself = isinstance(module, CountsMacs)
    if itself or isinstance(module, COUNTED) or any(True for _ in module.parameters(recurse=False)):
        yield name, module
    for child, layer in () if itself else module.named_children():
        yield from _costly(layer, f"{name}.{child}" if name else child)


def _macs(layer: nn.Module, given: Tensor, output: Tensor) -> int:
    """Multiply-adds of a layer of one of these kinds."""
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
"""A training step costs so many times the forward pass: a backward pass costs about two."""


@runtime_checkable
class Epochs(Protocol):
    """Local training, as a task or a configuration describes it."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def drop_last(self) -> bool: ...


def batches(task: Epochs, samples: int) -> tuple[int, ...]:
    """Sizes of the batches of one epoch, which is as many draws as there are samples (`core.samplers`)."""
    batch = min(task.batch_size, samples)
    rest = 0 if task.drop_last else samples % batch
    return (batch,) * (samples // batch) + ((rest,) if rest else ())


def steps(task: Epochs, samples: int) -> int:
    return task.epochs * len(batches(task, samples))


def draws(task: Epochs, samples: int) -> int:
    """How many samples all steps together train on, each counted as often as it is seen."""
    return task.epochs * sum(batches(task, samples)) if samples else 0


def macs(family: ModelFamily, task: LocalTask, samples: int) -> float:
    """Multiply-adds of the whole training. A sample counts once for each time it is seen."""
    return draws(task, samples) * macs_per_sample(family, task)


def macs_per_sample(family: ModelFamily, task: LocalTask) -> float:
    """Multiply-adds of one sample's training step: that of forward and backward pass, and a forward pass for each
    teacher."""
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
    """`count_macs`, remembered by widths: which channels are kept does not matter. Raises ModelError for what the
    network does not have."""
    layout = family.layout()
    layout.check(spec)
    return _macs_of_widths(family, tuple((g, layout.width(spec, g)) for g in layout.groups), spec.blocks)


@lru_cache(maxsize=1024)
def _macs_of_widths(family: ModelFamily, widths: tuple[tuple[str, int], ...], blocks: tuple[str, ...] | None) -> int:
    return count_macs(family, SubmodelSpec.of(dict(widths), blocks))
