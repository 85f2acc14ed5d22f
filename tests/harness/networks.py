"""Every network of the registry, small; and networks that remember what they were fed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Prunable, SubmodelSpec
from fl_engine.models.chains import VGG16, AepMLP, HarCNN, SmallCNN
from fl_engine.models.fedaiot_resnet18 import EpicResNet18, UTHARResNet18, WidarResNet18
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.models.point_detector import PointDetector
from fl_engine.models.recurrent import CasasBiLSTM, WisdmLSTM
from fl_engine.models.resnet import PreResNet18, ResNet18, ResNet34
from fl_engine.models.text import TextLSTM, TextTransformer

# VGG16 is not square, and larger than it must be, so that its flatten has a repeat.
SMALL: dict[str, ModelFamily] = {
    "small_cnn": SmallCNN((1, 8, 8), 10, width=0.5),
    "vgg16": VGG16((3, 32, 64), 4, fc=(64, 64), width=0.125),
    "vgg16 of FlexFL's code": VGG16((3, 32, 64), 4, fc=(64, 64), width=0.125, pool_after=(3, 5, 8, 11, 13)),
    "resnet18": ResNet18((3, 12, 9), 5, width=0.1),
    "resnet34": ResNet34((1, 9, 9), 3, width=0.1),
    "preresnet18": PreResNet18((3, 9, 12), 4, width=0.1),
    "mobilenetv2": MobileNetV2((2, 17, 20), 6, width=0.15),
    "wisdm_lstm": WisdmLSTM((7, 3), 4, width=0.9),
    "aep_mlp": AepMLP((5,), 2, width=0.05),
    "casas_bilstm": CasasBiLSTM((9,), 4, vocabulary=20, width=0.1),
    "uthar_resnet18": UTHARResNet18((1, 70, 45), 5, width=0.1),
    "widar_resnet18": WidarResNet18((4, 5, 9), 4, width=0.1),
    "epic_resnet18": EpicResNet18((1, 40, 33), 5, width=0.1),
    "point_detector": PointDetector((3, 40, 33), 6, width=0.06),
    "mobilenetv3_ofa": MobileNetV3OFA((2, 17, 20), 6, width=0.05),
    "har_cnn": HarCNN((7, 3), 4, width=0.5),
    "text_transformer": TextTransformer((6,), 7, layers=2, heads=3, head_size=4, embedding=9, hidden=10),
    "text_lstm": TextLSTM((6,), 7, embedding=5, hidden=6),
    "text_lstm, one answer": TextLSTM((5,), 3, vocabulary=7, answers="last", layers=3, embedding=3, hidden=4),
}


class Watched:
    """A family whose networks remember the batches they were fed, and in which mode each sub-network ran."""

    def __init__(self, inner: ModelFamily) -> None:
        self.inner = inner
        self.batches: list[Tensor] = []
        self.runs: list[tuple[SubmodelSpec, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        module = self.inner.module(spec)

        def remember(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.batches.append(inputs[0].clone())
            self.runs.append((spec, module.training))

        module.register_forward_pre_hook(remember)
        return module


@dataclass(frozen=True)
class Line:
    """(B, 2) -> one number: weight (u, v), bias c."""

    input_shape: tuple[int, ...] = (2,)
    outputs: int = 1

    def layout(self) -> ParamLayout:
        return ParamLayout({HEAD: 1}, linear_slots("head", "head", FREE, Axis(HEAD)))

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        return nn.Sequential(OrderedDict(head=nn.Linear(2, 1)))

    def prunable(self) -> tuple[Prunable, ...]:
        return ()
