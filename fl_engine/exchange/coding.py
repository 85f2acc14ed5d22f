"""Encode and decode the tensors that the server and its clients exchange.

For downloads, the server encodes each payload once. The server also decodes the payload, so that server and clients use
identical weights. For uploads, a client encodes the difference between trained and received weights, and the server
adds the decoded difference. Running statistics and integers are not encoded. A `Header` maps tensor names to types and
shapes. Byte counts exclude the headers of files.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import torch

from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import Diverged, IntegrityError, ModelError, first_line
from fl_engine.core.slicing import blank, full_shapes, is_statistic, shapes, take
from fl_engine.core.types import (
    Assignment,
    Code,
    Codec,
    Codecs,
    Header,
    ParamLayout,
    Params,
    Pool,
    RoundPlan,
    SubmodelSpec,
)  # fmt: skip
from fl_engine.storage.store import tensor_bytes

PLAIN = Codecs()


def header_of(tensors: Params) -> Header:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def coded(header: Header) -> Header:
    """Return the part of a header that a codec encodes, sorted by tensor name."""
    return {
        name: (dtype, shape)
        for name, (dtype, shape) in sorted(header.items())
        if dtype.is_floating_point and not is_statistic(name)
    }


def encode(codec: Codec, tensors: Params, seed: int) -> Params:
    """Encode tensors. Raises ModelError for values that the codec cannot represent."""
    part = coded(header_of(tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name not in part}
    return {**codec.encode({name: tensors[name].detach().contiguous() for name in part}, seed), **rest}


def header(codec: Codec | None, given: Header) -> Header:
    """Return the header of the encoded tensors. `given` is the header before encoding."""
    if codec is None:
        return given
    part = coded(given)
    return {**codec.header(part), **{name: each for name, each in given.items() if name not in part}}


def streams(codec: Codec | None, given: Header) -> set[str]:
    """Return the names of the encoded tensors that may be shorter than `header` specifies."""
    made = {} if codec is None else codec.header(coded(given))
    return {name for name, (dtype, shape) in made.items() if dtype == torch.uint8 and len(shape) == 1}


def decode(codec: Codec, tensors: Params, given: Header) -> Params:
    """Decode tensors. `given` is the header of the decoded tensors. Raises IntegrityError for an invalid encoding."""
    if wrong := find_misfit(tensors, header(codec, given), streams(codec, given)):
        raise IntegrityError(wrong[1])
    part = coded(given)
    try:
        found = codec.decode({name: tensor for name, tensor in tensors.items() if name in codec.header(part)}, part)
    except IntegrityError:
        raise
    except Exception as error:  # user code may raise any exception for untrusted input
        raise IntegrityError(f"{type(codec).__name__} cannot decode the tensors: {first_line(error)}") from error
    if wrong := find_misfit(found, part):
        raise IntegrityError(f"{type(codec).__name__}.decode must return the original names and shapes: {wrong[1]}")
    return {name: found[name] if name in part else tensors[name] for name in given}


def find_misfit(tensors: Params, expected: Header, shorter: Collection[str] = ()) -> tuple[Code, str] | None:
    """Return a tuple (code, message) for the first difference between tensors and a header; None if they match.
    `shorter` names the one-dimensional tensors that may be shorter than the header specifies."""
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
    """Return the total size in bytes of tensors with this header."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in given.values())


def bytes_sent(assignment: Assignment) -> int:
    """Return the total size in bytes of an assignment's encoded weights and its tensors in `memory`."""
    return tensor_bytes(assignment.travels) + tensor_bytes(assignment.memory)


def encode_plan(plan: RoundPlan, pool: Pool, run: Codecs, seed: int) -> RoundPlan:
    """Return a copy of the plan in which each assignment contains the encoded and the decoded weights. An assignment
    without codecs uses the codecs of its level. A level without codecs uses the codecs of the run. A payload that
    several assignments share is encoded once. Raises Diverged if encoding fails."""
    made: dict[tuple[object, ...], tuple[Params, Params]] = {}

    def coded_for(assignment: Assignment) -> Assignment:
        codecs = assignment.codecs or pool[assignment.level].codecs or run
        if codecs.down is None:
            return assignment if codecs == PLAIN else replace(assignment, codecs=codecs)
        key = (assignment.level, codecs.down, *(id(tensor) for tensor in assignment.payload.values()))
        if key not in made:
            way = seeds.derive(seed, f"codec down {assignment.level}", plan.round)
            try:
                travels = encode(codecs.down, assignment.payload, way)
            except ModelError as error:
                weights = f"the weights of {pool[assignment.level].name} in round {plan.round + 1}"
                raise Diverged(f"codec.down cannot encode {weights}: {error}. Set a smaller learning rate") from error
            made[key] = travels, decode(codecs.down, travels, header_of(assignment.payload))
        travels, received = made[key]
        return replace(assignment, payload=received, codecs=codecs, encoded=travels)

    return replace(plan, assignments=tuple(coded_for(assignment) for assignment in plan.assignments))


def codec_up(assignment: Assignment) -> Codec | None:
    return None if assignment.codecs is None else assignment.codecs.up


def encode_update(assignment: Assignment, spec: SubmodelSpec, trained: Params, layout: ParamLayout) -> Params | None:
    """Return the encoded tensors that a client sends instead of the `trained` weights of the sub-model `spec`. Return
    None if the assignment has no codec for uploads. Raises ModelError for values that the codec cannot represent."""
    codec = codec_up(assignment)
    if codec is None:
        return None
    received, part = take(assignment.payload, layout, spec, have=assignment.spec), coded(header_of(trained))
    change = {name: t.detach() - received[name] if name in part else t for name, t in trained.items()}
    return encode(codec, change, seeds.derive(assignment.seed, "codec up", assignment.round, assignment.client))


def add_sizes(pool: Pool, family: ModelFamily, run: Codecs) -> Pool:
    """Return a copy of the pool with each level's encoded sizes in bytes. `run` contains the default codecs."""
    types = {name: t.dtype for name, t in blank(family).state_dict().items()}
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
