"""A 1-D convolutional network that recognises activities from a window of motion sensors.

FedX uses the HAR-Wild model (section IV-C; Jiang et al., FLSys, TMC 2022), of which the text gives only this: three 1-D
convolutions with batch norm, five fully connected layers, and 316, 153 or 76 thousand parameters for 128, 64 or 32
channels. This network is our closest fit: three convolutions of kernel 3 with 128, 64 and 32 channels, each with batch
norm and ReLU; the last map, flattened; hidden layers of 64, 32, 16 and 16 units with ReLU; the classifier.

`nested` has three networks: large is the whole one, medium and small keep the first half and the first quarter of each
convolution's channels, and all hidden units. At UCI-HAR's 128 steps of 9 sensors (Anguita et al., 2012, on which FedX
pre-trains) and its 6 classes they have 300,486 / 144,086 / 71,646 parameters with running statistics; at WISDM's 200x6
and 12 classes 446,892 / 217,340 / 108,324.

Why these layers: if only the convolutions are narrowed, the total is a quadratic polynomial in their channels c. For
the printed totals its leading coefficient is from 0.98 to 1.95. Three convolutions of kernel 3 with c channels each
would have 6; with c, c/2 and c/4 channels they have 1.875. The constant then is from 1,300 to 4,300; here it is 3,046.

The convolutions are two-dimensional with kernel 3x1, so that clients train side by side.

Groups: conv1 .. conv3, fc1 .. fc4, classes. Blocks: conv1 .. conv3, fc1 .. fc4, classifier. An early exit may sit
behind each block except the classifier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, Norm, batch_norm, conv_bn_slots, linear_slots, scaled
from fl_engine.models.network import NormedNetwork

CHANNELS = {"conv1": 128, "conv2": 64, "conv3": 32}
UNITS = {"fc1": 64, "fc2": 32, "fc3": 16, "fc4": 16}
KERNEL = 3
PARTS = {"small": 4, "medium": 2, "large": 1}
"""Each sub-network keeps one channel in n."""


class AsMap(nn.Module):
    """Windows (B, T, F) -> maps (B, F, T, 1); for n lanes (B, n*T, F) -> (B, n*F, T, 1)."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x_btf: Tensor) -> Tensor:
        x_bntf = x_btf.reshape(x_btf.shape[0], -1, self.steps, x_btf.shape[2])
        return x_bntf.transpose(2, 3).flatten(1, 2).unsqueeze(-1)


def _conv(c_in: int, c_out: int, norm: Norm) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, (KERNEL, 1), padding=(KERNEL // 2, 0))
    return nn.Sequential(OrderedDict(conv=conv, bn=batch_norm(c_out, norm), relu=nn.ReLU()))


@dataclass(frozen=True)
class HarCNN(NormedNetwork):
    input_shape: tuple[int, int]
    norm: Norm = "static"
    """batch: the statistics of the current batch; static: stored ones."""

    axes: ClassVar[tuple[str, ...]] = ("steps", "features")
    published_input: ClassVar[tuple[int, ...]] = (128, 9)
    published_outputs: ClassVar[int] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input_shape[0] < 2:
            raise ModelError("HarCNN takes windows of at least 2 steps, because a single step has no variance")

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in (CHANNELS | UNITS).items()}

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in CHANNELS:
            slots |= conv_bn_slots(name, name, inside, Axis(name), self.norm)
            inside = Axis(name)
        inside = Axis("conv3", repeat=self.input_shape[0])
        for name in UNITS:
            slots |= linear_slots(f"{name}.linear", name, inside, Axis(name))
            inside = Axis(name)
        return slots | linear_slots("classifier", "classifier", inside, Axis(HEAD))

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        steps, size = self.input_shape
        layers: OrderedDict[str, nn.Module] = OrderedDict(map=AsMap(steps))
        for name in CHANNELS:
            channels = layout.width(spec, name)
            layers[name] = _conv(size, channels, self.norm)
            size = channels
        layers["flatten"] = nn.Flatten()
        size *= steps
        for name in UNITS:
            units = layout.width(spec, name)
            layers[name] = nn.Sequential(OrderedDict(linear=nn.Linear(size, units), relu=nn.ReLU()))
            size = units
        layers["classifier"] = nn.Linear(size, layout.width(spec, HEAD))
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return (*CHANNELS, *UNITS)

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """The three sub-networks by name, in ascending order."""
        groups = self.layout().groups
        return {
            name: SubmodelSpec.of({conv: max(1, groups[conv] // part) for conv in CHANNELS if part > 1})
            for name, part in PARTS.items()
        }

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in CHANNELS | UNITS)
