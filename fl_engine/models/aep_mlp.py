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

from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.exits import assemble, check_exits, slots_with_exits
from fl_engine.models.layers import FREE, check_sizes, check_spec, linear_slots, scaled

UNITS = {"fc1": 210, "fc2": 420, "fc3": 840, "fc4": 420, "fc5": 210}
DROPOUT = 0.3


@dataclass(frozen=True)
class AepMLP:
    input_shape: tuple[int]
    """(F,): features of a sample."""
    outputs: int
    width: float = 1.0
    """Multiplies the units of every hidden layer."""
    exits: tuple[str, ...] = ()
    """Blocks behind which an early exit sits: some of `exit_points`, in that order."""

    published_input: ClassVar[tuple[int, ...]] = (18,)
    published_outputs: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_sizes(self, "(F,) of a vector", 1, self.width)
        check_exits("AepMLP", self.exits, self.exit_points())

    def layout(self) -> ParamLayout:
        groups = {name: scaled(n, self.width) for name, n in UNITS.items()}
        slots: dict[str, Slot] = {}
        inside = FREE
        for name in UNITS:
            slots |= linear_slots(f"{name}.linear", name, inside, Axis(name))
            inside = Axis(name)
        slots |= linear_slots("head", "head", inside, Axis(HEAD))
        return ParamLayout(groups | {HEAD: self.outputs}, slots_with_exits(slots, self.exits))

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, F) -> (B, kept outputs); with exits, a tuple of these, one per output kept."""
        layout = self.layout()
        check_spec(layout, spec, exits=self.exits)
        sizes = [self.input_shape[0], *(layout.width(spec, group) for group in UNITS)]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for name, (before, hidden) in zip(UNITS, pairwise(sizes), strict=True):
            parts = OrderedDict(linear=nn.Linear(before, hidden), relu=nn.ReLU(), dropout=nn.Dropout(DROPOUT))
            layers[name] = nn.Sequential(parts)
        layers["head"] = nn.Linear(sizes[-1], layout.width(spec, HEAD))
        return assemble(layers, layout, spec, self.exits)

    def exit_points(self) -> tuple[str, ...]:
        """The blocks behind which an early exit may sit, in network order."""
        return tuple(UNITS)

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in UNITS)
