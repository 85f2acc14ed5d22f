"""VGG16 with batch norm (Simonyan and Zisserman, ICLR 2015, configuration D), as in FlexFL and AdaptiveFL.

Thirteen 3x3 convolutions with bias and batch norm, five 2x2 max pools, two hidden layers with dropout 0.5,
the classifier. At 3x32x32 and 10 / 100 / 200 classes: 33,646,666 / 34,015,396 / 34,425,096 parameters.

The pools follow convolutions 2, 4, 7, 10 and 13, as in the original and in AdaptiveFL's Table 1: 333.2 M multiply-adds
at 3x32x32. In FlexFL's code they follow 3, 5, 8, 11 and 13: 532.1 M, and other logits of the same parameters
(`pool_after`).

Departs from the authors' code, which for images that are not RGB shrinks the hidden layers to 256 units and leaves the
last pool out; here the network is the same for all images, and `fc` sets the hidden layers' units.

Groups: conv1 .. conv13, fc1, fc2, classes. Blocks: conv1 .. conv13, fc1, fc2, classifier. An early exit may sit
behind each block but the classifier.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, conv_bn, conv_bn_slots, linear_slots, scaled
from fl_engine.models.network import ImageNetwork, are_sizes

CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


@dataclass(frozen=True)
class VGG16(ImageNetwork):
    fc: tuple[int, int] = (4096, 4096)
    """Units of the two hidden layers, before `width`."""
    pool_after: tuple[int, ...] = (2, 4, 7, 10, 13)
    """The convolutions (1 to 13) that the five max pools follow; FlexFL's code: [3, 5, 8, 11, 13]."""

    min_hw: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        if not are_sizes(self.fc, 2):
            raise ModelError(f"VGG16: fc must be two positive integers, got {self.fc!r}")
        after = self.pool_after
        if not are_sizes(after, 5) or list(after) != sorted(set(after)) or after[-1] > len(CHANNELS):
            raise ModelError(
                f"VGG16: pool_after must be five ascending integers from 1 to {len(CHANNELS)}, got {after!r}"
            )

    def groups(self) -> dict[str, int]:
        groups = {f"conv{i}": scaled(n, self.width) for i, n in enumerate(CHANNELS, 1)}
        return groups | {f"fc{i}": scaled(n, self.width) for i, n in enumerate(self.fc, 1)}

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        inside = FREE
        for i in range(1, len(CHANNELS) + 1):
            out = Axis(f"conv{i}")
            slots |= conv_bn_slots(f"conv{i}", f"conv{i}", inside, out, self.norm)
            inside = out
        slots |= linear_slots("fc1.linear", "fc1", Axis("conv13", self._last_map()), Axis("fc1"))
        slots |= linear_slots("fc2.linear", "fc2", Axis("fc1"), Axis("fc2"))
        return slots | linear_slots("classifier", "classifier", Axis("fc2"), Axis(HEAD))

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        c_in = self.input_shape[0]
        for i in range(1, len(CHANNELS) + 1):
            c_out = layout.width(spec, f"conv{i}")
            layers[f"conv{i}"] = conv_bn(c_in, c_out, 3, self.norm, relu=nn.ReLU())
            if i in self.pool_after:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            c_in = c_out
        layers["flatten"] = nn.Flatten()
        c_in *= self._last_map()
        for name in ("fc1", "fc2"):
            hidden = layout.width(spec, name)
            parts = OrderedDict(linear=nn.Linear(c_in, hidden), relu=nn.ReLU(), dropout=nn.Dropout(0.5))
            layers[name] = nn.Sequential(parts)
            c_in = hidden
        layers["classifier"] = nn.Linear(c_in, layout.width(spec, HEAD))
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return (*(f"conv{i}" for i in range(1, len(CHANNELS) + 1)), "fc1", "fc2")

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in self.exit_points())

    def _last_map(self) -> int:
        """Pixels of the last map, which is flattened."""
        _, h, w = self.input_shape
        return (h // 32) * (w // 32)
