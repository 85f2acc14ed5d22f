"""The BiLSTM of FedAIoT for CASAS (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of
Things, Michigan State University 2023, section 2.3.3.5), after Liciotti et al., Neurocomputing 2019: it recognises what
people do in a home from the events of its sensors.

Embeddings of 64 numbers, where token 0 (padding) has zeros; an LSTM of 64 hidden units in each direction; the
classifier takes the last output of both directions. With a vocabulary of 2,000 and 12 classes it has 196,108
parameters.

Departs from the authors' code: there the classifier takes both directions' outputs at the last event, where the
backward direction has read only that event. Here, as in Liciotti et al., each direction has read all events.

Groups: embedding, lstm (a channel is a unit of each direction), classes. Blocks: embedding, lstm, classifier. Without
ReLU there is no APoZ, so FlexFL uses `pool.UNMEASURED` for both layers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots, scaled
from fl_engine.models.network import Network
from fl_engine.models.recurrent import BothEnds, lstm_slots

UNITS = {"embedding": 64, "lstm": 64}
PADDING = 0


@dataclass(frozen=True)
class CasasBiLSTM(Network):
    input_shape: tuple[int]
    vocabulary: int = 2000
    """Tokens are 0 .. vocabulary - 1; 0 is padding."""

    axes: ClassVar[tuple[str, ...]] = ("tokens",)
    published_input: ClassVar[tuple[int, ...]] = (2000,)
    published_outputs: ClassVar[int] = 12

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("vocabulary")

    def groups(self) -> dict[str, int]:
        return {name: scaled(n, self.width) for name, n in UNITS.items()}

    def slots(self) -> dict[str, Slot]:
        slots = {"embedding.weight": Slot("embedding", (FREE, Axis("embedding")))}
        slots |= lstm_slots("lstm.cells", "lstm", Axis("embedding"), "lstm", both_ways=True)
        return slots | linear_slots("classifier", "classifier", Axis("lstm", copies=2), Axis(HEAD))

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        numbers, units, classes = (layout.width(spec, group) for group in layout.groups)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=nn.Embedding(self.vocabulary, numbers, padding_idx=PADDING),
            lstm=BothEnds(numbers, units),
            classifier=nn.Linear(2 * units, classes),
        )
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        return Prunable("embedding", ("embedding.",), ()), Prunable("lstm", ("lstm.",), ())
