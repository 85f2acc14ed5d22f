"""Options from which no network can be built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ModelError
from fl_engine.core.types import SubmodelSpec
from fl_engine.models import MODELS
from fl_engine.models.resnet import ResNet18
from fl_engine.models.text_lstm import TextLSTM


@pytest.mark.parametrize(
    ("name", "shape", "options", "odd"),
    [
        ("small_cnn", (8, 8), {}, "input_shape"),
        ("small_cnn", (0, 8, 8), {}, "input_shape"),
        ("wisdm_lstm", (200,), {}, "input_shape"),
        ("aep_mlp", (2**20,), {}, "input_shape"),
        ("small_cnn", (1, 8, 8), {"outputs": 0}, "outputs"),
        ("resnet34", (3, 32, 32), {"width": 0}, "width"),
        ("resnet34", (3, 32, 32), {"channels": (64, 128, 256)}, "channels"),
        ("mobilenetv2", (3, 32, 32), {"norm": "group"}, "norm"),
        ("har_cnn", (128, 9), {"norm": "group"}, "norm"),
        ("har_cnn", (1, 9), {}, "2 steps"),
        ("vgg16", (3, 32, 31), {}, "32x32"),
        ("vgg16", (3, 32, 32), {"fc": (4096,)}, "fc"),
        ("vgg16", (3, 32, 32), {"pool_after": (2, 4, 7, 10)}, "pool_after"),
        ("vgg16", (3, 32, 32), {"pool_after": (2, 4, 7, 10, 14)}, "pool_after"),
        ("casas_bilstm", (10,), {"vocabulary": 0}, "vocabulary"),
        ("uthar_resnet18", (1, 63, 90), {}, "63 of 90"),
        ("uthar_resnet18", (3, 9, 250), {}, "250 of 27"),
        ("epic_resnet18", (1, 400, 128), {"stem": 0}, "stem"),
        ("text_lstm", (6,), {"vocabulary": -1}, "vocabulary"),
        ("text_lstm", (6,), {"layers": 0}, "layers"),
        ("text_lstm", (6,), {"embedding": 2**17}, "embedding"),
        ("text_lstm", (6,), {"answers": "all"}, "answers"),
        ("text_transformer", (6,), {"heads": 2**17}, "heads"),
        ("text_transformer", (6,), {"hidden": 1.5}, "hidden"),
        ("text_transformer", (6,), {"dropout": 1.0}, "dropout"),
    ],
)
def test_bad_options_are_named(name: str, shape: Any, options: dict[str, Any], odd: str) -> None:
    make: Callable[..., ModelFamily] = MODELS[name]
    with pytest.raises(ModelError, match=odd):
        make(**{"input_shape": shape, "outputs": 10} | options)


def test_text_networks_have_as_many_tokens_as_outputs_by_default() -> None:
    assert TextLSTM((6,), 11).vocabulary == 11
    assert TextLSTM((6,), 2, vocabulary=30).vocabulary == 30


@pytest.mark.parametrize(
    ("spec", "odd"),
    [
        (SubmodelSpec.of({}, ["stem", "stage1.0"]), "stage2.0"),
        (SubmodelSpec.of({"stem": 65}), "stem"),
        (SubmodelSpec.of({"stage5": 6}), "stage5"),
    ],
)
def test_impossible_sub_models_are_named(spec: SubmodelSpec, odd: str) -> None:
    with pytest.raises(ModelError, match=odd):
        ResNet18((3, 32, 32), 10).module(spec)
