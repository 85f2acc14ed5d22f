"""Measures the ONNX files of an exported level beside fp32: metric, bytes, latency on one thread of a CPU."""

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
"""Latency: the files take turns, BLOCKS times, so that a slow moment of the machine does not affect only one file. In
each turn a file runs WARM_UP times untimed, then RUNS times."""
BATCH: Mapping[OnnxPrecision, int] = {"fp32": 128, "fp16": 128, "int8": 1, "int8_static": 128}
"""Test samples in a batch. int8 gets one, as on a device, because the ranges of its activations depend on the batch."""
OBSERVED = 128
"""Test samples whose outputs are compared with their targets at a time. Boxes take 1 MB per image."""


class Figures(BaseModel):
    """One file of a level, run by ONNX Runtime on one thread of a CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    file: str
    value: float
    """The task's metric (accuracy in [0, 1], R2) on the test set."""
    agreement: float | None
    """Share of the test samples that get the same class as from fp32; null: the task has no classes."""
    bytes: int = Field(gt=0, lt=1 << 63)
    latency_ms: float = Field(gt=0)
    """Median CPU time of one sample, in milliseconds, on one thread."""
    share: float
    """Share of the numbers in weight matrices and kernels that the file stores in this precision."""


class Precisions(BaseModel):
    """precision.json: the files of one level."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schema_version: Literal[1]
    level: str
    model_sha256: str
    """The global model that the level was exported from."""
    metric: str
    test_samples: int
    calibration_samples: int
    """Of the proxy data, for int8_static; else 0."""
    runs: int
    """Timed runs of each file."""
    onnxruntime: str
    cpu: str
    """The widest vector instructions of the processor, in torch's words."""
    precisions: dict[OnnxPrecision, Figures]
    refused: dict[OnnxPrecision, str]
    """Why a requested precision is missing."""

    @field_validator("precisions")
    @classmethod
    def _beside_fp32(cls, value: dict[OnnxPrecision, Figures]) -> dict[OnnxPrecision, Figures]:
        if "fp32" not in value:
            raise ValueError("fp32 is missing")
        return value


def measure(
    folder: Path, level: str, wanted: Sequence[OnnxPrecision], data: Data, calibration: Tensor, model_sha256: str
) -> Precisions:
    """Convert the model.onnx in `folder` to the `wanted` precisions, measure each beside fp32, and write
    precision.json. Files that cannot be converted, or whose outputs are not finite, are listed in `refused`.

    Args:
        calibration: (n,), positions of proxy samples in the training data.
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
                raise refuse(path, "its outputs for test samples are not finite: a number is too large for it")
        except ModelError as error:
            refused[precision] = str(error)
        else:
            sessions[precision], answers[precision] = opened, answer
    latencies = _latencies(sessions, data.test_x[:1].numpy())
    found = Precisions(
        schema_version=1,
        runs=BLOCKS * RUNS,
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
    """The outputs (N, outputs, ...) for raw samples (N, ...), in batches."""
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
    """The median of BLOCKS * RUNS runs with one raw sample (1, ...), in milliseconds."""
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
    """A folder's precision.json, or None. Raises IntegrityError if it is damaged."""
    path = folder / ABOUT
    try:
        return Precisions.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        raise IntegrityError(f"{path} is not a list of a level's precisions: {brief(error)}") from error
