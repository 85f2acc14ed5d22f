"""The LSTM of LEAF for Shakespeare (Caldas et al., 2018, arXiv:1812.01097; models/shakespeare/stacked_lstm.py), which
is that of McMahan et al., AISTATS 2017: it predicts the next character.

Embeddings of 8 numbers, two LSTMs of 256 units, one on the other, and the classifier, without dropout. As in Adaptive
Federated Optimization (Reddi et al., ICLR 2021) it answers behind every token; LEAF's answers behind the last one
(`answers="last"`). With the 90 tokens and 80 positions of that paper: 822,570 parameters, and 65,413,120 multiply-adds.
The paper's has 820,522: its gates have one bias, torch's have two.

A unit is a row of each of the four gates. A unit whose weights are all zero is zero at every step, so a slice computes
the same as the whole network with the rest zeroed.

Groups: embedding, lstm1 .. (units), classes. Blocks: embedding, lstm1 .., classifier. Without ReLU there is no APoZ, so
FlexFL uses `pool.UNMEASURED` for all layers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots, scaled
from fl_engine.models.recurrent import Steps, lstm_slots
from fl_engine.models.text import TextNetwork, answering


@dataclass(frozen=True)
class TextLSTM(TextNetwork):
    layers: int = 2
    """LSTMs, one on the other."""
    embedding: int = 8
    hidden: int = 256
    """Units of each LSTM."""

    sizes: ClassVar[tuple[str, ...]] = ("layers", "embedding", "hidden")
    published_input: ClassVar[tuple[int, ...]] = (80,)
    published_outputs: ClassVar[int] = 90

    @property
    def _layers(self) -> list[str]:
        return [f"lstm{number}" for number in range(1, self.layers + 1)]

    def groups(self) -> dict[str, int]:
        units = dict.fromkeys(self._layers, scaled(self.hidden, self.width))
        return {"embedding": scaled(self.embedding, self.width), **units}

    def slots(self) -> dict[str, Slot]:
        inside = Axis("embedding")
        slots = {"embedding.weight": Slot("embedding", (FREE, inside))}
        for name in self._layers:
            slots |= lstm_slots(f"{name}.cells", name, inside, name)
            inside = Axis(name)
        return slots | linear_slots("classifier", "classifier", inside, Axis(HEAD))

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        """Tokens (B, T) -> logits (B, kept outputs, T), or (B, kept outputs) behind the last one."""
        inside = layout.width(spec, "embedding")
        layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(self.vocabulary, inside))
        for name in self._layers:
            units = layout.width(spec, name)
            layers[name] = Steps(inside, units)
            inside = units
        classifier: OrderedDict[str, nn.Module] = OrderedDict(classifier=nn.Linear(inside, layout.width(spec, HEAD)))
        return answering(self.answers, layers, classifier)

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), ()) for name in ("embedding", *self._layers))
