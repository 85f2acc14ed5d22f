"""Networks that only the benchmarks use, in plain PyTorch for the peers and as model families for flexfleet. For all
other networks, the contestants use flexfleet's modules.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.workloads import Workload
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.types import FULL, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models import VGG16, ResNet18
from fl_engine.models.chains import AepMLP
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.models.recurrent import WisdmLSTM

HIDDEN = 64


def mlp(features: int) -> nn.Sequential:
    """Build an MLP that maps features (B, features) to one logit (B, 1)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))


def mcmahan_cnn(channels: int, side: int, classes: int) -> nn.Sequential:
    """Build the CNN of McMahan et al. (AISTATS 2017, Sec. 3).

    The CNN has two 5x5 convolutions (32 and 64 channels), each followed by a 2x2 max pool, and 512 hidden units.
    """
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ as model families
def family_of(name: str, w: Workload) -> ModelFamily:
    """Return the model family of a workload."""
    if name == "W1":
        return McMahanCNN(w.shape, w.classes)
    if name == "W3":
        return BinaryMLP(w.shape)
    if name == "W6":
        return WisdmLSTM(w.shape, w.classes)
    if name == "W7":
        return AepMLP(w.shape, 1)
    return VGG16(w.shape, w.classes, width=0.5) if name.startswith("W4") else ResNet18(w.shape, w.classes)


@dataclass(frozen=True)
class BinaryMLP:
    """Model family of `mlp` for two classes. The logits are 0 and the output of `mlp`, so that cross entropy equals the
    logistic loss."""

    input_shape: tuple[int, int, int]
    outputs: int = 2

    min_hw: ClassVar[int] = 1

    def layout(self) -> ParamLayout:
        slots = linear_slots("hidden", "hidden", FREE, Axis("hidden"))
        return ParamLayout({"hidden": HIDDEN}, slots | linear_slots("out", "out", Axis("hidden"), FREE))

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        c, h, w = self.input_shape
        width = self.layout().width(spec, "hidden")
        hidden, out = nn.Linear(c * h * w, width), nn.Linear(width, 1)
        return nn.Sequential(OrderedDict(flatten=nn.Flatten(), hidden=hidden, relu=nn.ReLU(), out=out, pair=_Pair()))

    def prunable(self) -> tuple[Prunable, ...]:
        return (Prunable("hidden", ("hidden.",), ("relu",)),)


class _Pair(nn.Module):
    """Inserts a zero before each element, which changes the shape from (B, n) to (B, n * 2)."""

    def forward(self, x_bn: Tensor) -> Tensor:
        return torch.stack([torch.zeros_like(x_bn), x_bn], dim=2).flatten(1)


@dataclass(frozen=True)
class McMahanCNN:
    """Model family of `mcmahan_cnn`. Each max pool precedes the ReLU. This order does not change the result, but the
    ReLU processes only a quarter of the values.
    """

    input_shape: tuple[int, int, int]
    outputs: int

    min_hw: ClassVar[int] = 4

    def layout(self) -> ParamLayout:
        inside, conv1, conv2, hidden = FREE, Axis("conv1"), Axis("conv2"), Axis("hidden")
        slots = {"conv1.weight": Slot("conv1", (conv1, inside, FREE, FREE)), "conv1.bias": Slot("conv1", (conv1,))}
        slots |= {"conv2.weight": Slot("conv2", (conv2, conv1, FREE, FREE)), "conv2.bias": Slot("conv2", (conv2,))}
        slots |= linear_slots("fc", "fc", Axis("conv2", self._last_map()), hidden)
        slots |= linear_slots("out", "out", hidden, Axis("classes"))
        return ParamLayout({"conv1": 32, "conv2": 64, "hidden": 512, "classes": self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        c1, c2, hidden, classes = (layout.width(spec, group) for group in layout.groups)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(self.input_shape[0], c1, 5, padding=2), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(c1, c2, 5, padding=2), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            flatten=nn.Flatten(), fc=nn.Linear(c2 * self._last_map(), hidden), relu3=nn.ReLU(),
            out=nn.Linear(hidden, classes),
        )  # fmt: skip
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        names = (("conv1", "relu1"), ("conv2", "relu2"), ("hidden", "relu3"))
        return tuple(Prunable(group, (f"{'fc' if group == 'hidden' else group}.",), (relu,)) for group, relu in names)

    def _last_map(self) -> int:
        return (self.input_shape[1] // 4) * (self.input_shape[2] // 4)
