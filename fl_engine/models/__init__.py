"""All networks, by the name that `model:` takes. To add one, write its file and list it here."""

from __future__ import annotations

from fl_engine.core.contracts import ModelFamily
from fl_engine.models.aep_mlp import AepMLP
from fl_engine.models.casas_bilstm import CasasBiLSTM
from fl_engine.models.epic_resnet18 import EpicResNet18
from fl_engine.models.har_cnn import HarCNN
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.mobilenetv3_ofa import MobileNetV3OFA
from fl_engine.models.point_detector import PointDetector
from fl_engine.models.preresnet import PreResNet18
from fl_engine.models.resnet import ResNet18, ResNet34
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.models.text_lstm import TextLSTM
from fl_engine.models.text_transformer import TextTransformer
from fl_engine.models.uthar_resnet18 import UTHARResNet18
from fl_engine.models.vgg16 import VGG16
from fl_engine.models.widar_resnet18 import WidarResNet18
from fl_engine.models.wisdm_lstm import WisdmLSTM

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
