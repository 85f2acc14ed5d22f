"""Base classes of the built-in networks: shared options, checks and assembly.

A subclass defines channel groups and layers. The base class derives the layout, the module and the early exits. Any
frozen dataclass with `layout`, `module` and `prunable` also works as a network (see `contracts.ModelFamily`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, cast, get_args

from torch import nn

from fl_engine.core.errors import ModelError
from fl_engine.core.slicing import blank, without_storage
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.core.widths import exit_name
from fl_engine.models.exits import MOST_CONVS, Convs, WithExits, check_spec, exit_head
from fl_engine.models.layers import LayerMaker, Norm, axes_of, scaled

WIDEST, LARGEST = 1000, 2**16
"""Upper limits of `width` and of all sizes. Larger networks would exceed the memory or torch's integer range."""


@dataclass(frozen=True)
class Network(ABC):
    input_shape: tuple[int, ...]
    outputs: int
    width: float = 1.0
    """Factor for the number of channels or hidden units of every layer."""

    axes: ClassVar[tuple[str, ...]] = ("channels", "rows", "columns")
    """Names of the axes of a sample."""
    channels_of: ClassVar[Mapping[str, int]]
    """Number of channels in each group except the outputs, before multiplication by `width`."""

    def __post_init__(self) -> None:
        sizes = f"{len(self.axes)} integers from 1 to {LARGEST} ({', '.join(self.axes)})"
        self.require("input_shape", are_sizes(self.input_shape, len(self.axes)), sizes)
        self.check_size("outputs")
        self.require("width", 0 < self.width <= WIDEST, f"greater than 0 and at most {WIDEST}")

    def require(self, option: str, holds: bool, expected: str) -> None:
        """Raise a ModelError that names the option unless `holds` is true. `expected` describes the valid values."""
        if not holds:
            path = "model.name" if option in ("input_shape", "outputs") else f"model.{option}"  # not options
            what = f"{type(self).__name__}: {option}"
            raise ModelError(f"{what} must be {expected}, got {getattr(self, option)!r}", path=path)

    def check_size(self, option: str, least: int = 1) -> None:
        value = getattr(self, option)
        fits = isinstance(value, int) and least <= value <= LARGEST
        self.require(option, fits, f"an integer from {least} to {LARGEST}")

    def check_norm(self) -> None:
        self.require("norm", getattr(self, "norm", None) in get_args(Norm), "batch or static")

    def check_image(self, least: int) -> None:
        _, height, width = self.input_shape
        self.require(
            "input_shape",
            min(height, width) >= least,
            f"of at least {least}x{least} pixels (enlarge the images, or choose a network for smaller ones)",
        )

    def groups(self) -> dict[str, int]:
        """Return the number of channels in each group except the outputs."""
        return {group: scaled(count, self.width) for group, count in self.channels_of.items()}

    @abstractmethod
    def build(self, make: LayerMaker) -> nn.Module:
        """Return a sub-model that maps samples (B, *input_shape) to outputs (B, kept outputs, ...)."""

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        """Map each group that can be pruned to the name prefixes of the group's layers."""
        return {group: (f"{group}.",) for group in self.groups()}

    def prunable(self) -> tuple[Prunable, ...]:
        return _prunable(self)

    def skippable(self) -> Collection[str]:
        """Return the blocks that a sub-model may drop."""
        return ()

    def block_of(self, name: str) -> str:
        """Return the block of a parameter, which is the part of the name before the first dot."""
        return name.partition(".")[0]

    def layout(self) -> ParamLayout:
        return _layout(self)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec, self.skippable(), getattr(self, "exits", ()))
        return self.build(LayerMaker(layout, spec))


@lru_cache(maxsize=64)
def _layout(family: Network) -> ParamLayout:
    groups = family.groups() | {HEAD: family.outputs}
    with without_storage():
        axes = axes_of(family.build(LayerMaker(ParamLayout(groups, {}), FULL)))
    return ParamLayout(groups, {name: Slot(family.block_of(name), each) for name, each in axes.items()})


@lru_cache(maxsize=64)
def _prunable(family: Network) -> tuple[Prunable, ...]:
    relus = [name for name, layer in blank(family).named_modules() if isinstance(layer, nn.ReLU | nn.ReLU6)]
    return tuple(
        Prunable(group, layers, tuple(name for name in relus if name.startswith(layers)))
        for group, layers in family.layers_of_groups().items()
    )


@dataclass(frozen=True)
class ExitNetwork(Network):
    """Network that supports early exits."""

    exits: tuple[str, ...] = ()
    """Blocks after which the network has an early exit, in network order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        points = self.exit_points()
        in_order = self.exits == tuple(block for block in points if block in self.exits)
        self.require("exits", in_order, f"a subset of {', '.join(points)} in this order")

    @abstractmethod
    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        """Return the layers of a sub-model in the order in which they run."""

    @abstractmethod
    def exit_points(self) -> tuple[str, ...]:
        """Return the blocks after which an early exit is possible, in network order."""

    def exit_axis(self, block: str) -> Axis:
        """Return the axis of the block's output channels."""
        return Axis(block)

    def build(self, make: LayerMaker) -> nn.Module:
        """Return a sub-model. With early exits, the sub-model returns a tuple with one entry for each kept output."""
        layers = self.layers(make)
        if not self.exits:
            return nn.Sequential(layers)
        convs, norm = dict(getattr(self, "exit_convs", ())), cast(Norm, getattr(self, "norm", "batch"))
        heads = {
            block: exit_head(make, self.exit_axis(block), convs.get(block, 0), norm)
            for block in self.exits
            if make.has_block(exit_name(block))
        }
        return WithExits(layers, heads, self.exit_points(), make)


class Stages(Network):
    """Network with stages of blocks. The outputs of all blocks in a stage share one channel group. If the input of a
    block also belongs to this group, the shortcut is an identity, and sub-models may drop the block."""

    depths: ClassVar[Mapping[str, int]]

    @property
    def stem_group(self) -> str:
        """Name of the channel group of the first block's input."""
        return "stem"

    def axis(self, group: str) -> Axis:
        """Return the axis of a group's channels."""
        return Axis(group)

    @abstractmethod
    def block(self, make: LayerMaker, name: str, inside: str, stage: str) -> nn.Module:
        """Return a block whose input has the channels of the group `inside`."""

    def blocks(self) -> Iterator[tuple[str, str, str]]:
        """Yield the name `<stage>.<b>`, input group and stage of each block in network order; b starts at 0."""
        inside = self.stem_group
        for stage, depth in self.depths.items():
            for b in range(depth):
                yield f"{stage}.{b}", inside, stage
                inside = stage

    def stages(self, make: LayerMaker) -> dict[str, nn.Module]:
        stages: dict[str, nn.Module] = {stage: nn.Sequential() for stage in self.depths}
        for name, inside, stage in self.blocks():
            if make.has_block(name):
                stages[stage].add_module(name.removeprefix(f"{stage}."), self.block(make, name, inside, stage))
        return stages

    def block_of(self, name: str) -> str:
        first, number, *_ = name.split(".")
        return f"{first}.{number}" if first in self.depths else super().block_of(name)

    def skippable(self) -> list[str]:
        return [name for name, inside, stage in self.blocks() if inside == stage]


class StagedNetwork(Stages, ExitNetwork):
    def exit_points(self) -> tuple[str, ...]:
        return tuple(name for name, _, _ in self.blocks())

    def exit_axis(self, block: str) -> Axis:
        return self.axis(block.partition(".")[0])


@dataclass(frozen=True)
class NormedNetwork(ExitNetwork):
    """Network with batch norm. The heads of early exits may have convolutions."""

    norm: Norm = "batch"
    """batch: normalise with the statistics of the current batch; static: with stored statistics."""
    exit_convs: Convs = ()
    """Pairs [block, n]: the early exit after this block has n 3x3 convolutions; the default is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_norm()
        points, convs = self.exit_points(), self.exit_convs
        fits = all(block in points and 0 <= count <= MOST_CONVS for block, count in convs)
        pairs = f"pairs of a distinct block ({', '.join(points)}) and a number from 0 to {MOST_CONVS}"
        self.require("exit_convs", fits and len(dict(convs)) == len(convs), pairs)


@dataclass(frozen=True)
class ImageNetwork(NormedNetwork):
    input_shape: tuple[int, int, int]

    min_hw: ClassVar[int]
    """Minimum height and width of an image. For smaller images, the last map may be one pixel, which has no
    variance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self, "min_hw"):
            raise ModelError(f"{type(self).__name__} must define min_hw, the minimum height and width of an image")
        self.check_image(self.min_hw)


def are_sizes(value: object, count: int) -> bool:
    """Return whether `value` is a tuple of `count` sizes. Lists are not valid, because a network must be hashable."""
    if not isinstance(value, tuple) or len(value) != count:
        return False
    return all(isinstance(n, int) and 1 <= n <= LARGEST for n in value)
