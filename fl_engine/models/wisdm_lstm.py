"""The LSTM of FedAIoT for WISDM (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
Things, Michigan State University 2023, section 2.3.3.1): it recognises activities from what a phone or a watch measures
over 200 steps.

An LSTM with 6 hidden units; its outputs at all steps, flattened; a hidden layer of 128 units with ReLU; the
classifier; dropout 0.2 before each of the two linear layers. At 200x6 and 12 classes: 155,612 parameters.

Groups: lstm, fc1, classes. Blocks: lstm, fc1, classifier. An LSTM has no ReLU, so no APoZ: FlexFL uses
`pool.UNMEASURED`. Each of the six units stands for about a sixth of all parameters, so the sizes of FlexFL's models
miss their targets by up to 8 percentage points.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots, scaled
from fl_engine.models.network import Network
from fl_engine.models.recurrent import Steps, lstm_slots

UNITS = {"lstm": 6, "fc1": 128}
DROPOUT = 0.2


@dataclass(frozen=True)
class WisdmLSTM(Network):
    input_shape: tuple[int, int]

    axes: ClassVar[tuple[str, ...]] = ("steps", "features")
    published_input: ClassVar[tuple[int, ...]] = (200, 6)
    published_outputs: ClassVar[int] = 12

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in UNITS.items()}

    def slots(self) -> dict[str, Slot]:
        slots = lstm_slots("lstm.cells", "lstm", FREE, "lstm")
        slots |= linear_slots("fc1.linear", "fc1", Axis("lstm", copies=self.input_shape[0]), Axis("fc1"))
        return slots | linear_slots("classifier", "classifier", Axis("fc1"), Axis(HEAD))

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        steps, features = self.input_shape
        units, hidden, classes = (layout.width(spec, group) for group in layout.groups)
        fc1 = OrderedDict(linear=nn.Linear(steps * units, hidden), relu=nn.ReLU())
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            lstm=Steps(features, units),
            flatten=nn.Flatten(),
            dropout1=nn.Dropout(DROPOUT),
            fc1=nn.Sequential(fc1),
            dropout2=nn.Dropout(DROPOUT),
            classifier=nn.Linear(hidden, classes),
        )
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        return Prunable("lstm", ("lstm.",), ()), Prunable("fc1", ("fc1.",), ("fc1.relu",))
