"""ONNX files of an exported level with fewer bits: fp16 and int8.

FedX: Adaptive Model Decomposition and Quantization for IoT Federated Learning (Lai et al.), Sec. III-C: "we round up
the number of quantized bits to Int8, Float16, and a full precision (Float32) for storing tensors and performing
computations on IoT devices". `rounded_up` is this rule. The paper does not say how a device's runtime gets 8-bit
activations; here ONNX Runtime does it in its two ways:

    fp16          weights and activations; a processor without arithmetic in fp16 computes in fp32 from fp16 weights
    int8          dynamic: the ranges of activations are computed for each batch
    int8_static   the ranges are computed once, from samples of the server's proxy data

Both int8 files have weights of 8 bits. Layers without an 8-bit form in ONNX Runtime stay in fp32; `stored` returns the
share of the others. The normalisation of raw samples stays in fp32, because numbers such as a pressure of 750 would
lose too much in fp16.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_engine.core.errors import ModelError
from fl_engine.core.types import Codec
from fl_engine.models.export import ONNX

OnnxPrecision = Literal["fp32", "fp16", "int8", "int8_static"]
FILES: dict[OnnxPrecision, str] = {
    "fp32": ONNX,
    "fp16": "model.fp16.onnx",
    "int8": "model.int8.onnx",
    "int8_static": "model.int8_static.onnx",
}
CALIBRATED = 32
"""Samples in a batch of the calibration."""


# -------------------------------------------------------------------------------------------------- the rule
def rounded_up(bits: int | None) -> OnnxPrecision:
    """The precision of a device that receives weights of so many bits (1 or more); None: they are not quantised."""
    return "fp32" if bits is None or bits > 16 else "fp16" if bits > 8 else "int8"


def of_codec(codec: Codec | None) -> OnnxPrecision:
    """`rounded_up` for a codec's field `bits`, or for its `levels` per sign; fp32 without such a field."""
    levels = getattr(codec, "levels", None)
    return rounded_up(getattr(codec, "bits", None) if levels is None else levels.bit_length())


# ------------------------------------------------------------------------------------------------ conversion
def convert(precision: OnnxPrecision, folder: Path, calibration: NDArray[Any]) -> Path:
    """Write the file of another precision beside `folder`'s model.onnx. The same file and samples give the same bytes.
    Raises ModelError if ONNX Runtime cannot convert the network, or would leave all of its weights unchanged.

    Args:
        calibration: (n, ...), raw samples for int8_static, n >= 1.
    """
    source, target = folder / ONNX, folder / FILES[precision]
    try:
        with _quiet():
            _CONVERTED[precision](source, target, calibration)
        session(target)
    except Exception as error:  # the converters and onnxruntime share no error class
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise refuse(target, f"ONNX Runtime cannot make or run it: {said}") from error
    if not stored(precision, source, target):
        raise refuse(target, f"ONNX Runtime has no {precision} form of any layer with weights")
    return target


def refuse(target: Path, why: str) -> ModelError:
    target.unlink(missing_ok=True)
    return ModelError(why)


def _to_fp16(source: Path, target: Path, _: NDArray[Any]) -> None:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(source)
    # Nodes outside of the network's own scope normalise samples, or average over exits.
    names = (node.name for node in model.graph.node)
    around = [name for name in names if name.startswith("/") and not name.startswith("/network/")]
    made = convert_float_to_float16(model, keep_io_types=True, node_block_list=around)
    onnx.save(_unfused(_in_fp32(made, around)), target)


def _in_fp32(model: Any, around: Sequence[str]) -> Any:
    """Remove the rounding to fp16 and back that the converter puts between two nodes in fp32, or an input and such a
    node."""
    import onnx

    graph, fp16, fp32 = model.graph, onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT

    def is_cast(node: Any, to: int) -> bool:
        return node.op_type == "Cast" and [a.i for a in node.attribute if a.name == "to"] == [to]

    exact = {each.name for each in graph.input} | {o for node in graph.node if node.name in around for o in node.output}
    maker = {name: node for node in graph.node for name in node.output}
    outputs = {each.name for each in graph.output}
    same = {}
    for node in graph.node:
        before = maker.get(node.input[0]) if is_cast(node, fp32) and node.output[0] not in outputs else None
        if before is not None and is_cast(before, fp16) and before.input[0] in exact:
            same[node.output[0]] = before.input[0]
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
    while unused := _unused(graph, outputs):
        for node in unused:
            graph.node.remove(node)
    return model


def _unfused(model: Any) -> Any:
    """Insert a reshape to the same shape between a transpose and a matrix product (an LSTM before a linear layer). ONNX
    Runtime 1.31 fuses the two over the rounding between them, and crashes."""
    from onnx import helper, numpy_helper

    graph = model.graph
    maker = {name: node for node in graph.node for name in node.output}
    for at, node in reversed(list(enumerate(graph.node))):
        for place, given in enumerate(node.input if node.op_type == "MatMul" else ()):
            before = maker.get(given)
            if before is None or before.op_type != "Transpose":
                continue
            (order,) = (list(a.ints) for a in before.attribute if a.name == "perm")
            if order[-1] != len(order) - 1:
                continue  # a transposed matrix
            same = f"{node.name}_input{place}"
            shape = numpy_helper.from_array(np.zeros(len(order), dtype=np.int64), f"{same}_shape")  # 0: unchanged
            graph.initializer.append(shape)
            graph.node.insert(at, helper.make_node("Reshape", [given, shape.name], [same], same))
            node.input[place] = same
    return model


def _unused(graph: Any, outputs: set[str]) -> list[Any]:
    used = outputs | {name for node in graph.node for name in node.input}
    return [node for node in graph.node if not used & set(node.output)]


def _to_int8(source: Path, target: Path, _: NDArray[Any]) -> None:
    """Weights are unsigned, because ONNX Runtime's integer convolution on a CPU does not take signed ones."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(source, target, weight_type=QuantType.QUInt8)


def _to_int8_static(source: Path, target: Path, calibration: NDArray[Any]) -> None:
    """Signed weights with a scale for each channel, ranges from the lowest to the highest activation seen."""
    import onnx
    from onnxruntime.quantization import quantize_static

    given = onnx.load(source).graph.input[0].name
    quantize_static(source, target, _Batches(given, calibration), per_channel=True)


_CONVERTED = {"fp16": _to_fp16, "int8": _to_int8, "int8_static": _to_int8_static}


class _Batches:
    """Samples in the form that ONNX Runtime's calibration expects."""

    def __init__(self, given: str, samples: NDArray[Any]) -> None:
        self._batches = ({given: samples[i : i + CALIBRATED]} for i in range(0, len(samples), CALIBRATED))

    def get_next(self) -> dict[str, NDArray[Any]] | None:
        return next(self._batches, None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the converters' advice to optimise the graph first (on Python's root logger), which torch's export does,
    and warnings about unused constants."""
    import onnxruntime

    def silent(_: logging.LogRecord) -> bool:
        return False

    root = logging.getLogger()
    root.addFilter(silent)
    onnxruntime.set_default_logger_severity(3)  # errors
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        onnxruntime.set_default_logger_severity(2)  # warnings, its default
        root.removeFilter(silent)


def stored(precision: OnnxPrecision, source: Path, target: Path) -> float:
    """Share of the numbers in weight matrices and kernels that `target` stores in this precision."""
    import onnx

    kept = onnx.TensorProto
    types = {
        "fp32": {kept.FLOAT},
        "fp16": {kept.FLOAT16},
        "int8": {kept.INT8, kept.UINT8},
        "int8_static": {kept.INT8, kept.UINT8},
    }[precision]

    def count(path: Path, wanted: set[int]) -> int:
        weights = [each for each in onnx.load(path).graph.initializer if len(each.dims) > 1]
        return sum(int(np.prod(each.dims)) for each in weights if each.data_type in wanted)

    return count(target, types) / max(1, count(source, {kept.FLOAT}))


def session(path: Path) -> Any:
    """An ONNX Runtime session on one thread, so that latencies and outputs are comparable between machines."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
