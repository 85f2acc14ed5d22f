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

from fl_engine.core.errors import ModelError
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, LARGEST, check_sizes, check_spec, linear_slots, scaled
from fl_engine.models.recurrent import BothEnds, lstm_slots

UNITS = {"embedding": 64, "lstm": 64}
PADDING = 0


@dataclass(frozen=True)
class CasasBiLSTM:
    input_shape: tuple[int]
    """(T,): tokens of a sample."""
    outputs: int
    vocabulary: int = 2000
    """Tokens are 0 .. vocabulary - 1; 0 is padding."""
    width: float = 1.0
    """Multiplies the size of an embedding and the units of each direction."""

    published_input: ClassVar[tuple[int, ...]] = (2000,)
    published_outputs: ClassVar[int] = 12

    def __post_init__(self) -> None:
        check_sizes(self, "(T,) of a sequence of tokens", 1, self.width)
        if not isinstance(self.vocabulary, int) or not 1 <= self.vocabulary <= LARGEST:
            raise ModelError(f"CasasBiLSTM: vocabulary is an integer from 1 to {LARGEST}, got {self.vocabulary!r}")

    def layout(self) -> ParamLayout:
        groups = {name: scaled(n, self.width) for name, n in UNITS.items()}
        slots = {"embedding.weight": Slot("embedding", (FREE, Axis("embedding")))}
        slots |= lstm_slots("lstm.cells", "lstm", Axis("embedding"), "lstm", both_ways=True)
        slots |= linear_slots("classifier", "classifier", Axis("lstm", copies=2), Axis(HEAD))
        return ParamLayout(groups | {HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        """Tokens (B, T) -> logits (B, kept classes)."""
        layout = self.layout()
        check_spec(layout, spec)
        numbers, units, classes = (layout.width(spec, group) for group in layout.groups)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=nn.Embedding(self.vocabulary, numbers, padding_idx=PADDING),
            lstm=BothEnds(numbers, units),
            classifier=nn.Linear(2 * units, classes),
        )
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        return Prunable("embedding", ("embedding.",), ()), Prunable("lstm", ("lstm.",), ())
