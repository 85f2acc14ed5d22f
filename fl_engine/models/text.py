"""Networks that predict the next token of a text: an LSTM for characters and a Transformer for words."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis
from fl_engine.models.layers import FREE, LayerMaker, noted, noted_norm, scaled
from fl_engine.models.network import Network
from fl_engine.models.recurrent import Steps

EPSILON = 1e-6
"""Epsilon of layer norm, as in the code of A Field Guide to Federated Optimization (2021)."""
LATER = -1e4
"""Attention score of masked (later) positions; softmax maps it to 0. A quantised tensor could not store -infinity."""

Answers = Literal["every", "last"]


@dataclass(frozen=True)
class TextNetwork(Network):
    input_shape: tuple[int]
    vocabulary: int = 0
    """Number of tokens; 0 means that the number of tokens equals the number of outputs."""
    answers: Answers = "every"
    """every: return logits (B, outputs, T) for all positions, to predict next tokens; last: return logits (B, outputs)
    for the last position, to classify the sequence."""

    axes: ClassVar[tuple[str, ...]] = ("tokens",)
    sizes: ClassVar[tuple[str, ...]]
    """Names of the options that are sizes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_size("vocabulary", 0)
        for option in self.sizes:
            self.check_size(option)
        self.require("answers", self.answers in get_args(Answers), "every or last")
        object.__setattr__(self, "vocabulary", self.vocabulary or self.outputs)


def with_logits(
    answers: Answers, layers: OrderedDict[str, nn.Module], output: OrderedDict[str, nn.Module]
) -> nn.Module:
    """Return a sequence of `layers`, which return (B, T, channels), and `output`, which maps channels to logits."""
    if answers == "last":
        return nn.Sequential(layers | OrderedDict(last=Last()) | output)
    return nn.Sequential(layers | output | OrderedDict(outputs_first=OutputsFirst()))


class Last(nn.Module):
    """Select the last position of a sequence: map (B, T, channels) to (B, channels)."""

    def forward(self, x_btc: Tensor) -> Tensor:
        return x_btc[:, -1]


class OutputsFirst(nn.Module):
    """Transpose (B, T, outputs) to (B, outputs, T)."""

    def forward(self, x_bto: Tensor) -> Tensor:
        return x_bto.transpose(1, 2)


@dataclass(frozen=True)
class TextLSTM(TextNetwork):
    """LEAF's LSTM for Shakespeare (Caldas et al., 2018, arXiv:1812.01097; models/shakespeare/stacked_lstm.py), which
    predicts the next character, as in McMahan et al., AISTATS 2017.

    The network has embeddings of size 8, two stacked LSTMs with 256 units, and the classifier, without dropout. As in
    Adaptive Federated Optimization (Reddi et al., ICLR 2021), the network predicts a character after every token.
    LEAF's network predicts only after the last token (`answers="last"`). With 90 tokens and 80 positions, as in
    Adaptive Federated Optimization, the network has 822,570 parameters and 65,413,120 multiply-adds. The paper states
    820,522 parameters, because the paper's gates have one bias and torch's gates have two.

    Groups: embedding, lstm1, lstm2, ..., classes. Blocks: embedding, lstm1, lstm2, ..., classifier. FlexFL sets the
    APoZ of all layers to `pool.UNMEASURED`, because the layers have no ReLU.
    """

    layers: int = 2
    """Number of stacked LSTMs."""
    embedding: int = 8
    hidden: int = 256
    """Number of units of each LSTM."""

    sizes: ClassVar[tuple[str, ...]] = ("layers", "embedding", "hidden")
    published_input: ClassVar[tuple[int, ...]] = (80,)
    published_outputs: ClassVar[int] = 90

    @property
    def _layers(self) -> list[str]:
        return [f"lstm{number}" for number in range(1, self.layers + 1)]

    def groups(self) -> dict[str, int]:
        units = dict.fromkeys(self._layers, scaled(self.hidden, self.width))
        return {"embedding": scaled(self.embedding, self.width), **units}

    def build(self, make: LayerMaker) -> nn.Module:
        """Build a sub-model that maps tokens (B, T) to logits (B, kept outputs, T), or (B, kept outputs) for `last`."""
        inside = Axis("embedding")
        layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=_embedding(make, self.vocabulary, inside))
        for name in self._layers:
            layers[name] = Steps(make, inside, Axis(name))
            inside = Axis(name)
        classifier: OrderedDict[str, nn.Module] = OrderedDict(classifier=make.linear(inside, Axis(HEAD)))
        return with_logits(self.answers, layers, classifier)


@dataclass(frozen=True)
class TextTransformer(TextNetwork):
    """FedRolex's Transformer for Stack Overflow (Alam, Federated Learning Benchmarks and Frameworks for Artificial
    Intelligence of Things, Michigan State University 2023, section 3.3), which predicts the next word at every
    position.

    The network has embeddings of size 128 and three layers with causal attention and dropout 0.1. A layer has 2,048
    hidden units with ReLU and 8 heads with queries, keys and values of size 12. Details that the thesis does not
    describe follow the code of A Field Guide to Federated Optimization (2021; google-research/federated,
    transformer_models.py). The embeddings are projected to the residual stream, which has 8 x 12 = 96 channels. The
    outputs of attention and of the hidden units are added to the stream, and each sum is normalised (Vaswani et al.,
    2017). Before the classifier, the stream is projected back to 128 channels. With 10,004 tokens and 20 positions, the
    network has 3,897,364 parameters and 52,183,040 multiply-adds.

    Departs from the Field Guide's code: position encodings are learnt parameters instead of sines, so that they can be
    sliced. Classifier and embedding do not share weights, because the outputs are a separate group. Departs from the
    paper, in which sub-models have smaller queries, keys and values. Here sub-models have fewer heads. Attention in a
    sub-model then computes the same outputs as attention in the full network with all other weights set to 0.

    In a sub-model, layer norm computes the statistics only from the kept channels.

    Groups: embedding, stream (the residual stream), layer<l>.heads, layer<l>.hidden, classes. Blocks: embedding,
    stream, layer<l>, output, classifier. FlexFL measures the APoZ of the hidden units, and sets the APoZ of embedding,
    stream and heads to `pool.UNMEASURED`.
    """

    layers: int = 3
    heads: int = 8
    head_size: int = 12
    """Size of a head's query, key and value, which is the same in all sub-models."""
    embedding: int = 128
    hidden: int = 2048
    dropout: float = 0.1

    sizes: ClassVar[tuple[str, ...]] = ("layers", "heads", "head_size", "embedding", "hidden")
    published_input: ClassVar[tuple[int, ...]] = (20,)
    published_outputs: ClassVar[int] = 10_004

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("dropout", 0 <= self.dropout < 1, "at least 0 and less than 1")

    @property
    def _layers(self) -> list[str]:
        return [f"layer{number}" for number in range(1, self.layers + 1)]

    def groups(self) -> dict[str, int]:
        heads, hidden = scaled(self.heads, self.width), scaled(self.hidden, self.width)
        groups = {"embedding": scaled(self.embedding, self.width), "stream": heads * self.head_size}
        for name in self._layers:
            groups |= {f"{name}.heads": heads, f"{name}.hidden": hidden}
        return groups

    def build(self, make: LayerMaker) -> nn.Module:
        """Build a sub-model that maps tokens (B, T) to logits (B, kept outputs, T), or (B, kept outputs) for `last`."""
        embedding, stream = Axis("embedding"), Axis("stream")
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            embedding=Embedding(make, self.vocabulary, self.input_shape[0], embedding),
            stream=make.linear(embedding, stream),
            dropout=nn.Dropout(self.dropout),
        )
        for name in self._layers:
            heads, hidden = Axis(f"{name}.heads", repeat=self.head_size), Axis(f"{name}.hidden")
            layers[name] = TransformerLayer(make, stream, heads, hidden, self.dropout)
        output: OrderedDict[str, nn.Module] = OrderedDict(
            output=make.linear(stream, embedding), classifier=make.linear(embedding, Axis(HEAD))
        )
        return with_logits(self.answers, layers, output)

    def layers_of_groups(self) -> dict[str, tuple[str, ...]]:
        layers = super().layers_of_groups()
        for name in self._layers:
            layers[f"{name}.heads"] = (f"{name}.attention.",)
            layers[f"{name}.hidden"] = (f"{name}.hidden.", f"{name}.shrink.")
        return layers


def _embedding(make: LayerMaker, entries: int, numbers: Axis) -> nn.Embedding:
    return noted(nn.Embedding(entries, make.width(numbers)), weight=(FREE, numbers))


class Embedding(nn.Module):
    """Map tokens (B, T) to the sums of token and position embeddings, (B, T, channels)."""

    def __init__(self, make: LayerMaker, vocabulary: int, length: int, numbers: Axis) -> None:
        super().__init__()
        self.tokens = _embedding(make, vocabulary, numbers)
        self.positions = _embedding(make, length, numbers)

    def forward(self, x_bt: Tensor) -> Tensor:
        found: Tensor = self.tokens(x_bt) + self.positions.weight
        return found


class Attention(nn.Module):
    """Causal multi-head attention that maps (B, T, stream) to (B, T, stream). A position attends to itself and to
    earlier positions. Torch's fused attention is not used, because its gradients on a GPU differ between runs."""

    def __init__(self, make: LayerMaker, stream: Axis, heads: Axis) -> None:
        super().__init__()
        self.size = heads.repeat
        self.heads = make.width(heads) // self.size
        self.qkv = make.linear(stream, replace(heads, copies=3))
        self.out = make.linear(heads, stream)

    def forward(self, x_bts: Tensor) -> Tensor:
        batch, steps, _ = x_bts.shape
        q, k, v = self.qkv(x_bts).view(batch, steps, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        later = torch.ones(steps, steps, dtype=torch.bool, device=x_bts.device).triu(1)
        scores_bhtt = (q @ k.transpose(2, 3) / math.sqrt(self.size)).masked_fill(later, LATER)
        out: Tensor = self.out((scores_bhtt.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out

    def macs(self, given: Tensor, output: Tensor) -> int:
        """Return the multiply-adds of the linear layers and of both attention products, including masked positions."""
        positions = given.numel() // given.shape[-1]
        pairs = positions * given.shape[1]
        return positions * (self.qkv.weight.numel() + self.out.weight.numel()) + 2 * pairs * self.heads * self.size


class TransformerLayer(nn.Module):
    """Attention and a hidden layer for inputs (B, T, stream), each followed by a shortcut and a layer norm."""

    def __init__(self, make: LayerMaker, stream: Axis, heads: Axis, hidden: Axis, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(make, stream, heads)
        self.norm1 = noted_norm(nn.LayerNorm(make.width(stream), EPSILON), stream)
        self.hidden = make.dense(stream, hidden)
        self.shrink = make.linear(hidden, stream)
        self.norm2 = noted_norm(nn.LayerNorm(make.width(stream), EPSILON), stream)
        self.dropout1, self.dropout2 = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x_bts: Tensor) -> Tensor:
        x = self.norm1(x_bts + self.dropout1(self.attention(x_bts)))
        out: Tensor = self.norm2(x + self.dropout2(self.shrink(self.hidden(x))))
        return out
