"""Updates as files, and why one is refused: the coordinator trusts nothing that a client sends.

An update is `<client>.safetensors`, and a manifest with its checksum; neither can hold code. Everything is checked
before a tensor reaches the mean. An update that fails is `Rejected` with one of the codes below: that is a failure of
the client at the stage `validate`, and never stops the coordinator.

    file        missing, or of more bytes than the sub-model can have
    unreadable  the store refuses this client's files, and no others
    schema      not a manifest, or not safetensors
    order       for another round, client or order than the one given
    signature   not signed with the key that came with the order
    spec        a sub-model that is no part of what was sent, or not the one that the order makes
    checksum    other bytes than the manifest says
    names       tensors that the sub-model, or what a client keeps, does not have or lacks
    dtype, shape
    encoding    not an encoding that the codec can make
    finite      not a number, infinite, or so large that sums overflow
    statistics  a variance below zero; or running statistics that moved much further than others
    examples    another number of samples than the client holds, or more than it may hold (partition.most)
    metrics     other figures than the engine's and the declared ones, one beyond its bounds, or other steps,
                multiply-adds or memory than the order makes
    norm        weights that moved much further than others
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_engine.codecs import sections_of
from fl_engine.core import workload
from fl_engine.core.client_state import STATE, Shapes, apart, header, kept_by_clients, travelling
from fl_engine.core.contracts import (
    Algorithm,
    ModelFamily,
)
from fl_engine.core.errors import ClientError, FlexfleetError, IntegrityError, ModelError, brief, printable
from fl_engine.core.measures import bounds_of, evaluation_bounds, out_of_bounds
from fl_engine.core.samples import Task
from fl_engine.core.slicing import contains, largest, shapes, take
from fl_engine.core.types import (
    HEAD,
    ClientFailure,
    ClientUpdate,
    Code,
    Device,
    Header,
    Outcome,
    ParamLayout,
    Params,
    Pool,
    Stage,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)
from fl_engine.exchange import coding
from fl_engine.fleet.devices import observe
from fl_engine.storage.pieces import Pieces, laid_out, padded
from fl_engine.storage.store import canonical, decode, sha256

MANIFEST_BYTES = 2**15
"""More bytes than a manifest has besides its sub-model; a failure's reason of 4096 characters is the longest part."""
CHANNEL_BYTES = 8
"""More bytes than a manifest has for a kept channel: its number and a comma."""
HEADER_BYTES = 2**10
"""More bytes than safetensors writes for a tensor besides its numbers, and than a manifest has for a group's name."""


def payload_bytes(order: WorkOrder, state: Header | None = None) -> int:
    """No update of this order is a larger file: at most what was sent comes back, as its codec makes it, and the
    client's `state`."""
    if order.evaluates:
        return _most_bytes({})
    weights = coding.header(coding.codec_up(order), coding.header_of(order.payload))
    return _most_bytes(weights | _on_the_way(state or {}))


def manifest_bytes(order: WorkOrder) -> int:
    """No manifest that answers this order is longer: it names the kept channels one by one, at most those of what was
    sent."""
    shapes = [tensor.shape for tensor in order.payload.values()]
    return MANIFEST_BYTES + sum(HEADER_BYTES + CHANNEL_BYTES * sum(shape) for shape in shapes)


class Rejected(Exception):
    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {printable(text)[:1000]}")
        self.code = code


class Manifest(BaseModel):
    """One outcome. `sha256` and `spec` belong to an update, `stage`, `reason` and `code` to a failure."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    schema_version: Literal[1] = 1
    round: int
    client: int
    order: str
    """sha256 of the order, so that an update is never adopted for another plan."""
    sha256: str | None = None
    spec: dict[str, Any] | None = None
    num_examples: int = 0
    metrics: dict[str, float] = Field(default={}, max_length=64)
    stage: str | None = Field(default=None, max_length=64)
    reason: str | None = Field(default=None, max_length=4096)
    code: Code | None = None
    signature: str | None = None
    """HMAC-SHA256 of all the rest, with the key that came with the order."""


@dataclass(frozen=True)
class Rules:
    """What the coordinator knows of honest updates. `samples` holds each client's sample count. From `algorithm`, an
    order and the client's free memory follow sub-model, steps and multiply-adds (None: any part of what was sent is
    accepted, and any work up to a bound). Free memory follows from `seed` (None: the client measures it)."""

    layout: ParamLayout
    samples: Sequence[int]
    pool: Pool = ()
    fleet: Sequence[Device] = ()
    algorithm: Algorithm | None = None
    family: ModelFamily | None = None
    seed: int | None = None
    held: Sequence[int] = ()
    """By client, how many samples it holds out for evaluation."""
    task: Task | None = None
    """From it follows what an evaluation reports; None: no client is asked for one."""
    most: int | None = None
    """The most samples that a client may say it holds; None: as many as `samples` and `held` say."""

    @cached_property
    def kept(self) -> Shapes:
        """What each client keeps."""
        return {} if self.family is None else kept_by_clients(self.algorithm, self.family, self.pool)

    @cached_property
    def client_state(self) -> Header:
        """Types and shapes of the tensors of what each client keeps."""
        return header(self.kept)


KeyOf = Callable[[WorkOrder], bytes]
"""The key that signs a client's answer to an order."""


def key_of(secret: bytes, whose: Literal["client", "coordinator"] = "client") -> KeyOf:
    """Keys that follow from the run's secret: one for each order, good for nothing else. With its own keys the
    coordinator signs what it says of a client: that its pod failed, or that its update failed validation."""
    return lambda order: hmac.digest(secret, f"{whose} {order_sum(order)}".encode(), "sha256")


def order_sum(order: WorkOrder) -> str:
    """sha256 of the order without its tensors, which follow from the round's state."""
    told = [order.round, order.client, order.seed, order.level, order.spec.to_json(), dict(order.hints)]
    codecs = order.codecs or coding.PLAIN
    told += [] if codecs == coding.PLAIN else [sections_of(codecs)]
    return sha256(canonical([*told, "evaluate"] if order.evaluates else told))


def packed(outcome: Outcome, order: WorkOrder, length: int | None = None) -> tuple[Manifest, Pieces | None]:
    """What goes through the store: a manifest, not signed yet, and what is in its file (None: a failure), filled up
    to `length` where one is given."""
    manifest = Manifest(round=order.round, client=order.client, order=order_sum(order))
    if isinstance(outcome, ClientFailure):
        why = {"stage": outcome.stage, "reason": outcome.reason[:4096], "code": outcome.code}
        return manifest.model_copy(update=why), None
    value = laid_out(outcome.travels | travelling(outcome.state))
    value = value if length is None else padded(value, length)
    said = {
        "sha256": sha256(value),
        "spec": outcome.spec.to_json(),
        "num_examples": outcome.num_examples,
        "metrics": {name: float(value) for name, value in outcome.metrics.items()},
    }
    return manifest.model_copy(update=said), value


def signed(manifest: Manifest, key: bytes | None) -> Manifest:
    """Without a key (clients of this machine) the signature is a checksum: it shows damage, not lies."""
    return manifest.model_copy(update={"signature": _signature(manifest, key or b"")})


def _signature(manifest: Manifest, key: bytes) -> str:
    return hmac.new(key, canonical(manifest.model_dump(exclude={"signature"})), "sha256").hexdigest()


Read = Callable[[int | None], bytes]
"""Reads a file of at most this many bytes, or raises IntegrityError."""


def manifest_of(
    file: Read, order: WorkOrder, key: bytes | None, own: bytes | None = None, closed: str | None = None
) -> Manifest:
    """A manifest that answers this order, signed with the client's `key` or the coordinator's `own`. With `closed`, the
    manifest's checksum (`said_of`) has to be that instead: clients with other keys, or none, may have answered a round
    that is closed. A client can report only that it dropped out, or could not prune or train. Raises Rejected."""
    try:
        manifest = Manifest.model_validate_json(file(manifest_bytes(order)))
        said = canonical(manifest.model_dump(exclude={"signature"}))
    except IntegrityError as error:
        raise Rejected("file", str(error)) from error
    except ValidationError as error:
        raise Rejected("schema", f"not a manifest: {brief(error)}") from error
    except ValueError as error:  # a number that JSON has no word for
        raise Rejected("metrics", str(error)) from error
    found = (manifest.round, manifest.client, manifest.order)
    if found != (order.round, order.client, order_sum(order)):
        raise Rejected("order", f"answers round {manifest.round}, client {manifest.client}, another order")
    if closed is not None:
        heard = next((form for form in (manifest, _by_client(manifest)) if said_of(form) == closed), None)
        if heard is None:
            raise Rejected("order", "replaced after the round was closed")
        return heard
    if own is not None and _is_signed(manifest, said, own):
        return manifest
    if not _is_signed(manifest, said, key or b""):
        raise Rejected("signature", "not signed with the key that came with the order" if key else "damaged")
    return manifest if key is None else _by_client(manifest)


def said_of(manifest: Manifest) -> str:
    """A checksum of everything in a manifest that can change the model."""
    return sha256(canonical(manifest.model_dump(exclude={"metrics", "signature"})))


def _by_client(manifest: Manifest) -> Manifest:
    if manifest.spec is not None:
        return manifest
    stage = manifest.stage if manifest.stage in SAID_BY_CLIENTS else "train"
    reason = printable(manifest.reason or "")[:500]
    code = "finite" if stage == "train" and manifest.code == "finite" else None  # the client's training diverged
    return manifest.model_copy(update={"stage": stage, "reason": reason, "code": code})


def _is_signed(manifest: Manifest, said: bytes, key: bytes) -> bool:
    expected = hmac.new(key, said, "sha256").hexdigest()
    return hmac.compare_digest(expected.encode(), (manifest.signature or "").encode())


STAGES: tuple[Stage, ...] = get_args(Stage)

SAID_BY_CLIENTS = ("drop", "prune", "train", "evaluate")
"""Stages that a client can report; only the coordinator reports the others."""


def update_of(manifest: Manifest, payload: Read, order: WorkOrder, rules: Rules | None) -> Outcome:
    """The outcome of a manifest; `payload` reads its file. Raises Rejected; without rules only where the file does not
    match the manifest."""
    if manifest.spec is None:
        stage: Stage = next((stage for stage in STAGES if stage == manifest.stage), "train")
        return ClientFailure(order.round, order.client, stage, manifest.reason or "", manifest.code)
    try:
        spec = SubmodelSpec.from_json(manifest.spec)
    except (FlexfleetError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("spec", f"not a sub-model: {error}") from error
    if order.evaluates and rules is not None:
        _check_evaluation(manifest, spec, order, rules)
    expected = None if rules is None or order.evaluates else _expected(rules, spec, order)
    codec = None if order.evaluates else coding.codec_up(order)
    assert codec is None or rules is not None, "what a codec codes is decoded by rules, which know the network"
    # The limit of the whole order, also where the client has pruned: with a fixed length it fills its file up to that.
    limit = None if rules is None else payload_bytes(order, rules.client_state)
    try:
        value = payload(limit)
    except IntegrityError as error:
        raise Rejected("file", str(error)) from error
    if sha256(value) != manifest.sha256:
        raise Rejected("checksum", f"the sha256 is not {manifest.sha256}")
    if rules is not None:
        _check_header(value, 0 if order.evaluates else _tensors(order, rules))
    try:
        tensors = decode(value, "the update")
    except IntegrityError as error:
        raise Rejected("schema", str(error)) from error
    del value  # as large as the tensors
    if order.evaluates and tensors:
        raise Rejected("names", f"an evaluation brings no tensors, got {', '.join(sorted(tensors)[:4])}")
    weights, state = apart(tensors)
    decoding = 0.0
    encoded = None if codec is None else weights
    if expected is not None and rules is not None:
        check_state(state, rules.client_state)
        weights, decoding = _weights(weights, spec, order, expected, rules.layout)
        _check_count(manifest.num_examples, order.client, rules.samples, rules.most)
        _check_metrics(manifest.metrics, bounds_of(rules.algorithm, codec is not None))
        _check_made(spec, order, manifest.num_examples, manifest.metrics, rules)
    update = ClientUpdate(order.round, order.client, spec, weights, manifest.num_examples, manifest.metrics)
    return replace(update, state=state, encoded=encoded, seconds_decode=decoding)


def received(update: ClientUpdate, order: WorkOrder, rules: Rules) -> ClientUpdate:
    """An encoded update of a client in this process, as it would arrive through the store. Raises Rejected."""
    expected = _expected(rules, update.spec, order)
    payload, decoding = _weights(update.travels, update.spec, order, expected, rules.layout)
    return replace(update, payload=payload, seconds_decode=decoding)


def _weights(
    tensors: Params, spec: SubmodelSpec, order: WorkOrder, expected: Header, layout: ParamLayout
) -> tuple[Params, float]:
    """The weights of an update, decoded and checked; and the seconds of decoding."""
    codec, decoding = coding.codec_up(order), 0.0
    if wrong := coding.misfit(tensors, coding.header(codec, expected), coding.streams(codec, expected)):
        raise Rejected(*wrong)
    if codec is not None:
        started = time.monotonic()
        try:
            tensors = coding.restored(codec, tensors, expected, order, spec, layout)
        except IntegrityError as error:
            raise Rejected("encoding", str(error)) from error
        decoding = time.monotonic() - started
    _check_numbers(tensors)
    return tensors, decoding


def _tensors(order: WorkOrder, rules: Rules) -> int:
    """How many an update of this order has at most."""
    return len(coding.header(coding.codec_up(order), coding.header_of(order.payload))) + len(rules.client_state)


def _check_header(value: bytes, tensors: int) -> None:
    """A header of so many tensors, which may be filled up by spaces (`pieces.padded`). The reader needs 25 times an
    entry's bytes, and a second for each MB."""
    told = value[8 : 8 + int.from_bytes(value[:8], "little")].rstrip(b" ")
    if len(told) > HEADER_BYTES * (1 + tensors):
        raise Rejected("schema", f"a header of {len(told)} bytes, for at most {tensors} tensors")


def _most_bytes(expected: Header) -> int:
    return coding.bytes_of(expected) + HEADER_BYTES * (1 + len(expected))


def _check_metrics(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> None:
    if wrong := out_of_bounds(metrics, bounds):
        raise Rejected("metrics", wrong)


def _check_evaluation(manifest: Manifest, spec: SubmodelSpec, order: WorkOrder, rules: Rules) -> None:
    if spec != order.spec:
        raise Rejected("spec", "evaluates another sub-model than the one that was sent")
    _check_count(manifest.num_examples, order.client, rules.held, rules.most)
    _check_metrics(manifest.metrics, {} if rules.task is None else evaluation_bounds(rules.task))


def _check_count(said: int, client: int, known: Sequence[int], most: int | None) -> None:
    if most is not None and not 1 <= said <= most:
        raise Rejected("examples", f"says {said} samples, from 1 to {most} are expected (partition.most)")
    if most is None and said != (held := known[client] if client < len(known) else 0):
        raise Rejected("examples", f"says {said} samples, the client holds {held}")


def _check_made(spec: SubmodelSpec, order: WorkOrder, samples: int, metrics: Mapping[str, float], rules: Rules) -> None:
    """`samples`: as many as the client holds, as was checked. The sub-model's classes are not compared: they depend on
    the client's data. Free memory is compared to nine digits: machines differ in the last bits of a normal draw."""
    free = metrics["free"]
    if rules.seed is not None:
        expected = observe(rules.fleet[order.client], rules.seed, order.round)
        if not math.isclose(free, expected, rel_tol=1e-9):
            raise Rejected("metrics", f"says that {free:g} % is free, in this round the client has {expected:g} %")
    if rules.algorithm is None:
        return
    context = TaskContext(rules.layout, rules.pool, rules.fleet[order.client], free)
    try:
        task = rules.algorithm.task(order, context)
    except (ClientError, ModelError) as error:
        raise Rejected("spec", f"with {free:g} % free, no client makes a sub-model of it: {error}") from error
    if _but_classes(spec) != _but_classes(task.spec):
        raise Rejected("spec", f"with {free:g} % free, a client makes another sub-model of what was sent")
    work = {"steps": float(workload.steps(task, samples))}
    if rules.family is not None:
        work["macs"] = workload.macs(rules.family, task, samples)
    for name, count in work.items():
        if metrics[name] != count:
            raise Rejected("metrics", f"says {metrics[name]:g} {name}, the order makes {count:g}")


def fits_nobody(order: WorkOrder, rules: Rules | None, algorithm: Algorithm) -> bool:
    """Whether no client makes a sub-model of this order with what its simulated device has free. False where clients
    measure that: only they know."""
    if rules is None or rules.seed is None or order.evaluates:
        return False
    device = rules.fleet[order.client]
    context = TaskContext(rules.layout, rules.pool, device, observe(device, rules.seed, order.round))
    try:
        take(order.payload, rules.layout, algorithm.task(order, context).spec, have=order.spec)
    except (ClientError, ModelError):
        return True
    return False


def _but_classes(spec: SubmodelSpec) -> SubmodelSpec:
    return SubmodelSpec.of({group: kept for group, kept in spec.kept.items() if group != HEAD}, spec.blocks)


def _on_the_way(state: Header) -> Header:
    return {STATE + name: form for name, form in state.items()}


def _expected(rules: Rules, spec: SubmodelSpec, order: WorkOrder) -> Header:
    """The header of the decoded weights."""
    layout, kept = rules.layout, rules.kept
    try:
        layout.check(spec)
    except (ModelError, TypeError, ValueError) as error:
        raise Rejected("spec", str(error)) from error
    if not contains(layout, order.spec, spec):
        raise Rejected("spec", "no part of the sub-model that was sent")
    found = shapes(layout, spec, {name: tensor.shape for name, tensor in order.payload.items()})
    return {name: (order.payload[name].dtype, shape) for name, shape in found.items() if name not in kept}


def check_state(state: Params, expected: Header) -> None:
    """Raises Rejected unless names, types, shapes and numbers are those of a client's state (`client_state.header`)."""
    tensors = travelling(state)
    if wrong := coding.misfit(tensors, _on_the_way(expected)):
        raise Rejected(*wrong)
    _check_numbers(tensors)


def _check_numbers(tensors: Params) -> None:
    for name, tensor in tensors.items():
        least, most = (float(end) for end in tensor.aminmax())  # both are NaN where one number is
        if not max(-least, most) <= largest(name):
            raise Rejected("finite", f"{name} is not finite everywhere, or beyond {largest(name):g}")
        if least < 0 and name.endswith("running_var") and not name.startswith(STATE):
            raise Rejected("statistics", f"{name} holds a variance below zero")
