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

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE
from fl_engine.models.maps_resnet18 import Trunk
from fl_engine.models.network import ImageNetwork


@dataclass(frozen=True)
class EpicResNet18(ImageNetwork):
    stem: int = 128
    """Channels of the stem, before `width`."""

    axes: ClassVar[tuple[str, ...]] = ("channels", "frames", "mel bands")
    published_input: ClassVar[tuple[int, ...]] = (1, 400, 128)
    published_outputs: ClassVar[int] = 44
    min_hw: ClassVar[int] = 33
    """In smaller samples the last map is a single pixel, so the variance of one sample is not defined."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("stem")

    def groups(self) -> dict[str, int]:
        return self._trunk().groups()

    def slots(self) -> dict[str, Slot]:
        return self._trunk().slots(FREE)

    def skippable(self) -> list[str]:
        return self._trunk().skippable()

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        return self._trunk().layers(layout, spec, self.input_shape[0])

    def exit_points(self) -> tuple[str, ...]:
        return self._trunk().exit_points()

    def prunable(self) -> tuple[Prunable, ...]:
        return self._trunk().prunable()

    def _trunk(self) -> Trunk:
        return Trunk(self.norm, self.width, self.stem)
