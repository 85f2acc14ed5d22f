"""Small data sets and networks for tasks other than image classification: regression, classification of token sequences
and time series, next-word prediction, object detection, multi-label classification, and segmentation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fl_engine.core import seeds
from fl_engine.core.boxes import NONE
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.samples import Data
from fl_engine.core.task import VOID, Task
from fl_engine.core.types import HEAD, Axis
from fl_engine.data.transforms import byte_statistics
from fl_engine.datasets import Source
from fl_engine.models.layers import LayerMaker
from fl_engine.models.network import Network
from fl_engine.models.recurrent import CasasBiLSTM, Steps
from fl_engine.models.text import TextTransformer
from fl_engine.tasks import Classification, Detection, Multilabel, NextToken, Regression, Segmentation
from fl_engine.testing.tiny import CLIENTS, SAMPLES

FEATURES = 6
LENGTH = 5
VOCABULARY = 12
STEPS, SENSORS = 5, 2
TRAINED, TESTED = SAMPLES * CLIENTS, 40
"""Number of training samples, and number of test samples."""

Numbers = tuple[float, ...]


@dataclass(frozen=True)
class TinyMLP(Network):
    """Network with two hidden layers: vectors (B, F) -> (B, outputs)."""

    input_shape: tuple[int, ...] = (FEATURES,)
    outputs: int = 1

    axes: ClassVar[tuple[str, ...]] = ("features",)
    channels_of: ClassVar[Mapping[str, int]] = {"fc1": 16, "fc2": 16}

    def build(self, make: LayerMaker) -> nn.Module:
        first, second = map(Axis, self.channels_of)
        fc1, fc2 = make.dense(self.input_shape[0], first), make.dense(first, second)
        return nn.Sequential(OrderedDict(fc1=fc1, fc2=fc2, head=make.linear(second, Axis(HEAD))))


@dataclass(frozen=True)
class TinyLSTM(Network):
    """LSTM network for time series: (B, T, F) -> (B, outputs). The head uses the LSTM's outputs at all steps."""

    input_shape: tuple[int, ...] = (STEPS, SENSORS)
    outputs: int = 3

    axes: ClassVar[tuple[str, ...]] = ("steps", "features")
    channels_of: ClassVar[Mapping[str, int]] = {"lstm": 12}

    def build(self, make: LayerMaker) -> nn.Module:
        steps, features = self.input_shape
        head = make.linear(Axis("lstm", copies=steps), Axis(HEAD))
        lstm = Steps(make, features, Axis("lstm"))
        return nn.Sequential(OrderedDict(lstm=lstm, flatten=nn.Flatten(), head=head))


@dataclass(frozen=True)
class TinyDetector(Network):
    """Network of two convolutions: images (B, C, H, W) -> (B, outputs, H/4, W/4), or (B, outputs, H, W) with stride 1,
    for segmentation."""

    input_shape: tuple[int, ...] = (1, 16, 16)
    outputs: int = 6
    stride: int = 2

    channels_of: ClassVar[Mapping[str, int]] = {"conv1": 8, "conv2": 16}

    def build(self, make: LayerMaker) -> nn.Module:
        first, second = Axis("conv1"), Axis("conv2")
        conv1 = OrderedDict(conv=make.conv(self.input_shape[0], first, 3, self.stride), relu=nn.ReLU())
        conv2 = OrderedDict(conv=make.conv(first, second, 3, self.stride), relu=nn.ReLU())
        head = make.conv(second, Axis(HEAD), 1)
        return nn.Sequential(OrderedDict(conv1=nn.Sequential(conv1), conv2=nn.Sequential(conv2), head=head))


def _data(name: str, task: Task, x: NDArray[Any], y: NDArray[Any], mean: Numbers = (), std: Numbers = ()) -> Data:
    samples, targets = torch.from_numpy(x), torch.from_numpy(y)
    train, test = slice(TRAINED), slice(TRAINED, None)
    return Data(name, task, samples[train], targets[train], samples[test], targets[test], mean, std)


def tiny_table() -> Data:
    """Return a regression data set. The target is a smooth function of six unnormalised features, plus noise."""
    rng = seeds.rng(0, "tiny table")
    x = rng.normal(3.0, 2.0, (TRAINED + TESTED, FEATURES)).astype(np.float32)
    y = torch.from_numpy(x[:, 0] - 0.5 * x[:, 1] + 0.2 * x[:, 2] * x[:, 3]) + torch.from_numpy(
        rng.normal(0, 0.1, len(x))
    )
    y = (y - y[:TRAINED].mean()) / y[:TRAINED].std()
    mean, std = (tuple(of(torch.from_numpy(x[:TRAINED]), dim=0).tolist()) for of in (torch.mean, torch.std))
    return _data("tiny_table", Regression(), x, y.numpy(), mean, std)


def tiny_sequences() -> Data:
    """Return sequences of five tokens. Most tokens of a class are from one third of the vocabulary."""
    rng = seeds.rng(0, "tiny sequences")
    classes = 3
    labels = rng.permutation(np.arange(TRAINED + TESTED) % classes)
    shape, third = (len(labels), LENGTH), VOCABULARY // classes
    own = rng.integers(0, third, shape) + third * labels[:, None]
    x = np.where(rng.random(shape) < 0.8, own, rng.integers(0, VOCABULARY, shape))
    return _data("tiny_sequences", Classification(classes), x, labels)


def tiny_text() -> Data:
    """Return sentences with up to five words. Most words are followed by the next word of the vocabulary. Token 0 is
    padding. The last three tokens mark unknown words, the start and the end of a sentence."""
    rng = seeds.rng(0, "tiny text")
    words = VOCABULARY - 4
    unknown, begin, end = words + 1, words + 2, words + 3
    tokens = np.zeros((TRAINED + TESTED, LENGTH + 2), dtype=np.int64)
    for row in tokens:
        count = int(rng.integers(2, LENGTH + 1))
        steps = np.where(rng.random(count) < 0.9, 1, rng.integers(0, words, count))
        sentence = 1 + (rng.integers(words) + steps.cumsum()) % words
        sentence[rng.random(count) < 0.05] = unknown
        row[: count + 2] = [begin, *sentence, end]
    task = NextToken(VOCABULARY, LENGTH, 0, (unknown, begin, end))
    return _data("tiny_text", task, tokens[:, :LENGTH].copy(), tokens[:, 1 : LENGTH + 1].copy())


def tiny_series() -> Data:
    """Return noisy series of two sensors over five steps. The class is the trend: falling, constant or rising."""
    rng = seeds.rng(0, "tiny series")
    classes = 3
    labels = rng.permutation(np.arange(TRAINED + TESTED) % classes)
    rise = (labels - 1)[:, None, None] * np.arange(1, STEPS + 1)[:, None] * np.array([0.5, 1.0])
    x = (rise + rng.normal(0, 0.5, (len(labels), STEPS, SENSORS))).astype(np.float32)
    return _data("tiny_series", Classification(classes), x, labels)


def tiny_boxes() -> Data:
    """Return images of grey noise with one or two rectangles of 4 to 7 pixels per side. The two categories are dark and
    bright rectangles."""
    rng = seeds.rng(0, "tiny boxes")
    categories, most, side = 2, 3, 16
    x = rng.integers(100, 156, (TRAINED + TESTED, 1, side, side)).astype(np.uint8)
    y = np.zeros((len(x), most, 5), dtype=np.float32)
    y[..., 0] = NONE
    for image, targets in zip(x[:, 0], y, strict=True):
        for row in range(rng.integers(1, 3)):
            category, (width, height) = rng.integers(categories), rng.integers(4, 8, 2)
            left, top = rng.integers(0, side - width + 1), rng.integers(0, side - height + 1)
            image[top : top + height, left : left + width] = 255 * category
            targets[row] = [category, *np.array([left + width / 2, top + height / 2, width, height]) / side]
    return _data("tiny_boxes", Detection(categories, most), x, y, *byte_statistics(x[:TRAINED]))


def tiny_labels() -> Data:
    """Return vectors of six features for multi-label classification. A label is 1 if the sum of two features is
    positive."""
    x = seeds.rng(0, "tiny labels").normal(size=(TRAINED + TESTED, FEATURES)).astype(np.float32)
    return _data("tiny_labels", Multilabel(3), x, (x[:, :3] + x[:, 3:] > 0).astype(np.float32))


def tiny_masks() -> Data:
    """Return noisy images with a dark left part and a bright right part. The targets mark one column as void."""
    rng = seeds.rng(0, "tiny masks")
    y = np.where(np.arange(8) < rng.integers(2, 7, (TRAINED + TESTED, 8, 1)), 1, 2)
    x = np.clip(rng.normal(128 * y - 64, 40)[:, None], 0, 255).astype(np.uint8)
    y[:, :, 4] = VOID
    return _data("tiny_masks", Segmentation(3), x, y.astype(np.uint8), *byte_statistics(x[:TRAINED]))


TABLE = Source("generated table with a number to predict", lambda root: tiny_table())
SEQUENCES = Source("generated token sequences in three classes", lambda root: tiny_sequences())
TEXT = Source("generated sentences for next-word prediction", lambda root: tiny_text())
BOXES = Source("generated images of dark and bright rectangles to detect", lambda root: tiny_boxes())

KINDS: dict[str, tuple[ModelFamily, Data]] = {
    "regression": (TinyMLP(), tiny_table()),
    "tokens": (CasasBiLSTM((LENGTH,), 3, width=0.25, vocabulary=VOCABULARY), tiny_sequences()),
    "next_token": (
        TextTransformer((LENGTH,), VOCABULARY, layers=1, heads=4, head_size=3, embedding=12, hidden=32),
        tiny_text(),
    ),
    "series": (TinyLSTM(), tiny_series()),
    "detection": (TinyDetector(), tiny_boxes()),
    "multilabel": (TinyMLP(outputs=3), tiny_labels()),
    "segmentation": (TinyDetector((1, 8, 8), 3, stride=1), tiny_masks()),
}
"""A network and a data set for each task other than image classification."""
