"""Convert the ONNX file of an exported level to lower precisions, and compare the converted files with the fp32 file.

FedX (Adaptive Model Decomposition and Quantization for IoT Federated Learning, Lai et al., section III-C) writes: "we
round up the number of quantized bits to Int8, Float16, and a full precision (Float32) for storing tensors and
performing computations on IoT devices". `rounded_up` implements this rule. The paper does not say how a device computes
8-bit activations. Here ONNX Runtime quantises the activations.

With `fp16`, weights and activations have 16 bits. Processors without fp16 arithmetic compute in fp32 with fp16 weights.
With `int8`, weights have 8 bits, and the ranges of the activations are computed for each batch.

Layers that ONNX Runtime does not support in 8 bits stay in fp32; `Figures.share` measures the converted fraction.
Samples are normalised in fp32, because large values, such as a pressure of 750, would lose too many digits in fp16.
"""

from __future__ import annotations

import copy
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fl_engine.core.errors import ModelError
from fl_engine.core.records import Strict, parsed
from fl_engine.core.samples import Data, outputs_of
from fl_engine.core.task import measured
from fl_engine.core.types import Codec
from fl_engine.models.export import ONNX, RawNetwork, open_session, raw_network, run_session, write_onnx
from fl_engine.storage.store import FolderStore
from fl_engine.tasks import Classification

OnnxPrecision = Literal["fp32", "fp16", "int8"]
FILES: Mapping[OnnxPrecision, str] = {"fp32": ONNX, "fp16": "model.fp16.onnx", "int8": "model.int8.onnx"}
ABOUT = "precision.json"
BLOCKS, RUNS, WARM_UP = 10, 10, 3
"""Latency is measured in BLOCKS blocks. In every block, each file is run WARM_UP times without timing and then RUNS
times with timing, so that a slow phase of the machine affects all files equally."""
BATCH: Mapping[OnnxPrecision, int] = {"fp32": 128, "fp16": 128, "int8": 1}
"""Number of test samples per batch. For int8, the batch size is 1, as on a device, because activation ranges depend on
the batch."""
OBSERVED = 128
"""Number of test samples per call of `observe`. The number is small, because detected boxes take 1 MB per image."""


class Figures(Strict):
    """Measurements of one ONNX file with ONNX Runtime on one CPU thread."""

    file: str
    value: float
    """Test metric of the task, such as accuracy in [0, 1] or R2."""
    agreement: float | None
    """Fraction of test samples for which this and the fp32 file predict the same class; only for classification."""
    bytes: int = Field(gt=0, lt=1 << 63)
    latency_ms: float = Field(gt=0)
    """Median CPU time for one sample, in milliseconds, on one thread."""
    share: float
    """Number of weights stored in this precision, divided by the number of all weights in matrices and kernels."""


class Precisions(Strict):
    """Content of precision.json: measurements of the ONNX files of one level."""

    schema_version: Literal[1]
    level: str
    model_sha256: str
    """SHA-256 of the global model from which the level was exported."""
    metric: str
    test_samples: int
    runs: int
    """Number of timed runs per file."""
    onnxruntime: str
    cpu: str
    """Widest vector instruction set of the processor in torch's spelling, such as AVX512."""
    precisions: dict[OnnxPrecision, Figures]
    refused: dict[OnnxPrecision, str]
    """Error message for each requested precision without a file."""


def rounded_up(bits: int | None) -> OnnxPrecision:
    """Return the precision for a device that receives weights with `bits` bits, or weights without quantization if
    `bits` is None."""
    return "fp32" if bits is None or bits > 16 else "fp16" if bits > 8 else "int8"


def precision_of(codec: Codec | None) -> OnnxPrecision:
    """Return the precision for a codec from its field `bits` or `levels` (per sign); fp32 if it has neither field."""
    levels = getattr(codec, "levels", None)
    return rounded_up(getattr(codec, "bits", None) if levels is None else levels.bit_length())


def measure(
    folder: Path, level: str, wanted: Sequence[OnnxPrecision], network: RawNetwork, data: Data, model_sha256: str
) -> Precisions:
    """Write an ONNX file for each precision in `wanted`, measure the file, and write precision.json. All files are in
    `folder`. Precisions for which the conversion fails or the outputs are not finite are listed in `refused`."""
    import onnxruntime

    sessions: dict[OnnxPrecision, Any] = {"fp32": open_session(folder / ONNX)}
    outputs: dict[OnnxPrecision, Tensor] = {"fp32": _outputs(sessions["fp32"], data.test_x, BATCH["fp32"])}
    refused: dict[OnnxPrecision, str] = {}
    for precision in dict.fromkeys(each for each in wanted if each != "fp32"):
        try:
            session = open_session(convert(precision, network, data, folder))
            found = _outputs(session, data.test_x, BATCH[precision])
            if not bool(torch.isfinite(found).all()):
                raise ModelError(f"the outputs are not finite, because values exceed the range of {precision}")
        except ModelError as error:
            (folder / FILES[precision]).unlink(missing_ok=True)
            refused[precision] = str(error)
        else:
            sessions[precision], outputs[precision] = session, found
    latencies = _latencies(sessions, data.test_x[:1])
    predictions = {precision: found.argmax(1) for precision, found in outputs.items()}
    content = Precisions(
        schema_version=1,
        level=level,
        model_sha256=model_sha256,
        metric=data.task.metric.name,
        test_samples=len(data.test_y),
        runs=BLOCKS * RUNS,
        onnxruntime=onnxruntime.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
        precisions={
            precision: Figures(
                file=FILES[precision],
                value=_value(data, found),
                agreement=float((predictions[precision] == predictions["fp32"]).double().mean())
                if isinstance(data.task, Classification)
                else None,
                bytes=(folder / FILES[precision]).stat().st_size,
                latency_ms=latencies[precision],
                share=_share(precision, folder),
            )
            for precision, found in outputs.items()
        },
        refused=refused,
    )
    FolderStore(folder).put(ABOUT, (content.model_dump_json(indent=1) + "\n").encode())
    return content


def read(folder: Path) -> Precisions | None:
    """Return the content of precision.json; None if the file is missing. Raises IntegrityError for a damaged file."""
    path = folder / ABOUT
    return parsed(Precisions, path.read_bytes(), str(path)) if path.exists() else None


def convert(precision: OnnxPrecision, network: RawNetwork, data: Data, folder: Path) -> Path:
    """Write the ONNX file for one precision to `folder` and return the path. Identical networks yield identical files.

    Raises ModelError if the network cannot be converted, or if the conversion would not change any weight.
    """
    target = folder / FILES[precision]
    try:
        if precision == "fp16":
            _write_fp16(network, data, target)
        else:
            _write_int8(folder / ONNX, target)
        open_session(target)
    except Exception as error:  # The errors of converters and onnxruntime have no common base class.
        cause = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(f"ONNX Runtime cannot convert or run the network: {cause}") from error
    if not _share(precision, folder):
        raise ModelError(f"ONNX Runtime does not support {precision} for any layer with weights")
    return target


class _Half(nn.Module):
    """Network that computes in fp16 but accepts and returns fp32 tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).half()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        exits = outputs_of(self.network(x.half() if x.is_floating_point() else x))
        return tuple(each.float() for each in exits)


def _write_fp16(network: RawNetwork, data: Data, target: Path) -> None:
    """Export the network in fp16. Insert a no-op reshape between a transpose and a matrix product, as between an LSTM
    and a linear layer. Without the reshape, ONNX Runtime 1.31 fuses the two operations in fp16 and crashes."""
    import onnx
    from onnx import helper, numpy_helper

    write_onnx(raw_network(_Half(network.network), data, network.ensemble), data, target)
    model = onnx.load(target)
    graph = model.graph
    producer = {name: node for node in graph.node for name in node.output}
    for position, node in reversed(list(enumerate(graph.node))):
        for index, source in enumerate(node.input if node.op_type == "MatMul" else ()):
            before = producer.get(source)
            if before is None or before.op_type != "Transpose":
                continue
            (order,) = (list(a.ints) for a in before.attribute if a.name == "perm")
            if order[-1] == len(order) - 1:  # ONNX Runtime fuses a transpose only if it keeps the last axis.
                same = f"{node.name}_input{index}"
                shape = numpy_helper.from_array(np.zeros(len(order), dtype=np.int64), f"{same}_shape")  # 0: unchanged
                graph.initializer.append(shape)
                graph.node.insert(position, helper.make_node("Reshape", [source, shape.name], [same], same))
                node.input[index] = same
    onnx.save(model, target)


def _write_int8(source: Path, target: Path) -> None:
    """Write unsigned 8-bit weights, because ONNX Runtime's convolution does not support signed weights on a CPU."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # Hide the advice to optimise the graph, which torch has already optimised.
    try:
        quantize_dynamic(source, target, weight_type=QuantType.QUInt8)
    finally:
        logging.disable(before)


def _outputs(session: Any, x: Tensor, batch: int) -> Tensor:
    """Run the ONNX session in batches and return the outputs (N, outputs, ...) for raw samples (N, ...)."""
    return torch.cat([run_session(session, part) for part in torch.split(x, batch)])


def _value(data: Data, outputs: Tensor) -> float:
    pairs = zip(torch.split(outputs, OBSERVED), torch.split(data.test_y, OBSERVED), strict=True)
    values, _ = measured(data.task, [data.task.observe(*pair) for pair in pairs])
    return float(values[data.task.metric.name])


def _latencies(sessions: Mapping[OnnxPrecision, Any], sample: Tensor) -> dict[OnnxPrecision, float]:
    """Map each precision to a CPU time in ms: the median of BLOCKS * RUNS runs on one raw sample (1, ...)."""
    seconds: dict[OnnxPrecision, list[float]] = {precision: [] for precision in sessions}
    for _ in range(BLOCKS):
        for precision, session in sessions.items():
            inputs = {session.get_inputs()[0].name: sample.numpy()}
            for number in range(WARM_UP + RUNS):
                start = time.thread_time()
                session.run(None, inputs)
                if number >= WARM_UP:
                    seconds[precision].append(time.thread_time() - start)
    return {precision: 1e3 * statistics.median(each) for precision, each in seconds.items()}


def _share(precision: OnnxPrecision, folder: Path) -> float:
    import onnx

    kind = onnx.TensorProto
    types = {"fp32": {kind.FLOAT}, "fp16": {kind.FLOAT16}, "int8": {kind.INT8, kind.UINT8}}[precision]

    def count(name: str, types: set[int]) -> int:
        weights = [each for each in onnx.load(folder / name).graph.initializer if len(each.dims) > 1]
        return sum(int(np.prod(each.dims)) for each in weights if each.data_type in types)

    return count(FILES[precision], types) / max(1, count(ONNX, {kind.FLOAT}))
