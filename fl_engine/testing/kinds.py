"""The smallest data sets and networks that are no images: a table with a number to predict, sequences of tokens, and
series of measurements."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.samples import Data
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.datasets import Source
from fl_engine.models.layers import FREE, check_spec, linear_slots
from fl_engine.tasks import Classification, Regression
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


TABLE = Source("a made-up table with a number to predict", lambda root: tiny_table())
SEQUENCES = Source("made-up sequences of tokens in three classes", lambda root: tiny_sequences())
SERIES = Source("made-up series of two sensors in three classes", lambda root: tiny_series())

KINDS: dict[str, tuple[ModelFamily, Data]] = {
    "regression": (TinyMLP(), tiny_table()),
    "tokens": (TinyTokens(), tiny_sequences()),
    "series": (TinyLSTM(), tiny_series()),
}
"""A network and data for it, of each kind that is no image."""
