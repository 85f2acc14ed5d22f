"""Exported levels as fp16 and int8: what the files are, what they answer, and what is measured of them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
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
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.pool import member
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL
from fl_engine.models import AepMLP, MobileNetV2, SmallCNN, TextLSTM, TextTransformer, WisdmLSTM
from fl_engine.models import export as exports
from fl_engine.models import onnx_comparison as precisions
from fl_engine.models.onnx_comparison import Precisions, measure
from fl_engine.models.onnx_quantization import FILES, OnnxPrecision, convert, of_codec, rounded_up
from fl_engine.tasks import Classification, NextToken, Regression
from flexfleet.pipeline.prepare import Resolved

OTHERS: tuple[OnnxPrecision, ...] = ("fp16", "int8", "int8_static")
MARGIN = 0.02
"""How much accuracy a converted level may lose here: seven of 359 test images."""


# -------------------------------------------------------------------------------------------------- the rule
@pytest.mark.parametrize(
    ("bits", "wanted"),
    [(1, "int8"), (4, "int8"), (8, "int8"), (9, "fp16"), (11, "fp16"), (16, "fp16"), (17, "fp32"), (32, "fp32"),
     (None, "fp32")],
)  # fmt: skip
def test_bits_are_rounded_up(bits: int | None, wanted: str) -> None:
    assert rounded_up(bits) == wanted


def test_the_bits_are_a_codecs_own() -> None:
    assert of_codec(None) == "fp32" and of_codec(Half()) == "fp16"
    # 8 bits are 255 levels per sign.
    assert [of_codec(Qsgd(levels=n)) for n in (1, 255, 256)] == ["int8", "int8", "fp16"]
    assert all(of_codec(Qsgd(bits=bits)) == rounded_up(bits) for bits in range(1, 17))


# ------------------------------------------------------------------------------------------- a trained level
@dataclass(frozen=True)
class Trained:
    folder: Path
    data: Data
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
            loss = data.task.loss(network(data.normalise(data.train_x[chunk])), data.train_y[chunk], "sum")
            loss.backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("trained") / "M1"
    params = {name: each.detach() for name, each in network.state_dict().items()}
    level = member(family, "M1", FULL, dispatched=True, reported=True)
    made = exports.export("small_cnn", family, params, level, data, torch.arange(400), 0.0, folder)
    exports.to_onnx(made, data, folder / exports.ONNX)
    found = measure(folder, "M1", OTHERS, data, torch.arange(0, 400, 4), "sha")
    return Trained(folder, data, found, made.about.accuracy_exported)


def test_a_trained_level_keeps_its_accuracy(trained: Trained) -> None:
    figures = trained.found.precisions
    assert list(figures) == ["fp32", *OTHERS] and trained.found.refused == {}
    assert figures["fp32"].value == pytest.approx(trained.accuracy) and trained.accuracy > 0.95
    for name in OTHERS:
        assert abs(figures[name].value - trained.accuracy) <= MARGIN, name
        assert 1 - MARGIN <= cast(float, figures[name].agreement) <= 1, name


def test_its_figures_are_those_of_the_files(trained: Trained) -> None:
    assert trained.found == precisions.read(trained.folder)
    assert (trained.found.test_samples, trained.found.calibration_samples) == (len(trained.data.test_y), 100)
    x, y = trained.data.test_x.numpy(), trained.data.test_y.numpy()
    for name, figures in trained.found.precisions.items():
        path = trained.folder / figures.file
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        answered = [session.run(None, {"images": x[i : i + 1]})[0].argmax() for i in range(len(x))]
        assert figures.value == pytest.approx((answered == y).mean(), abs=1e-9), name
        assert figures.bytes == path.stat().st_size
        assert 0 < figures.latency_ms < 1000


def test_the_files_are_smaller_and_hold_what_they_say(trained: Trained) -> None:
    figures = trained.found.precisions
    assert figures["fp16"].bytes < 0.56 * figures["fp32"].bytes
    for name in ("int8", "int8_static"):
        assert figures[cast(OnnxPrecision, name)].bytes < 0.36 * figures["fp32"].bytes
    assert {name: each.share for name, each in figures.items()} == dict.fromkeys(figures, 1.0)
    nodes = {name: Counter(n.op_type for n in onnx.load(trained.folder / FILES[name]).graph.node) for name in OTHERS}
    assert nodes["int8"]["ConvInteger"] == 3 and nodes["int8"]["MatMulInteger"] == 2
    assert nodes["int8_static"]["QuantizeLinear"] >= 5 and not nodes["int8_static"]["DynamicQuantizeLinear"]


@pytest.mark.long
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_makes_the_same_bytes(trained: Trained, tmp_path: Path, hash_seed: str) -> None:
    shutil.copy(trained.folder / exports.ONNX, tmp_path)
    np.save(tmp_path / "shown.npy", trained.data.train_x[:400:4].numpy())
    code = (
        "import sys, numpy; from pathlib import Path; from fl_engine.models.onnx_quantization import convert\n"
        "here = Path(sys.argv[1])\n"
        "for precision in ('fp16', 'int8', 'int8_static'): convert(precision, here, numpy.load(here / 'shown.npy'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env={"PYTHONHASHSEED": hash_seed, "PATH": ""},
                          cwd=Path(exports.__file__).parents[2], capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == "", "nothing is said of what the converters warn of"
    for name in OTHERS:
        assert digest(tmp_path / FILES[name]) == digest(trained.folder / FILES[name]), name


def test_the_ranges_are_those_of_the_calibration(trained: Trained, tmp_path: Path) -> None:
    shutil.copy(trained.folder / exports.ONNX, tmp_path)
    dark = np.zeros_like(trained.data.train_x[:8].numpy())
    assert digest(convert("int8_static", tmp_path, dark)) != digest(trained.folder / FILES["int8_static"])
    found = measure(tmp_path, "M1", ("int8_static",), replace(trained.data, train_x=torch.zeros_like(
        trained.data.train_x)), torch.arange(8), "sha")  # fmt: skip
    assert found.precisions["int8_static"].value < 0.6, "ranges of black images cut off everything"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


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
    "mobilenetv2": (
        MobileNetV2((1, 32, 32), 10, width=0.25),
        data_of(images(1, 32, 32), Classification(10), **STANDARD),
        set(),
    ),
    "wisdm_lstm": (
        WisdmLSTM((20, 6), 12),
        data_of(numbers(48, 20, 6), Classification(12), mean=(0.0,) * 6, std=(1.0,) * 6),
        {"int8", "int8_static"},
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
        {"int8", "int8_static"},
    ),
}


def written(family: ModelFamily, data: Data, folder: Path) -> exports.RawNetwork:
    """The freshly initialised network as model.onnx."""
    if exports.by_batch(family.module(FULL)):
        family = replace(cast(Any, family), norm="static")
    network = runnable(family, FULL, initial_params(family, 3)).eval()
    raw = exports.RawNetwork(network, exports.type_of(data), len(data.input_shape), data.mean, data.std, False).eval()
    exports._write(raw, data, folder / exports.ONNX)
    return raw


@pytest.mark.parametrize("name", FAMILIES)
def test_every_network_has_each_precision(name: str, tmp_path: Path) -> None:
    family, data, partly = FAMILIES[name]
    raw = written(family, data, tmp_path)
    found = measure(tmp_path, "M1", OTHERS, data, torch.arange(48), "sha")
    assert found.refused == {} and set(found.precisions) == {"fp32", *OTHERS}
    with torch.no_grad():
        wanted = raw(data.test_x)
    for each, apart in zip(OTHERS, (0.01, 0.1, 0.2), strict=True):
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
    session = onnxruntime.InferenceSession(str(convert("fp16", tmp_path, x.numpy())))
    (answer,) = session.run(None, {"samples": x.numpy()})
    with torch.no_grad():
        wanted = raw(x)
    torch.testing.assert_close(torch.from_numpy(answer), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


class EachStep(nn.Module):
    """(B, T, 6) -> an LSTM -> 4 outputs at each step, (B, 4, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(6, 32, batch_first=True), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.lstm(x)[0])
        return out.transpose(1, 2)


def test_an_lstm_that_answers_at_each_step_runs_in_fp16(tmp_path: Path) -> None:
    """ONNX Runtime 1.31 crashes on the converted file without a workaround."""
    data = data_of(numbers(20, 12, 6), Classification(4))
    raw = exports.RawNetwork(EachStep(), "float32", 2, (), (), False).eval()
    exports._write(raw, data, tmp_path / exports.ONNX)
    session = onnxruntime.InferenceSession(str(convert("fp16", tmp_path, data.train_x.numpy())))
    (answer,) = session.run(None, {"samples": data.test_x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(answer), raw(data.test_x), rtol=0.01, atol=1e-3)


# --------------------------------------------------------------------------------------------------- refusals
class Scaled(nn.Module):
    """Weights that nothing multiplies with as a matrix."""

    def __init__(self, times: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((6, 6), times))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None] * self.weight * self.weight).sum(1)


def test_what_is_refused_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    data = data_of(numbers(20, 6), Classification(6))
    raw = exports.RawNetwork(Scaled(2.0), "float32", 1, (), (), False).eval()
    exports._write(raw, data, tmp_path / exports.ONNX)
    found = measure(tmp_path, "M1", ("int8", "fp16", "int8"), data, torch.arange(8), "sha")
    assert list(found.precisions) == ["fp32", "fp16"]
    assert found.refused == {"int8": "ONNX Runtime has no int8 form of any layer with weights"}
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "model.fp16.onnx", "precision.json"}


@pytest.mark.parametrize("name", OTHERS)
def test_what_onnx_runtime_does_not_know_is_refused(trained: Trained, tmp_path: Path, name: OnnxPrecision) -> None:
    model = onnx.load(trained.folder / exports.ONNX)
    next(node for node in model.graph.node if node.op_type == "MaxPool").op_type = "NoSuchOperator"
    onnx.save(model, tmp_path / exports.ONNX)
    with pytest.raises(ModelError, match="ONNX Runtime cannot make or run it: "):
        convert(name, tmp_path, trained.data.train_x[:8].numpy())
    assert not (tmp_path / FILES[name]).exists()


def test_a_damaged_record_is_named(trained: Trained, tmp_path: Path) -> None:
    assert precisions.read(tmp_path) is None
    whole = (trained.folder / precisions.ABOUT).read_text()
    for wrong in ("", whole[:-9], whole.replace('"fp32"', '"fp64"'), whole.replace('"fp32": {', '"fp16": {')):
        (tmp_path / precisions.ABOUT).write_text(wrong)
        with pytest.raises(IntegrityError, match=r"precision\.json"):
            precisions.read(tmp_path)
