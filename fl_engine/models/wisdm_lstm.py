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

from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, SubmodelSpec
from fl_engine.models.layers import FREE, check_sizes, check_spec, linear_slots, scaled
from fl_engine.models.recurrent import Steps, lstm_slots

UNITS = {"lstm": 6, "fc1": 128}
DROPOUT = 0.2


@dataclass(frozen=True)
class WisdmLSTM:
    input_shape: tuple[int, int]
    """(T, F): steps and features."""
    outputs: int
    width: float = 1.0
    """Multiplies the units of the LSTM and of the hidden layer."""

    published_input: ClassVar[tuple[int, ...]] = (200, 6)
    published_outputs: ClassVar[int] = 12

    def __post_init__(self) -> None:
        check_sizes(self, "(T, F) of a series", 2, self.width)

    def layout(self) -> ParamLayout:
        groups = {name: scaled(n, self.width) for name, n in UNITS.items()}
        slots = lstm_slots("lstm.cells", "lstm", FREE, "lstm")
        slots |= linear_slots("fc1.linear", "fc1", Axis("lstm", copies=self.input_shape[0]), Axis("fc1"))
        slots |= linear_slots("classifier", "classifier", Axis("fc1"), Axis(HEAD))
        return ParamLayout(groups | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """(B, T, F) -> logits (B, kept classes)."""
        layout = self.layout()
        check_spec(layout, spec)
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
