"""The three networks of FlexFL for CIFAR-10, their APoZ in FlexFL's code, and a client with random images."""

from __future__ import annotations

import numpy as np
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.samples import Data
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.models.chains import VGG16
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.models.resnet import ResNet34
from fl_engine.preparation import assumed
from fl_engine.tasks import Classification

IMAGE, CLASSES = (3, 32, 32), 10
FAMILIES: dict[str, ModelFamily] = {
    "vgg16": VGG16(IMAGE, CLASSES, pool_after=(3, 5, 8, 11, 13)),
    "resnet34": ResNet34(IMAGE, CLASSES),
    "mobilenetv2": MobileNetV2(IMAGE, CLASSES),
}
"""Map names to networks. VGG16 has its max pools after the same layers as in FlexFL's code."""
APOZ = {
    "vgg16": (
        0.5064863739, 0.5133746033, 0.6503060303, 0.6177527161, 0.6347842560, 0.5949074097, 0.5648363647, 0.6065169678,
        0.6035700073, 0.5883703003, 0.5890387573, 0.8103564453, 0.9636040039, 0.9940224609, 0.8050889893,
    ),
    "resnet34": (0.5686834259, 0.6525205196, 0.6017078438, 0.7603804525, 0.9060739441),
    "mobilenetv2": (
        0.5241017761, 0.5438592300, 0.5871572561, 0.5837559595, 0.6264267758, 0.6690035765, 0.6671791822, 0.6705858425,
        0.9949864386,
    ),
}  # fmt: skip
"""APoZ of each layer that can be pruned, from FlexFL's published code."""


def site_of(family: ModelFamily, algorithm: FlexFL, samples: int) -> Site:
    """Return a site with one client, which has `samples` images of noise. If the algorithm does not define APoZ scores,
    the pool uses 0.5."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(0, 256, (samples, *family.input_shape), dtype=np.uint8))
    y = torch.from_numpy(np.arange(samples) % CLASSES)
    data = Data("noise", Classification(CLASSES), x, y, x[:CLASSES], y[:CLASSES], (0.5,) * 3, (0.25,) * 3)
    pool = algorithm.pool(family, assumed(algorithm, family), None)  # type: ignore[arg-type]  # it does not use the server
    nobody, everything = np.zeros(0, dtype=np.int64), np.arange(samples)
    counts = np.bincount(y.numpy(), minlength=CLASSES)[:, None]
    partition = Partition(nobody, nobody, (everything,), "iid", {}, data.name, counts)
    return Site(family, pool, devices.fleet("4:3:3", 1, 0), data, partition, 0)
