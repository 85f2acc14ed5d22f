"""Codecs between the server and its clients.

Down, the server encodes each payload once and decodes it too, so both ends continue from the same bits. Up, a client
encodes the difference between the trained and the received weights, and the server adds the decoded difference. Running
statistics and integers are not encoded. Byte counts are those of the encoded tensors, without file headers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import Diverged, IntegrityError, ModelError, first_line
from fl_engine.core.slicing import blank, full_shapes, is_statistic, shapes, take
from fl_engine.core.types import (
    Code,
    Codec,
    Codecs,
    Header,
    ParamLayout,
    Params,
    Pool,
    RoundPlan,
    SubmodelSpec,
    WorkOrder,
)
from fl_engine.storage.store import tensor_bytes

PLAIN = Codecs()


def header_of(tensors: Params) -> Header:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def coded(header: Header) -> Header:
    """Return the tensors that a codec encodes, sorted by name."""
    return {
        name: (dtype, shape)
        for name, (dtype, shape) in sorted(header.items())
        if dtype.is_floating_point and not is_statistic(name)
    }


def encoded(codec: Codec, tensors: Params, seed: int) -> Params:
    """Encode tensors. Raises ModelError for numbers that the codec cannot express."""
    part = coded(header_of(tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name not in part}
    found = codec.encode({name: tensors[name].detach().contiguous() for name in part}, seed)
    return {**found, **rest}


def header(codec: Codec | None, given: Header) -> Header:
    """Return the header of the encoding of tensors with the header `given`."""
    if codec is None:
        return given
    part = coded(given)
    return {**codec.header(part), **{name: each for name, each in given.items() if name not in part}}


def streams(codec: Codec | None, given: Header) -> set[str]:
    """Return the names of the tensors that may be shorter than in `header`."""
    made = {} if codec is None else codec.header(coded(given))
    return {name for name, (dtype, shape) in made.items() if dtype == torch.uint8 and len(shape) == 1}


def decoded(codec: Codec, tensors: Params, given: Header) -> Params:
    """Decode tensors with the header `given`. Raises IntegrityError if `tensors` is not such an encoding."""
    if wrong := misfit(tensors, header(codec, given), streams(codec, given)):
        raise IntegrityError(wrong[1])
    part = coded(given)
    try:
        found = codec.decode({name: tensor for name, tensor in tensors.items() if name in codec.header(part)}, part)
    except IntegrityError:
        raise
    except Exception as error:  # the codec may be a user's own, and its input is a stranger's
        raise IntegrityError(f"{type(codec).__name__} cannot decode it: {first_line(error)}") from error
    if wrong := misfit(found, part):
        raise IntegrityError(f"{type(codec).__name__} decodes other tensors than it was given: {wrong[1]}")
    return {name: found[name] if name in part else tensors[name] for name in given}


def misfit(tensors: Params, expected: Header, shorter: Collection[str] = ()) -> tuple[Code, str] | None:
    """Return why tensors do not fit a header; None if they fit. `shorter` names flat tensors that may be shorter."""
    odd, missing = sorted(tensors.keys() - expected.keys()), sorted(expected.keys() - tensors.keys())
    if odd:
        return "names", f"the sub-model has no {', '.join(odd[:4])}"
    if missing:
        return "names", f"the sub-model's {', '.join(missing[:4])} is missing"
    for name, tensor in tensors.items():
        dtype, shape = expected[name]
        if tensor.dtype != dtype:
            return "dtype", f"{name} is {tensor.dtype}, not {dtype}"
        if tensor.shape != shape and not (name in shorter and tensor.dim() == 1 and len(tensor) < shape[0]):
            return "shape", f"{name} is {list(tensor.shape)}, not {list(shape)}"
    return None


def bytes_of(given: Header) -> int:
    """Return the bytes of tensors with this header."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in given.values())


def bytes_sent(order: WorkOrder) -> int:
    """Return the bytes of an assignment's tensors: the encoded weights, and what the client has kept."""
    return tensor_bytes(order.travels) + tensor_bytes(order.memory)


def sent(plan: RoundPlan, pool: Pool, run: Codecs, seed: int) -> RoundPlan:
    """Return the plan as clients receive it. An assignment's codecs are its own, else its level's, else the run's.
    Assignments that share a payload share its encoding. Raises Diverged for weights that a codec cannot express."""
    made: dict[tuple[object, ...], tuple[Params, Params]] = {}

    def of(order: WorkOrder) -> WorkOrder:
        codecs = order.codecs or pool[order.level].codecs or run
        if codecs.down is None:
            return order if codecs == PLAIN else replace(order, codecs=codecs)
        key = (order.level, codecs.down, *(id(tensor) for tensor in order.payload.values()))
        if key not in made:
            way = seeds.derive(seed, f"codec down {order.level}", plan.round)
            try:
                travels = encoded(codecs.down, order.payload, way)
            except ModelError as error:
                raise Diverged(
                    f"round {plan.round + 1}: codec.down cannot encode the weights of {pool[order.level].name}: "
                    f"{error}. Choose another codec, or a smaller learning rate"
                ) from error
            made[key] = travels, decoded(codecs.down, travels, header_of(order.payload))
        travels, received = made[key]
        return replace(order, payload=received, codecs=codecs, encoded=travels)

    return replace(plan, orders=tuple(of(order) for order in plan.orders))


def codec_up(order: WorkOrder) -> Codec | None:
    return None if order.codecs is None else order.codecs.up


def answered(order: WorkOrder, spec: SubmodelSpec, trained: Params, layout: ParamLayout) -> Params | None:
    """Return what a client sends instead of its trained weights (`spec`, a part of what it received); None without a
    codec. Raises ModelError for numbers that the codec cannot express."""
    codec = codec_up(order)
    if codec is None:
        return None
    received, part = take(order.payload, layout, spec, have=order.spec), coded(header_of(trained))
    change = {name: t.detach() - received[name] if name in part else t for name, t in trained.items()}
    return encoded(codec, change, seeds.derive(order.seed, "codec up", order.round, order.client))


def restored(
    codec: Codec, tensors: Params, expected: Header, order: WorkOrder, spec: SubmodelSpec, layout: ParamLayout
) -> Params:
    """Return the weights that a client trained, after decoding. Raises IntegrityError as `decoded`."""
    received, part = take(order.payload, layout, spec, have=order.spec), coded(expected)
    change = decoded(codec, tensors, expected)
    return {name: received[name] + t if name in part else t for name, t in change.items()}


def sized(pool: Pool, family: ModelFamily, run: Codecs) -> Pool:
    """Return the pool with the bytes of each level. A level without codecs of its own has the run's."""
    types: Mapping[str, torch.dtype] = {name: t.dtype for name, t in blank(family).state_dict().items()}
    layout, full = family.layout(), full_shapes(family)
    found = []
    for model in pool:
        codecs = model.codecs or run
        if codecs != PLAIN:
            plain = {name: (types[name], shape) for name, shape in shapes(layout, model.spec, full).items()}
            down, up = (bytes_of(header(codec, plain)) for codec in (codecs.down, codecs.up))
            model = replace(model, sizes=(down, up))
        found.append(model)
    return tuple(found)
