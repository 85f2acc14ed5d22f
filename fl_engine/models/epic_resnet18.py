"""The ResNet18 of FedAIoT for EPIC-SOUNDS (Alam, Federated Learning Benchmarks and Frameworks for Artificial
Intelligence of Things, Michigan State University 2023, section 2.3.3.7): it recognises actions in a kitchen from
log-mel spectrograms of their sound.

`maps_resnet18` with batch norm, the stride in the first 3x3 convolution of a block, and no bias in any convolution. At
1x400x128 and 44 classes it has 11,241,260 parameters with the authors' code's 128 channels in the stem, and 11,192,812
with the text's 64 (`stem: 64`).

Departs from the authors' code: initial weights are the defaults of torch's layers; there they follow He (normal, fan
out).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, HEAD, ParamLayout, Prunable, SubmodelSpec
from fl_engine.models.exits import Convs, assemble, check_exits, slots_with_exits
from fl_engine.models.layers import FREE, LARGEST, Norm, check_options, check_spec
from fl_engine.models.maps_resnet18 import Trunk


@dataclass(frozen=True)
class EpicResNet18:
    input_shape: tuple[int, int, int]
    """(C, H, W): channels, frames and mel bands."""
    outputs: int
    stem: int = 128
    """Channels of the stem, before `width`."""
    width: float = 1.0
    """Multiplies the channels of the stem and of every stage."""
    norm: Norm = "batch"
    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""
    exit_convs: Convs = ()
    """Pairs [block, n]: the head of the exit behind the block has n 3x3 convolutions; others have 0."""

    published_input: ClassVar[tuple[int, ...]] = (1, 400, 128)
    published_outputs: ClassVar[int] = 44
    min_hw: ClassVar[int] = 33
    """Up to 32x32 the last map is a single pixel, so a batch of one sample has no variance there."""

    def __post_init__(self) -> None:
        check_options(self, self.width, self.norm)
        if not isinstance(self.stem, int) or not 1 <= self.stem <= LARGEST:
            raise ModelError(f"EpicResNet18: stem is an integer from 1 to {LARGEST}, got {self.stem!r}")
        check_exits("EpicResNet18", self.exits, self.exit_points(), self.exit_convs)

    def layout(self) -> ParamLayout:
        trunk = self._trunk()
        slots = slots_with_exits(trunk.slots(FREE), self.exits, self.exit_convs, self.norm)
        return ParamLayout(trunk.groups() | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, C, H, W) -> logits (B, kept classes); with exits, a tuple of these, one per output kept."""
        layout, trunk = self.layout(), self._trunk()
        check_spec(layout, spec, skippable=trunk.skippable(), exits=self.exits)
        return assemble(trunk.layers(layout, spec, self.input_shape[0]), layout, spec, self.exits)

    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""
        return self._trunk().exit_points()

    def prunable(self) -> tuple[Prunable, ...]:
        return self._trunk().prunable()

    def _trunk(self) -> Trunk:
        return Trunk(self.norm, self.width, self.stem)
