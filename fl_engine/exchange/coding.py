"""What the server and clients do with a codec; without a codec nothing here is called.

Down, the server encodes each payload once, and decodes it too: an order's payload is what its clients receive, so both
ends continue from the same bits, wherever a client runs. Up, a client encodes the change between what it trained and
what it received, and the server adds the decoded change. Running statistics and integers travel as they are, both ways.
Bytes are those of the tensors that travel, without the headers of files.
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


# ------------------------------------------------------------------------------------------------------- one way
def header_of(tensors: Params) -> Header:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def coded(header: Header) -> Header:
    """The part that a codec codes, sorted by name."""
    return {
        name: (dtype, shape)
        for name, (dtype, shape) in sorted(header.items())
        if dtype.is_floating_point and not is_statistic(name)
    }


def encoded(codec: Codec, tensors: Params, seed: int) -> Params:
    """What travels instead of these tensors. Raises ModelError for numbers that the codec cannot express."""
    part = coded(header_of(tensors))
    rest = {name: tensor for name, tensor in tensors.items() if name not in part}
    found = codec.encode({name: tensors[name].detach().contiguous() for name in part}, seed)
    return {**found, **rest}


def header(codec: Codec | None, given: Header) -> Header:
    """The header of what travels instead of tensors with this header."""
    if codec is None:
        return given
    part = coded(given)
    return {**codec.header(part), **{name: each for name, each in given.items() if name not in part}}


def streams(codec: Codec | None, given: Header) -> set[str]:
    """Names of the tensors that may be shorter than `header` says."""
    made = {} if codec is None else codec.header(coded(given))
    return {name for name, (dtype, shape) in made.items() if dtype == torch.uint8 and len(shape) == 1}


def decoded(codec: Codec, tensors: Params, given: Header) -> Params:
    """The tensors with the header `given`, from what travelled. Raises IntegrityError where that is no encoding of
    such."""
    if wrong := misfit(tensors, header(codec, given), streams(codec, given)):
        raise IntegrityError(wrong[1])
    part = coded(given)
    try:
        found = codec.decode({name: tensor for name, tensor in tensors.items() if name in codec.header(part)}, part)
    except IntegrityError:
        raise
    except Exception as error:  # the codec may be a user's own, and its input a stranger's
        raise IntegrityError(f"{type(codec).__name__} cannot decode it: {first_line(error)}") from error
    if wrong := misfit(found, part):
        raise IntegrityError(f"what {type(codec).__name__} decodes is something else: {wrong[1]}")
    return {name: found[name] if name in part else tensors[name] for name in given}


def misfit(tensors: Params, expected: Header, shorter: Collection[str] = ()) -> tuple[Code, str] | None:
    """Why these tensors do not fit this header; None: they do. `shorter`: names of flat tensors that may be shorter."""
    odd, missing = sorted(tensors.keys() - expected.keys()), sorted(expected.keys() - tensors.keys())
    if odd:
        return "names", f"the sub-model has no {', '.join(odd[:4])}"
    if missing:
        return "names", f"the sub-model's {', '.join(missing[:4])} did not come"
    for name, tensor in tensors.items():
        dtype, shape = expected[name]
        if tensor.dtype != dtype:
            return "dtype", f"{name} is {tensor.dtype}, not {dtype}"
        if tensor.shape != shape and not (name in shorter and tensor.dim() == 1 and len(tensor) < shape[0]):
            return "shape", f"{name} is {list(tensor.shape)}, not {list(shape)}"
    return None


def bytes_of(given: Header) -> int:
    """The bytes of tensors with this header, without a file's header."""
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in given.values())


# ---------------------------------------------------------------------------------------------------------- down
def bytes_sent(order: WorkOrder) -> int:
    """The bytes of all that travels with an order: its weights, as they are coded, and its memory."""
    return tensor_bytes(order.travels) + tensor_bytes(order.memory)


def sent(plan: RoundPlan, pool: Pool, run: Codecs, seed: int) -> RoundPlan:
    """The plan as clients receive it. An order's codecs are its own, else its level's, else the run's. Orders that
    share a payload share its encoding. Raises Diverged for weights that a codec cannot express."""
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
                    f"round {plan.round + 1}: the weights of {pool[order.level].name} cannot be sent as codec.down "
                    f"says: {error}. Choose another codec, or a smaller learning rate"
                ) from error
            made[key] = travels, decoded(codecs.down, travels, header_of(order.payload))
        travels, received = made[key]
        return replace(order, payload=received, codecs=codecs, encoded=travels)

    return replace(plan, orders=tuple(of(order) for order in plan.orders))


# ------------------------------------------------------------------------------------------------------------ up
def codec_up(order: WorkOrder) -> Codec | None:
    return None if order.codecs is None else order.codecs.up


def answered(order: WorkOrder, spec: SubmodelSpec, trained: Params, layout: ParamLayout) -> Params | None:
    """What a client sends instead of the weights that it trained (`spec`, a part of what it received); None: it sends
    these. Raises ModelError for numbers that the codec cannot express."""
    codec = codec_up(order)
    if codec is None:
        return None
    received, part = take(order.payload, layout, spec, have=order.spec), coded(header_of(trained))
    change = {name: t.detach() - received[name] if name in part else t for name, t in trained.items()}
    return encoded(codec, change, seeds.derive(order.seed, "codec up", order.round, order.client))


def restored(
    codec: Codec, tensors: Params, expected: Header, order: WorkOrder, spec: SubmodelSpec, layout: ParamLayout
) -> Params:
    """The weights that a client trained, as the codec gives them back. Raises IntegrityError as `decoded`."""
    received, part = take(order.payload, layout, spec, have=order.spec), coded(expected)
    change = decoded(codec, tensors, expected)
    return {name: received[name] + t if name in part else t for name, t in change.items()}


# --------------------------------------------------------------------------------------------------------- a pool
def sized(pool: Pool, family: ModelFamily, run: Codecs) -> Pool:
    """The pool, with the bytes of each level, which follow from its sub-model and codecs. A level without codecs of
    its own has those of the run."""
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
