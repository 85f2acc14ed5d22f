"""Exported levels as fp16 and int8: what the files are, what they answer, and what is measured of them."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fl_engine.codecs import Half, Qsgd
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import IntegrityError
from fl_engine.core.pool import member
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL
from fl_engine.models import AepMLP, SmallCNN, TextLSTM, TextTransformer, WisdmLSTM
from fl_engine.models import export as exports
from fl_engine.models import onnx_precisions as precisions
from fl_engine.models.onnx_precisions import (
    FILES,
    OnnxPrecision,
    Precisions,
    convert,
    measure,
    precision_of,
    rounded_up,
)
from fl_engine.tasks import Classification, NextToken, Regression
from flexfleet.pipeline.prepare import Resolved

OTHERS: tuple[OnnxPrecision, ...] = ("fp16", "int8")
MARGIN = 0.02
"""How much accuracy a converted level may lose here: seven of 359 test images."""


# -------------------------------------------------------------------------------------------------- the rule
def test_bits_of_a_codec_are_rounded_up() -> None:
    found = {bits: rounded_up(bits) for bits in (1, 8, 9, 16, 17, 32, None)}
    assert found == {1: "int8", 8: "int8", 9: "fp16", 16: "fp16", 17: "fp32", 32: "fp32", None: "fp32"}
    assert precision_of(None) == "fp32" and precision_of(Half()) == "fp16"
    # 8 bits are 255 levels per sign.
    assert [precision_of(Qsgd(levels=n)) for n in (1, 255, 256)] == ["int8", "int8", "fp16"]
    assert all(precision_of(Qsgd(bits=bits)) == rounded_up(bits) for bits in range(1, 17))


# ------------------------------------------------------------------------------------------- a trained level
@dataclass(frozen=True)
class Trained:
    folder: Path
    data: Data
    network: exports.RawNetwork
    found: Precisions
    accuracy: float


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """small_cnn after 15 epochs on the digits."""
    data = Resolved.load(None, []).data
    family = SmallCNN(data.input_shape, 10)
    network = runnable(family, FULL, initial_params(family, 0)).train()
    optimizer = torch.optim.Adam(network.parameters(), 2e-3)
    shuffled = torch.Generator().manual_seed(0)
    for _ in range(15):
        for chunk in torch.randperm(len(data.train_y), generator=shuffled).split(64):
            optimizer.zero_grad()
            loss = data.task.loss(network(data.normalise(data.train_x[chunk])), data.train_y[chunk]).sum()
            loss.backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("trained") / "M1"
    params = {name: each.detach() for name, each in network.state_dict().items()}
    level = member(family, "M1", FULL, dispatched=True, reported=True)
    about, network = exports.export("small_cnn", family, params, level, data, torch.arange(400), 0.0, folder)
    exports.to_onnx(network, data, folder / exports.ONNX)
    found = measure(folder, "M1", OTHERS, network, data, "sha")
    return Trained(folder, data, network, found, about.accuracy_exported)


def test_converted_files_keep_the_accuracy(trained: Trained) -> None:
    figures = trained.found.precisions
    assert list(figures) == ["fp32", *OTHERS] and trained.found.refused == {}
    assert figures["fp32"].value == pytest.approx(trained.accuracy) and trained.accuracy > 0.95
    for name in OTHERS:
        assert abs(figures[name].value - trained.accuracy) <= MARGIN, name
        assert 1 - MARGIN <= cast(float, figures[name].agreement) <= 1, name


def test_figures_are_measured_on_the_files(trained: Trained) -> None:
    assert trained.found == precisions.read(trained.folder)
    assert trained.found.test_samples == len(trained.data.test_y)
    x, y = trained.data.test_x.numpy(), trained.data.test_y.numpy()
    for name, figures in trained.found.precisions.items():
        path = trained.folder / figures.file
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answered = [session.run(None, {"images": x[i : i + 1]})[0].argmax() for i in range(len(x))]
        assert figures.value == pytest.approx((answered == y).mean(), abs=1e-9), name
        assert figures.bytes == path.stat().st_size
        assert 0 < figures.latency_ms < 1000


def test_converted_files_are_smaller_and_store_the_precision(trained: Trained) -> None:
    figures = trained.found.precisions
    assert figures["fp16"].bytes < 0.56 * figures["fp32"].bytes
    assert figures["int8"].bytes < 0.36 * figures["fp32"].bytes
    assert {name: each.share for name, each in figures.items()} == dict.fromkeys(figures, 1.0)
    nodes = Counter(n.op_type for n in onnx.load(trained.folder / FILES["int8"]).graph.node)
    assert nodes["ConvInteger"] == 3 and nodes["MatMulInteger"] == 2


@pytest.mark.parametrize("name", OTHERS)
def test_converting_twice_gives_equal_bytes(trained: Trained, tmp_path: Path, name: OnnxPrecision) -> None:
    shutil.copy(trained.folder / exports.ONNX, tmp_path)
    convert(name, trained.network, trained.data, tmp_path)
    assert (tmp_path / FILES[name]).read_bytes() == (trained.folder / FILES[name]).read_bytes()


# ------------------------------------------------------------------------------------------------- all families
GENERATOR = torch.Generator().manual_seed(0)


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


def images(*chw: int) -> Tensor:
    return torch.randint(0, 256, (48, *chw), generator=GENERATOR, dtype=torch.uint8)


def data_of(x: Tensor, task: Any, **more: Any) -> Data:
    y = torch.arange(len(x)) % task.outputs
    if not isinstance(task, Classification):
        y = task.examples(len(x), GENERATOR) if isinstance(task, NextToken) else torch.randn(len(x), 1)
    return Data("made_up", task, x, y, x, y, **more)


STANDARD = {"mean": (0.5,), "std": (0.3,)}
FAMILIES: dict[str, tuple[ModelFamily, Data, set[OnnxPrecision]]] = {
    # The last: precisions that leave some weights in fp32.
    "small_cnn": (SmallCNN((1, 8, 8), 10), data_of(images(1, 8, 8), Classification(10), **STANDARD), set()),
    "wisdm_lstm": (
        WisdmLSTM((20, 6), 12),
        data_of(numbers(48, 20, 6), Classification(12), mean=(0.0,) * 6, std=(1.0,) * 6),
        {"int8"},
    ),
    "aep_mlp": (AepMLP((18,), 1), data_of(numbers(48, 18), Regression()), set()),
    "text_transformer": (
        TextTransformer((12,), 20, layers=2),
        data_of(torch.randint(0, 20, (48, 12), generator=GENERATOR), NextToken(20, 12)),
        {"int8"},
    ),
    "text_lstm": (
        TextLSTM((12,), 20, vocabulary=400, embedding=32, hidden=16),
        data_of(torch.randint(0, 20, (48, 12), generator=GENERATOR), NextToken(20, 12)),
        {"int8"},
    ),
}


def written(family: ModelFamily, data: Data, folder: Path) -> exports.RawNetwork:
    """The freshly initialised network as model.onnx."""
    if exports.by_batch(family.module(FULL)):
        family = replace(cast(Any, family), norm="static")
    return exported(runnable(family, FULL, initial_params(family, 3)), data, folder)


def exported(network: nn.Module, data: Data, folder: Path) -> exports.RawNetwork:
    raw = exports.raw_network(network, data, ensemble=False)
    exports.to_onnx(raw, data, folder / exports.ONNX)
    return raw


@pytest.mark.parametrize("name", FAMILIES)
def test_each_kind_of_network_is_converted(name: str, tmp_path: Path) -> None:
    family, data, partly = FAMILIES[name]
    raw = written(family, data, tmp_path)
    found = measure(tmp_path, "M1", OTHERS, raw, data, "sha")
    assert found.refused == {} and set(found.precisions) == {"fp32", *OTHERS}
    with torch.no_grad():
        wanted = raw(data.test_x)
    for each, apart in zip(OTHERS, (0.01, 0.1), strict=True):
        session = onnxruntime.InferenceSession(str(tmp_path / FILES[each]), providers=["CPUExecutionProvider"])
        (answer,) = session.run(None, {session.get_inputs()[0].name: data.test_x.numpy()})
        assert answer.dtype == np.float32
        assert float((torch.from_numpy(answer) - wanted).abs().max()) < apart * float(wanted.abs().max()), each
        assert (found.precisions[each].share < 0.999) == (each in partly)
        assert (found.precisions[each].agreement is None) == (not isinstance(data.task, Classification))
        assert found.precisions[each].bytes < (0.6 if each == "fp16" else 0.75) * found.precisions["fp32"].bytes


def test_samples_are_normalised_in_fp32(tmp_path: Path) -> None:
    """Numbers around 1000 that differ by 0.1 are the same number in fp16."""
    x = 1000 + 0.1 * numbers(48, 18)
    data = data_of(x, Regression(), mean=(1000.0,) * 18, std=(0.1,) * 18)
    assert len(x.half().unique()) < 4
    raw = written(AepMLP((18,), 1), data, tmp_path)
    session = onnxruntime.InferenceSession(str(convert("fp16", raw, data, tmp_path)))
    (answer,) = session.run(None, {"samples": x.numpy()})
    with torch.no_grad():
        wanted = raw(x)
    torch.testing.assert_close(torch.from_numpy(answer), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


# --------------------------------------------------------------------------------------------------- refusals
class Scaled(nn.Module):
    """Weights that nothing multiplies with as a matrix."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 6), times))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.weight * self.weight).sum(1)


def test_measure_lists_a_refused_precision_and_continues(tmp_path: Path) -> None:
    data = data_of(numbers(20, 6), Classification(6))
    raw = exported(Scaled(2.0), data, tmp_path)
    found = measure(tmp_path, "M1", ("int8", "fp16", "int8"), raw, data, "sha")
    assert list(found.precisions) == ["fp32", "fp16"]
    assert found.refused == {"int8": "ONNX Runtime does not support int8 for any layer with weights"}
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.fp16.onnx", "precision.json"}


def test_read_refuses_a_damaged_precision_json(trained: Trained, tmp_path: Path) -> None:
    assert precisions.read(tmp_path) is None
    whole = (trained.folder / precisions.ABOUT).read_text()
    for wrong in ("", whole[:-9], whole.replace('"fp32"', '"fp64"')):
        (tmp_path / precisions.ABOUT).write_text(wrong)
        with pytest.raises(IntegrityError):
            precisions.read(tmp_path)
