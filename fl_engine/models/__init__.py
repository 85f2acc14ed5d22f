"""Maps each value of `model.name` to its network class. Add new networks to `MODELS`."""

from __future__ import annotations

from fl_engine.core.contracts import ModelFamily
from fl_engine.models.chains import VGG16, AepMLP, HarCNN, SmallCNN
from fl_engine.models.fedaiot_resnet18 import EpicResNet18, UTHARResNet18, WidarResNet18
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.models.point_detector import PointDetector
from fl_engine.models.recurrent import CasasBiLSTM, WisdmLSTM
from fl_engine.models.resnet import PreResNet18, ResNet18, ResNet34
from fl_engine.models.text import TextLSTM, TextTransformer

MODELS: dict[str, type[ModelFamily]] = {
    "small_cnn": SmallCNN,
    "vgg16": VGG16,
    "resnet18": ResNet18,
    "resnet34": ResNet34,
    "preresnet18": PreResNet18,
    "mobilenetv2": MobileNetV2,
    "wisdm_lstm": WisdmLSTM,
    "aep_mlp": AepMLP,
    "casas_bilstm": CasasBiLSTM,
    "uthar_resnet18": UTHARResNet18,
    "widar_resnet18": WidarResNet18,
    "epic_resnet18": EpicResNet18,
    "point_detector": PointDetector,
    "mobilenetv3_ofa": MobileNetV3OFA,
    "har_cnn": HarCNN,
    "text_transformer": TextTransformer,
    "text_lstm": TextLSTM,
}
