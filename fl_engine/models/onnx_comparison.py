"""What the ONNX files of an exported level give and cost beside fp32: metric, bytes, latency on one thread of a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from fl_engine.core.errors import IntegrityError, ModelError, brief
from fl_engine.core.samples import Data
from fl_engine.core.task import measured
from fl_engine.models.export import ONNX
from fl_engine.models.onnx_quantization import FILES, OnnxPrecision, convert, refuse, session, stored
from fl_engine.storage.store import FolderStore
from fl_engine.tasks import Classification

ABOUT = "precision.json"
BLOCKS, RUNS, WARM_UP = 10, 10, 3
"""Latency: the files take turns, BLOCKS times, so that a slow moment of the machine does not meet one file alone. In
each turn a file answers WARM_UP times untimed, then RUNS times."""
BATCH: Mapping[OnnxPrecision, int] = {"fp32": 128, "fp16": 128, "int8": 1, "int8_static": 128}
"""Test samples that are answered at a time: of int8 one, as on a device, because the ranges of its activations are
those of all samples that are answered together. Of the others a sample's answer does not depend on its batch."""


OBSERVED = 128
"""Test samples whose answers are compared with their targets at a time: of boxes, each image takes 1 MB meanwhile."""


class Figures(BaseModel):
    """One file of a level, run by ONNX Runtime on one thread of a CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    file: str
    value: float
    """The task's metric (accuracy in [0, 1], R2) on the test set."""
    agreement: float | None
    """Share of the test samples that it puts into the same class as fp32 does; null: the task has no classes."""
    bytes: int = Field(gt=0, lt=1 << 63)
    latency_ms: float = Field(gt=0)
    """Median time of one sample, in milliseconds: what its one thread computed, without the time in which the machine
    did other work."""
    share: float
    """Share of the numbers in weight matrices and kernels that the file stores with this precision's bits."""


class Precisions(BaseModel):
    """precision.json: the files of one level."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1] = 1
    level: str
    model_sha256: str
    """The global model that the level was exported from."""
    metric: str
    test_samples: int
    calibration_samples: int
    """Of the proxy data, for int8_static; 0: it was not asked for."""
    runs: int = BLOCKS * RUNS
    """Timed answers of each file."""
    onnxruntime: str
    cpu: str
    """The widest vector instructions of the processor that the latencies are of, as torch names them."""
    precisions: dict[OnnxPrecision, Figures]
    refused: dict[OnnxPrecision, str]
    """Why a precision that was asked for is not there."""

    @field_validator("precisions")
    @classmethod
    def _beside_fp32(cls, value: dict[OnnxPrecision, Figures]) -> dict[OnnxPrecision, Figures]:
        if "fp32" not in value:
            raise ValueError("fp32 is missing, which the others stand beside")
        return value


def measure(
    folder: Path, level: str, wanted: Sequence[OnnxPrecision], data: Data, calibration: Tensor, model_sha256: str
) -> Precisions:
    """Converts the model.onnx in `folder` to the `wanted` precisions, measures each beside fp32, and writes
    precision.json. `calibration` (n,): positions of proxy samples in the training data.

    What cannot be converted, or answers with numbers that are not finite, is listed in `refused`; the others go on.
    """
    import onnxruntime

    samples = data.train_x[calibration].numpy()
    sessions: dict[OnnxPrecision, Any] = {"fp32": session(folder / ONNX)}
    answers = {precision: _answers(each, data.test_x, BATCH[precision]) for precision, each in sessions.items()}
    refused: dict[OnnxPrecision, str] = {}
    for precision in wanted:
        if precision in sessions:
            continue
        try:
            path = convert(precision, folder, samples)
            opened = session(path)
            answer = _answers(opened, data.test_x, BATCH[precision])
            if not bool(torch.isfinite(answer).all()):
                raise refuse(path, "its answers to test samples are not finite: a number is too large for it")
        except ModelError as error:
            refused[precision] = str(error)
        else:
            sessions[precision], answers[precision] = opened, answer
    latencies = _latencies(sessions, data.test_x[:1].numpy())
    found = Precisions(
        level=level,
        model_sha256=model_sha256,
        metric=data.task.metric.name,
        test_samples=len(data.test_y),
        calibration_samples=len(samples) if "int8_static" in wanted else 0,
        onnxruntime=onnxruntime.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
        precisions={
            precision: Figures(
                file=FILES[precision],
                value=_value(data, answer),
                agreement=_agreement(data, answer, answers["fp32"]),
                bytes=(folder / FILES[precision]).stat().st_size,
                latency_ms=latencies[precision],
                share=stored(precision, folder / ONNX, folder / FILES[precision]),
            )
            for precision, answer in answers.items()
        },
        refused=refused,
    )
    FolderStore(folder).put(ABOUT, (found.model_dump_json(indent=1) + "\n").encode())
    return found


def _answers(opened: Any, x: Tensor, batch: int) -> Tensor:
    """The answers (N, outputs, ...) to raw samples (N, ...), of which `batch` at a time are asked."""
    given = opened.get_inputs()[0].name
    return torch.cat([torch.from_numpy(opened.run(None, {given: part.numpy()})[0]) for part in torch.split(x, batch)])


def _value(data: Data, answers: Tensor) -> float:
    pairs = zip(torch.split(answers, OBSERVED), torch.split(data.test_y, OBSERVED), strict=True)
    values, _ = measured(data.task, [data.task.observe(*pair) for pair in pairs])
    return float(values[data.task.metric.name])


def _agreement(data: Data, answers: Tensor, wanted: Tensor) -> float | None:
    if not isinstance(data.task, Classification):
        return None
    return float((answers.argmax(1) == wanted.argmax(1)).double().mean())


def _latencies(sessions: Mapping[OnnxPrecision, Any], sample: NDArray[Any]) -> dict[OnnxPrecision, float]:
    """In milliseconds, the median of BLOCKS * RUNS answers to one raw sample (1, ...)."""
    seconds: dict[OnnxPrecision, list[float]] = {precision: [] for precision in sessions}
    for _ in range(BLOCKS):
        for precision, opened in sessions.items():
            given = {opened.get_inputs()[0].name: sample}
            for place in range(WARM_UP + RUNS):
                began = time.thread_time()
                opened.run(None, given)
                if place >= WARM_UP:
                    seconds[precision].append(time.thread_time() - began)
    return {precision: 1e3 * statistics.median(each) for precision, each in seconds.items()}


def read(folder: Path) -> Precisions | None:
    """A folder's precision.json; None: there is none. Raises IntegrityError where it is damaged."""
    path = folder / ABOUT
    try:
        return Precisions.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise IntegrityError(f"{path} is no list of a level's precisions: {brief(error)}") from error
