"""Sequential networks: small_cnn and vgg16 for images, har_cnn for motion sensors, and aep_mlp for energy consumption.

Each block before the classifier has a channel group of the same name, and may have an early exit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fl_engine.core.types import HEAD, Axis, SubmodelSpec
from fl_engine.models.layers import Inside, LayerMaker, Norm, scaled
from fl_engine.models.network import LARGEST, ExitNetwork, ImageNetwork, NormedNetwork, are_sizes


class Chain(ExitNetwork):
    def exit_points(self) -> tuple[str, ...]:
        return tuple(self.groups())


SMALL_CHANNELS = {"conv1": 16, "conv2": 32, "conv3": 64, "fc1": 64}


class SmallCNN(Chain, ImageNetwork):
    """Small convolutional network for images of at least 8x8 pixels, which trains quickly on one CPU core.

    The three 3x3 convolutions have 16, 32 and 64 channels, batch norm and ReLU. A 2x2 max pool follows the first and
    the second convolution. A hidden layer and the classifier follow the third convolution. For 1x8x8 images and ten
    classes, SmallCNN has 40,618 parameters.

    Groups: conv1, conv2, conv3, fc1, classes. Blocks: conv1, conv2, conv3, fc1, classifier.
    """

    channels_of = SMALL_CHANNELS
    min_hw: ClassVar[int] = 8

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        conv1, conv2, conv3, hidden = map(Axis, SMALL_CHANNELS)
        _, h, w = self.input_shape
        # Create fc1 first, because the initial weights depend on the order in which layers are created.
        fc1 = make.dense(Axis("conv3", (h // 4) * (w // 4)), hidden)
        return OrderedDict(
            conv1=make.conv_bn(self.input_shape[0], conv1, 3, self.norm, relu=nn.ReLU()),
            pool1=nn.MaxPool2d(2),
            conv2=make.conv_bn(conv1, conv2, 3, self.norm, relu=nn.ReLU()),
            pool2=nn.MaxPool2d(2),
            conv3=make.conv_bn(conv2, conv3, 3, self.norm, relu=nn.ReLU()),
            flatten=nn.Flatten(),
            fc1=fc1,
            classifier=make.linear(hidden, Axis(HEAD)),
        )


VGG_CHANNELS = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)


@dataclass(frozen=True)
class VGG16(Chain, ImageNetwork):
    """VGG16 with batch norm (Simonyan and Zisserman, ICLR 2015, configuration D), as in FlexFL and AdaptiveFL.

    VGG16 has thirteen 3x3 convolutions with bias and batch norm, five 2x2 max pools, two hidden layers with dropout
    0.5, and the classifier. For 3x32x32 images and 10 / 100 / 200 classes, VGG16 has 33,646,666 / 34,015,396 /
    34,425,096 parameters.

    The max pools follow convolutions 2, 4, 7, 10 and 13, as in the original network and in AdaptiveFL's Table 1. With
    the original positions, a 3x32x32 image requires 333.2 M multiply-adds. In FlexFL's code, the max pools follow
    convolutions 3, 5, 8, 11 and 13 (option `pool_after`). FlexFL's variant requires 532.1 M multiply-adds. The
    parameters of both variants have the same shapes, but the logits differ.

    Departs from the authors' code, which shrinks the hidden layers to 256 units and omits the last pool if images are
    not RGB. Here the network is the same for all images, and `fc` sets the number of hidden units.

    Groups: conv1 .. conv13, fc1, fc2, classes. Blocks: conv1 .. conv13, fc1, fc2, classifier.
    """

    fc: tuple[int, int] = (4096, 4096)
    """Number of units in each of the two hidden layers, before multiplication by `width`."""
    pool_after: tuple[int, ...] = (2, 4, 7, 10, 13)
    """Numbers (1 to 13) of the five convolutions before a max pool; FlexFL's code uses [3, 5, 8, 11, 13]."""

    min_hw: ClassVar[int] = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("fc", are_sizes(self.fc, 2), f"two integers from 1 to {LARGEST}")
        after = self.pool_after
        fits = are_sizes(after, 5) and list(after) == sorted(set(after)) and after[-1] <= len(VGG_CHANNELS)
        self.require("pool_after", fits, f"five ascending integers from 1 to {len(VGG_CHANNELS)}")

    def groups(self) -> dict[str, int]:
        groups = {f"conv{i}": scaled(n, self.width) for i, n in enumerate(VGG_CHANNELS, 1)}
        return groups | {f"fc{i}": scaled(n, self.width) for i, n in enumerate(self.fc, 1)}

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        inside: Inside = self.input_shape[0]
        for i in range(1, len(VGG_CHANNELS) + 1):
            out = Axis(f"conv{i}")
            layers[f"conv{i}"] = make.conv_bn(inside, out, 3, self.norm, relu=nn.ReLU())
            if i in self.pool_after:
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            inside = out
        layers["flatten"] = nn.Flatten()
        _, h, w = self.input_shape
        layers["fc1"] = make.dense(Axis("conv13", (h // 32) * (w // 32)), Axis("fc1"), dropout=0.5)
        layers["fc2"] = make.dense(Axis("fc1"), Axis("fc2"), dropout=0.5)
        layers["classifier"] = make.linear(Axis("fc2"), Axis(HEAD))
        return layers


HAR_CHANNELS = {"conv1": 128, "conv2": 64, "conv3": 32}
HAR_UNITS = {"fc1": 64, "fc2": 32, "fc3": 16, "fc4": 16}
KERNEL = 3
PARTS = {"small": 4, "medium": 2, "large": 1}
"""Maps the name of each nested network to the divisor of the number of channels in its convolutions."""


class AsMap(nn.Module):
    """Reshape windows (B, T, F) to maps (B, F, T, 1), or (B, n*T, F) to (B, n*F, T, 1) for n stacked clients."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x_btf: Tensor) -> Tensor:
        x_bntf = x_btf.reshape(x_btf.shape[0], -1, self.steps, x_btf.shape[2])
        return x_bntf.transpose(2, 3).flatten(1, 2).unsqueeze(-1)


@dataclass(frozen=True)
class HarCNN(Chain, NormedNetwork):
    """1-D convolutional network that classifies activities from windows of motion-sensor data.

    FedX uses the HAR-Wild model (section IV-C; Jiang et al., FLSys, TMC 2022). The paper states only that the model has
    three 1-D convolutions with batch norm, five fully connected layers, and 316, 153 or 76 thousand parameters for 128,
    64 or 32 channels. HarCNN is a reconstruction of this model. The three convolutions have kernel size 3, batch norm,
    ReLU, and 128, 64 and 32 channels. Four hidden layers with 64, 32, 16 and 16 units and ReLU precede the classifier.

    The paper's parameter counts do not match three convolutions with c channels each. A network with a c^2 + b c + d
    parameters satisfies P(128) - 3 P(64) + 2 P(32) = (16,384 - 3 * 4,096 + 2 * 1,024) a = 6,144 a. The paper's counts
    yield 316 - 3 * 153 + 2 * 76 = 9 thousand, or 6 to 12 thousand before rounding, so a is between 0.98 and 1.95. Three
    convolutions with c channels and kernel size 3 have a = 6. Therefore each convolution here halves the number of
    channels. Convolutions with c, c/2 and c/4 channels have a = 1.875.

    `nested` lists three networks. `large` is the full network. `medium` keeps the first half of each convolution's
    channels, and `small` keeps the first quarter. Both sub-networks keep all hidden units. FedX pre-trains with UCI-HAR
    (data set `uci_har`; 128 steps, 9 signals, 6 classes). For UCI-HAR, `large` / `medium` / `small` have 300,486 /
    144,086 / 71,646 parameters, including running statistics. For WISDM (200x6, 12 classes), the networks have 446,892
    / 217,340 / 108,324 parameters.

    The code uses two-dimensional convolutions with kernel 3x1, because one call can then train several clients.

    Groups: conv1 .. conv3, fc1 .. fc4, classes. Blocks: conv1 .. conv3, fc1 .. fc4, classifier.
    """

    input_shape: tuple[int, int]
    norm: Norm = "static"
    """batch: normalise with the statistics of the current batch; static: with stored statistics."""

    axes: ClassVar[tuple[str, ...]] = ("steps", "features")
    channels_of = HAR_CHANNELS | HAR_UNITS
    published_input: ClassVar[tuple[int, ...]] = (128, 9)
    published_outputs: ClassVar[int] = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("input_shape", self.input_shape[0] > 1, "of at least 2 steps, because one step has no variance")

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        steps, features = self.input_shape
        layers: OrderedDict[str, nn.Module] = OrderedDict(map=AsMap(steps))
        inside: Inside = features
        for name in HAR_CHANNELS:
            layers[name] = make.conv_bn(inside, Axis(name), (KERNEL, 1), self.norm, relu=nn.ReLU())
            inside = Axis(name)
        layers["flatten"] = nn.Flatten()
        inside = Axis("conv3", repeat=steps)
        for name in HAR_UNITS:
            layers[name] = make.dense(inside, Axis(name))
            inside = Axis(name)
        layers["classifier"] = make.linear(inside, Axis(HEAD))
        return layers

    def nested(self) -> Mapping[str, SubmodelSpec]:
        """Map the names `small`, `medium` and `large` to sub-network specs, in ascending order of size."""
        groups = self.layout().groups
        return {
            name: SubmodelSpec.of({conv: max(1, groups[conv] // part) for conv in HAR_CHANNELS if part > 1})
            for name, part in PARTS.items()
        }


AEP_UNITS = {"fc1": 210, "fc2": 420, "fc3": 840, "fc4": 420, "fc5": 210}
AEP_DROPOUT = 0.3


@dataclass(frozen=True)
class AepMLP(Chain):
    """FedAIoT's MLP for AEP (Alam, Federated Learning Benchmarks and Frameworks for Artificial Intelligence of Things,
    Michigan State University 2023, section 2.3.3.6), which predicts the energy consumption of household appliances.

    Five hidden layers with 210, 420, 840, 420 and 210 units, ReLU and dropout 0.3 precede the output layer. For 18
    features and one output, AepMLP has 888,091 parameters.

    Departs from the authors' code, which uses dropout 0.5. The text of the thesis and this network use dropout 0.3.

    Groups: fc1 .. fc5, classes. Blocks: fc1 .. fc5, head.
    """

    input_shape: tuple[int]

    axes: ClassVar[tuple[str, ...]] = ("features",)
    channels_of = AEP_UNITS
    published_input: ClassVar[tuple[int, ...]] = (18,)
    published_outputs: ClassVar[int] = 1

    def layers(self, make: LayerMaker) -> OrderedDict[str, nn.Module]:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        inside: Inside = self.input_shape[0]
        for name in AEP_UNITS:
            layers[name] = make.dense(inside, Axis(name), AEP_DROPOUT)
            inside = Axis(name)
        layers["head"] = make.linear(inside, Axis(HEAD))
        return layers
