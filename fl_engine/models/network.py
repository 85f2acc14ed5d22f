"""Base classes of the built-in networks: the options that they share, their checks and their assembly.

A network lists its channel groups, the slots of its parameters and its layers. Layout, module and early exits follow.
Any other frozen dataclass with `layout`, `module` and `prunable` is a network, too (`contracts.ModelFamily`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, HEAD, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.exits import Convs, assemble, check_exits, check_spec, slots_with_exits
from fl_engine.models.layers import Norm

WIDEST, LARGEST = 1000, 2**16
"""Upper bounds of the width and of all sizes. A larger network does not fit into memory or into torch's integers."""


@dataclass(frozen=True)
class Network(ABC):
    input_shape: tuple[int, ...]
    outputs: int
    width: float = 1.0
    """Multiplies the number of channels and hidden units of every layer."""

    axes: ClassVar[tuple[str, ...]] = ("channels", "rows", "columns")
    """What the axes of a sample are."""

    def __post_init__(self) -> None:
        if not are_sizes(self.input_shape, len(self.axes)):
            raise ModelError(
                f"{type(self).__name__}: input_shape must be {len(self.axes)} integers from 1 to {LARGEST} "
                f"({', '.join(self.axes)}), got {self.input_shape!r}"
            )
        self.check_size("outputs")
        if not 0 < self.width <= WIDEST:
            raise ModelError(
                f"{type(self).__name__}: width must be greater than 0 and at most {WIDEST}, got {self.width!r}"
            )

    def check_size(self, option: str, least: int = 1) -> None:
        value = getattr(self, option)
        if not isinstance(value, int) or not least <= value <= LARGEST:
            raise ModelError(
                f"{type(self).__name__}: {option} must be an integer from {least} to {LARGEST}, got {value!r}"
            )

    @abstractmethod
    def groups(self) -> dict[str, int]:
        """The number of channels of each group except the outputs'."""

    @abstractmethod
    def slots(self) -> dict[str, Slot]:
        """The slots of the full network without early exits, in state order."""

    @abstractmethod
    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        """A sub-model: samples (B, *input_shape) -> outputs (B, kept outputs, ...)."""

    @abstractmethod
    def prunable(self) -> tuple[Prunable, ...]: ...

    def skippable(self) -> Collection[str]:
        """The blocks that a sub-model may leave out."""
        return ()

    def layout(self) -> ParamLayout:
        return ParamLayout(self.groups() | {HEAD: self.outputs}, self.slots())

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec, self.skippable())
        return self.build(layout, spec)


@dataclass(frozen=True)
class ExitNetwork(Network):
    """A network that can have early exits."""

    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exits(type(self).__name__, self.exits, self.exit_points(), self._heads()[0])

    @abstractmethod
    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        """The layers of a sub-model in the order in which they run."""

    @abstractmethod
    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""

    def layout(self) -> ParamLayout:
        slots = slots_with_exits(self.slots(), self.exits, *self._heads())
        return ParamLayout(self.groups() | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec, self.skippable(), self.exits)
        return self.build(layout, spec)

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        """With exits, the sub-model returns a tuple with one entry for each output that it keeps."""
        return assemble(self.layers(layout, spec), layout, spec, self.exits)

    def _heads(self) -> tuple[Convs, Norm]:
        return (), "batch"


@dataclass(frozen=True)
class NormedNetwork(ExitNetwork):
    """A network with batch norm, whose exits may have convolutions."""

    norm: Norm = "batch"
    """batch: the statistics of the current batch; static: stored ones."""
    exit_convs: Convs = ()
    """Pairs [block, n]: the head of the exit behind the block has n 3x3 convolutions; others have 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_norm(self, self.norm)

    def _heads(self) -> tuple[Convs, Norm]:
        return self.exit_convs, self.norm


@dataclass(frozen=True)
class ImageNetwork(NormedNetwork):
    input_shape: tuple[int, int, int]

    min_hw: ClassVar[int]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_image(self, self.input_shape, self.min_hw)


def check_norm(network: Network, norm: str) -> None:
    if norm not in get_args(Norm):
        raise ModelError(f"{type(network).__name__}: norm must be batch or static, got {norm!r}")


def check_image(network: Network, input_shape: tuple[int, int, int], least: int) -> None:
    _, height, width = input_shape
    if min(height, width) < least:
        raise ModelError(
            f"{type(network).__name__} takes images of at least {least}x{least} pixels, got {height}x{width}. Enlarge "
            "or pad the images, or choose a network for smaller ones (small_cnn takes 8x8)"
        )


def are_sizes(value: object, count: int) -> bool:
    """Whether this is a tuple of `count` sizes (a list would make the network unhashable)."""
    if not isinstance(value, tuple) or len(value) != count:
        return False
    return all(isinstance(n, int) and 1 <= n <= LARGEST for n in value)
