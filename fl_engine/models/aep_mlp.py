"""The MLP of FedAIoT for AEP (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things,
Michigan State University 2023, section 2.3.3.6): it predicts how much energy the appliances of a house use.

Five hidden layers of 210, 420, 840, 420 and 210 units, each with ReLU and dropout 0.3, then the output layer. With 18
features and one output it has 888,091 parameters.

Departs from the authors' code, which has dropout 0.5; the text says 0.3.

Groups: fc1 .. fc5, classes. Blocks: fc1 .. fc5, head. An early exit may sit behind each hidden layer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots, scaled
from fl_engine.models.network import ExitNetwork

UNITS = {"fc1": 210, "fc2": 420, "fc3": 840, "fc4": 420, "fc5": 210}
DROPOUT = 0.3


@dataclass(frozen=True)
class AepMLP(ExitNetwork):
    input_shape: tuple[int]

    axes: ClassVar[tuple[str, ...]] = ("features",)
    published_input: ClassVar[tuple[int, ...]] = (18,)
    published_outputs: ClassVar[int] = 1

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in UNITS.items()}

    def slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in UNITS:
            slots |= linear_slots(f"{name}.linear", name, inside, Axis(name))
            inside = Axis(name)
        return slots | linear_slots("head", "head", inside, Axis(HEAD))

    def layers(self, layout: ParamLayout, spec: SubmodelSpec) -> OrderedDict[str, nn.Module]:
        sizes = [self.input_shape[0], *(layout.width(spec, group) for group in UNITS)]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for name, (before, hidden) in zip(UNITS, pairwise(sizes), strict=True):
            parts = OrderedDict(linear=nn.Linear(before, hidden), relu=nn.ReLU(), dropout=nn.Dropout(DROPOUT))
            layers[name] = nn.Sequential(parts)
        layers["head"] = nn.Linear(sizes[-1], layout.width(spec, HEAD))
        return layers

    def exit_points(self) -> tuple[str, ...]:
        return tuple(UNITS)

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in UNITS)
