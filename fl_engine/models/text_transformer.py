"""The Transformer of FedRolex for Stack Overflow (Alam, Federated Learning Benchmarks and Frameworks for Artificial
Intelligence of Things, Michigan State University 2023, section 3.3): it predicts the next word at every position.

Three layers with causal attention; embeddings of 128 numbers; 8 heads with queries, keys and values of 12 numbers;
2,048 hidden units with ReLU; dropout 0.1. What the text leaves out is as in the code that it follows (A Field Guide to
Federated Optimization, 2021; google-research/federated, transformer_models.py): embeddings are projected to the heads'
8 x 12 = 96 numbers, which the layers add to and normalise behind each sum (Vaswani et al., 2017), and back to 128
before the logits. With 10,004 tokens and 20 positions: 3,897,364 parameters, 52,183,040 multiply-adds.

Departs from that code: positions are learnt parameters instead of sines, so that a slice has those of its channels;
logits have weights of their own instead of the embeddings', because the outputs are a group of their own. Departs from
the paper: it cuts the sizes of the heads' queries, keys and values; here whole heads are cut, so that a slice computes
the same as the whole network with the rest zeroed.

Rule for layer norm: its statistics are those of the channels that a sub-model keeps, as with a group norm.

Groups: embedding, stream (what layers add to), and in each layer heads and hidden (units). Blocks: embedding, stream,
layer1 .., output, classifier. FlexFL counts the zeros of the hidden units' ReLU, and takes `pool.UNMEASURED` for
embedding, stream and heads.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.types import HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots, scaled
from fl_engine.models.text import TextNetwork, answering

EPSILON = 1e-6
"""The epsilon of layer norm, as in the code that the paper follows."""
LATER = -1e4
"""The score of a later position. Its softmax is exactly 0; -infinity cannot be stored in a quantised tensor."""


@dataclass(frozen=True)
class TextTransformer(TextNetwork):
    layers: int = 3
    heads: int = 8
    head_size: int = 12
    """The size of a head's query, key and value. All sub-models have the same."""
    embedding: int = 128
    hidden: int = 2048
    dropout: float = 0.1

    sizes: ClassVar[tuple[str, ...]] = ("layers", "heads", "head_size", "embedding", "hidden")
    published_input: ClassVar[tuple[int, ...]] = (20,)
    published_outputs: ClassVar[int] = 10_004

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.dropout < 1:
            raise ModelError(f"TextTransformer: dropout must be from 0 to less than 1, got {self.dropout!r}")

    @property
    def _layers(self) -> list[str]:
        return [f"layer{number}" for number in range(1, self.layers + 1)]

    def groups(self) -> dict[str, int]:
        heads, hidden = scaled(self.heads, self.width), scaled(self.hidden, self.width)
        groups = {"embedding": scaled(self.embedding, self.width), "stream": heads * self.head_size}
        for name in self._layers:
            groups |= {f"{name}.heads": heads, f"{name}.hidden": hidden}
        return groups

    def slots(self) -> dict[str, Slot]:
        embedding, stream = Axis("embedding"), Axis("stream")
        slots = {
            "embedding.tokens.weight": Slot("embedding", (FREE, embedding)),
            "embedding.positions.weight": Slot("embedding", (FREE, embedding)),
        }
        slots |= linear_slots("stream", "stream", embedding, stream)
        for name in self._layers:
            of_heads, hidden = f"{name}.heads", Axis(f"{name}.hidden")
            thrice = Axis(of_heads, repeat=self.head_size, copies=3)
            slots |= linear_slots(f"{name}.attention.qkv", name, stream, thrice)
            slots |= linear_slots(f"{name}.attention.out", name, Axis(of_heads, repeat=self.head_size), stream)
            slots |= _norm_slots(f"{name}.norm1", name, stream)
            slots |= linear_slots(f"{name}.hidden.linear", name, stream, hidden)
            slots |= linear_slots(f"{name}.shrink", name, hidden, stream)
            slots |= _norm_slots(f"{name}.norm2", name, stream)
        slots |= linear_slots("output", "output", stream, embedding)
        return slots | linear_slots("classifier", "classifier", embedding, Axis(HEAD))

    def build(self, layout: ParamLayout, spec: SubmodelSpec) -> nn.Module:
        """Tokens (B, T) -> logits (B, kept outputs, T), or (B, kept outputs) behind the last one."""
        sizes = {group: layout.width(spec, group) for group in layout.groups}
        embedding, stream = sizes["embedding"], sizes["stream"]
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=Embedding(self.vocabulary, self.input_shape[0], embedding),
            stream=nn.Linear(embedding, stream),
            dropout=nn.Dropout(self.dropout),
        )
        for name in self._layers:
            heads, hidden = sizes[f"{name}.heads"], sizes[f"{name}.hidden"]
            layers[name] = Layer(stream, heads, self.head_size, hidden, self.dropout)
        output: OrderedDict[str, nn.Module] = OrderedDict(
            output=nn.Linear(stream, embedding), classifier=nn.Linear(embedding, sizes[HEAD])
        )
        return answering(self.answers, layers, output)

    def prunable(self) -> tuple[Prunable, ...]:
        found = [Prunable("embedding", ("embedding.",), ()), Prunable("stream", ("stream.",), ())]
        for name in self._layers:
            found.append(Prunable(f"{name}.heads", (f"{name}.attention.",), ()))
            units = (f"{name}.hidden.", f"{name}.shrink.")
            found.append(Prunable(f"{name}.hidden", units, (f"{name}.hidden.relu",)))
        return tuple(found)


def _norm_slots(name: str, block: str, channels: Axis) -> dict[str, Slot]:
    return {f"{name}.weight": Slot(block, (channels,)), f"{name}.bias": Slot(block, (channels,))}


class Embedding(nn.Module):
    """Tokens (B, T) -> the sum of the token's and its position's embedding, (B, T, numbers)."""

    def __init__(self, vocabulary: int, length: int, numbers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, numbers)
        self.positions = nn.Embedding(length, numbers)

    def forward(self, x_bt: Tensor) -> Tensor:
        found: Tensor = self.tokens(x_bt) + self.positions.weight
        return found


class Attention(nn.Module):
    """Causal attention of several heads, (B, T, stream) -> (B, T, stream): each position attends to itself and to those
    before it. Written out, so that its gradients are the same in every run on a GPU."""

    def __init__(self, stream: int, heads: int, size: int) -> None:
        super().__init__()
        self.heads, self.size = heads, size
        self.qkv = nn.Linear(stream, 3 * heads * size)
        self.out = nn.Linear(heads * size, stream)

    def forward(self, x_bts: Tensor) -> Tensor:
        batch, steps, _ = x_bts.shape
        q, k, v = self.qkv(x_bts).view(batch, steps, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        later = torch.ones(steps, steps, dtype=torch.bool, device=x_bts.device).triu(1)
        scores_bhtt = (q @ k.transpose(2, 3) / math.sqrt(self.size)).masked_fill(later, LATER)
        out: Tensor = self.out((scores_bhtt.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def macs(self, given: Tensor, output: Tensor) -> int:
        """The linear layers, and the products of queries with keys and of scores with values over all pairs of
        positions, also those that the mask leaves out."""
        positions = given.numel() // given.shape[-1]
        pairs = positions * given.shape[1]
        return positions * (self.qkv.weight.numel() + self.out.weight.numel()) + 2 * pairs * self.heads * self.size


class Layer(nn.Module):
    """(B, T, stream) -> the same shape: attention, then the hidden units, each added to its input and normalised."""

    def __init__(self, stream: int, heads: int, size: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(stream, heads, size)
        self.norm1 = nn.LayerNorm(stream, EPSILON)
        self.hidden = nn.Sequential(OrderedDict(linear=nn.Linear(stream, hidden), relu=nn.ReLU()))
        self.shrink = nn.Linear(hidden, stream)
        self.norm2 = nn.LayerNorm(stream, EPSILON)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x_bts: Tensor) -> Tensor:
        x = self.norm1(x_bts + self.dropout1(self.attention(x_bts)))
        out: Tensor = self.norm2(x + self.dropout2(self.shrink(self.hidden(x))))
        return out
