"""The smallest data sets and networks of other kinds than the classification of images: a table with a number to
predict, sequences of tokens, sentences whose next words are to be predicted, series of measurements, and images in
which rectangles are to be found."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_engine.core import seeds
from fl_engine.core.boxes import NONE
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.samples import Data
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.data.moments import byte_statistics
from fl_engine.datasets import Source
from fl_engine.models.exits import check_spec
from fl_engine.models.layers import FREE, conv_slots, linear_slots
from fl_engine.models.text_transformer import TextTransformer
from fl_engine.tasks import Classification, Detection, NextToken, Regression
from fl_engine.testing.tiny import CLIENTS, SAMPLES

FEATURES = 6
LENGTH = 5
VOCABULARY = 12


@dataclass(frozen=True)
class TinyMLP:
    """Vectors (B, F) -> two hidden layers -> (B, outputs).

    Groups: fc1, fc2, the outputs. Blocks: fc1, fc2, head.
    """

    input_shape: tuple[int, ...] = (FEATURES,)
    outputs: int = 1
    hidden: int = 16

    def layout(self) -> ParamLayout:
        slots = linear_slots("fc1.linear", "fc1", FREE, Axis("fc1"))
        slots |= linear_slots("fc2.linear", "fc2", Axis("fc1"), Axis("fc2"))
        slots |= linear_slots("head", "head", Axis("fc2"), Axis(HEAD))
        return ParamLayout({"fc1": self.hidden, "fc2": self.hidden, HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec)
        first, second, outputs = (layout.width(spec, group) for group in layout.groups)
        return nn.Sequential(
            OrderedDict(
                fc1=nn.Sequential(OrderedDict(linear=nn.Linear(self.input_shape[0], first), relu=nn.ReLU())),
                fc2=nn.Sequential(OrderedDict(linear=nn.Linear(first, second), relu=nn.ReLU())),
                head=nn.Linear(second, outputs),
            )
        )

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in ("fc1", "fc2"))


class _MeanOfTokens(nn.Embedding):
    """(B, L) -> (B, channels). Has no form for training side by side: such clients train one at a time."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).mean(1)


@dataclass(frozen=True)
class TinyTokens:
    """Tokens (B, L) -> the mean of their embeddings -> a hidden layer -> (B, outputs).

    Groups: embedding, fc, the outputs. Blocks: embedding, fc, head.
    """

    input_shape: tuple[int, ...] = (LENGTH,)
    outputs: int = 3
    vocabulary: int = VOCABULARY
    channels: int = 4
    hidden: int = 32

    def layout(self) -> ParamLayout:
        slots = {"embedding.weight": Slot("embedding", (FREE, Axis("embedding")))}
        slots |= linear_slots("fc.linear", "fc", Axis("embedding"), Axis("fc"))
        slots |= linear_slots("head", "head", Axis("fc"), Axis(HEAD))
        return ParamLayout({"embedding": self.channels, "fc": self.hidden, HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec)
        channels, hidden, outputs = (layout.width(spec, group) for group in layout.groups)
        return nn.Sequential(
            OrderedDict(
                embedding=_MeanOfTokens(self.vocabulary, channels),
                fc=nn.Sequential(OrderedDict(linear=nn.Linear(channels, hidden), relu=nn.ReLU())),
                head=nn.Linear(hidden, outputs),
            )
        )

    def prunable(self) -> tuple[Prunable, ...]:
        return (Prunable("fc", ("fc.",), ("fc.relu",)),)


STEPS, SENSORS = 5, 2


class _GatedUnits(nn.Module):
    """Series (B, T, F) -> what each unit of an LSTM puts out at each step, in [0, 1): (B, T, hidden).

    torch's LSTM has no form for training side by side: such clients train one at a time."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(features, hidden, batch_first=True)
        self.relu = nn.ReLU()

    def forward(self, x_btf: Tensor) -> Tensor:
        out: Tensor = self.relu(self.cells(x_btf)[0])
        return out


@dataclass(frozen=True)
class TinyLSTM:
    """Series (B, T, F) -> an LSTM -> all steps' outputs, flattened -> (B, outputs).

    A hidden unit owns a row of each of the four gates, `copies=4`, and an entry in each step of the flattened window,
    `copies=T`. Groups: lstm, the outputs. Blocks: lstm, head.
    """

    input_shape: tuple[int, int] = (STEPS, SENSORS)
    outputs: int = 3
    hidden: int = 12

    def layout(self) -> ParamLayout:
        unit, gates = Axis("lstm"), Axis("lstm", copies=4)
        slots = {
            "lstm.cells.weight_ih_l0": Slot("lstm", (gates, FREE)),
            "lstm.cells.weight_hh_l0": Slot("lstm", (gates, unit)),
            "lstm.cells.bias_ih_l0": Slot("lstm", (gates,)),
            "lstm.cells.bias_hh_l0": Slot("lstm", (gates,)),
        }
        slots |= linear_slots("head", "head", Axis("lstm", copies=self.input_shape[0]), Axis(HEAD))
        return ParamLayout({"lstm": self.hidden, HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec)
        hidden, outputs = (layout.width(spec, group) for group in layout.groups)
        steps, features = self.input_shape
        return nn.Sequential(
            OrderedDict(
                lstm=_GatedUnits(features, hidden),
                flatten=nn.Flatten(),
                head=nn.Linear(steps * hidden, outputs),
            )
        )

    def prunable(self) -> tuple[Prunable, ...]:
        return (Prunable("lstm", ("lstm.",), ("lstm.relu",)),)


@dataclass(frozen=True)
class TinyDetector:
    """Images (B, C, H, W) -> two convolutions of stride 2 -> an answer at every fourth pixel, (B, outputs, H/4, W/4).

    Groups: conv1, conv2, the outputs. Blocks: conv1, conv2, head.
    """

    input_shape: tuple[int, int, int] = (1, 16, 16)
    outputs: int = 6
    channels: int = 8

    def layout(self) -> ParamLayout:
        slots = conv_slots("conv1.conv", "conv1", FREE, Axis("conv1"))
        slots |= conv_slots("conv2.conv", "conv2", Axis("conv1"), Axis("conv2"))
        slots |= conv_slots("head", "head", Axis("conv2"), Axis(HEAD))
        return ParamLayout({"conv1": self.channels, "conv2": 2 * self.channels, HEAD: self.outputs}, slots)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        layout = self.layout()
        check_spec(layout, spec)
        first, second, outputs = (layout.width(spec, group) for group in layout.groups)

        def halved(c_in: int, c_out: int) -> nn.Module:
            return nn.Sequential(OrderedDict(conv=nn.Conv2d(c_in, c_out, 3, 2, 1), relu=nn.ReLU()))

        return nn.Sequential(
            OrderedDict(
                conv1=halved(self.input_shape[0], first),
                conv2=halved(first, second),
                head=nn.Conv2d(second, outputs, 1),
            )
        )

    def prunable(self) -> tuple[Prunable, ...]:
        return tuple(Prunable(name, (f"{name}.",), (f"{name}.relu",)) for name in ("conv1", "conv2"))


def tiny_table(clients: int = CLIENTS) -> Data:
    """A number that is a smooth function of six features, which are not normalised, and some noise."""
    rng = seeds.rng(0, "tiny table")
    cut = SAMPLES * clients
    x = torch.from_numpy(rng.normal(3.0, 2.0, (cut + 40, FEATURES)).astype(np.float32))
    noise = torch.from_numpy(rng.normal(0, 0.1, len(x)))
    y = x[:, 0] - 0.5 * x[:, 1] + 0.2 * x[:, 2] * x[:, 3] + noise
    y = (y - y[:cut].mean()) / y[:cut].std()
    centre, spread = (tuple(of_all(x[:cut], dim=0).tolist()) for of_all in (torch.mean, torch.std))
    return Data("tiny_table", Regression(), x[:cut], y[:cut], x[cut:], y[cut:], centre, spread)


def tiny_sequences(clients: int = CLIENTS) -> Data:
    """Five tokens, most of which are from the third of the vocabulary that is the sample's class."""
    rng = seeds.rng(0, "tiny sequences")
    classes, cut = 3, SAMPLES * clients
    labels = rng.permutation(np.arange(cut + 40) % classes)
    shape, third = (len(labels), LENGTH), VOCABULARY // classes
    own = rng.integers(0, third, shape) + third * labels[:, None]
    x = torch.from_numpy(np.where(rng.random(shape) < 0.8, own, rng.integers(0, VOCABULARY, shape)))
    y = torch.from_numpy(labels)
    return Data("tiny_sequences", Classification(classes), x[:cut], y[:cut], x[cut:], y[cut:])


def tiny_text(clients: int = CLIENTS) -> Data:
    """Sentences of up to five words: behind each word most often comes the next of the vocabulary. As in texts, tokens
    are 0 for padding, the words, one out of the vocabulary, the begin and the end."""
    rng = seeds.rng(0, "tiny text")
    words, cut = VOCABULARY - 4, SAMPLES * clients
    unknown, begin, end = words + 1, words + 2, words + 3
    tokens = np.zeros((cut + 40, LENGTH + 2), dtype=np.int64)
    for row in tokens:
        count = int(rng.integers(2, LENGTH + 1))
        steps = np.where(rng.random(count) < 0.9, 1, rng.integers(0, words, count))
        said = 1 + (rng.integers(words) + steps.cumsum()) % words
        said[rng.random(count) < 0.05] = unknown
        row[: count + 2] = [begin, *said, end]
    x, y = (torch.from_numpy(np.ascontiguousarray(part)) for part in (tokens[:, :LENGTH], tokens[:, 1 : LENGTH + 1]))
    task = NextToken(VOCABULARY, LENGTH, 0, (unknown, begin, end))
    return Data("tiny_text", task, x[:cut], y[:cut], x[cut:], y[cut:])


def tiny_series(clients: int = CLIENTS) -> Data:
    """Two sensors over five steps: what they measure falls, stays or rises, which is the sample's class, the second by
    twice as much. And some noise."""
    rng = seeds.rng(0, "tiny series")
    classes, cut = 3, SAMPLES * clients
    labels = rng.permutation(np.arange(cut + 40) % classes)
    rise = (labels - 1)[:, None, None] * np.arange(1, STEPS + 1)[:, None] * np.array([0.5, 1.0])
    x = rise + rng.normal(0, 0.5, (len(labels), STEPS, SENSORS))
    samples, y = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(labels)
    return Data("tiny_series", Classification(classes), samples[:cut], y[:cut], samples[cut:], y[cut:])


def tiny_boxes(clients: int = CLIENTS) -> Data:
    """Grey noise with one or two rectangles, 4 to 7 pixels a side: dark ones and bright ones, the two categories."""
    rng = seeds.rng(0, "tiny boxes")
    categories, most, side, cut = 2, 3, 16, SAMPLES * clients
    x = rng.integers(100, 156, (cut + 40, 1, side, side)).astype(np.uint8)
    y = np.zeros((len(x), most, 5), dtype=np.float32)
    y[..., 0] = NONE
    for image, targets in zip(x[:, 0], y, strict=True):
        for row in range(rng.integers(1, 3)):
            category, (width, height) = rng.integers(categories), rng.integers(4, 8, 2)
            left, top = rng.integers(0, side - width + 1), rng.integers(0, side - height + 1)
            image[top : top + height, left : left + width] = 255 * category
            targets[row] = [category, *np.array([left + width / 2, top + height / 2, width, height]) / side]
    samples, boxes = torch.from_numpy(x), torch.from_numpy(y)
    mean, std = byte_statistics(x[:cut])
    task = Detection(categories, most)
    return Data("tiny_boxes", task, samples[:cut], boxes[:cut], samples[cut:], boxes[cut:], mean, std)


TABLE = Source("a made-up table with a number to predict", lambda root: tiny_table())
SEQUENCES = Source("made-up sequences of tokens in three classes", lambda root: tiny_sequences())
TEXT = Source("made-up sentences whose next words are to be predicted", lambda root: tiny_text())
BOXES = Source("made-up images of dark and bright rectangles to find", lambda root: tiny_boxes())

KINDS: dict[str, tuple[ModelFamily, Data]] = {
    "regression": (TinyMLP(), tiny_table()),
    "tokens": (TinyTokens(), tiny_sequences()),
    "next_token": (
        TextTransformer((LENGTH,), VOCABULARY, layers=1, heads=4, head_size=3, embedding=12, hidden=32),
        tiny_text(),
    ),
    "series": (TinyLSTM(), tiny_series()),
    "detection": (TinyDetector(), tiny_boxes()),
}
"""A network and data for it, of each kind that is not the classification of images."""
