"""The networks: what exists, by the name that `model:` takes. To add one, write its file and list it here."""

from __future__ import annotations

from fl_engine.core.contracts import ModelFamily
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.preresnet import PreResNet18
from fl_engine.models.resnet import ResNet18, ResNet34
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.vgg16 import VGG16

MODELS: dict[str, type[ModelFamily]] = {
    "small_cnn": SmallCNN,
    "vgg16": VGG16,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "preresnet18": PreResNet18,
    "mobilenetv2": MobileNetV2,
}
