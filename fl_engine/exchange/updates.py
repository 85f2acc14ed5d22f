"""The checks of an update. The coordinator trusts nothing that a client sends.

All checks come before a tensor reaches the mean. A rejected update is a failure of the client at the stage `validate`,
with one of these codes:

    file        the file is missing, or larger than the sub-model can be
    unreadable  the store refuses this client's files, and no others
    schema      not a manifest, or not safetensors
    order       for another round, client or assignment
    signature   not signed with the key of the assignment
    spec        not a part of the sub-model that was sent, or not the part that the assignment determines
    checksum    the file's bytes differ from the manifest's checksum
    names       tensors are missing, or not part of the sub-model and of what a client keeps
    dtype, shape
    encoding    not an encoding of the codec
    finite      NaN, infinite, or so large that sums overflow
    statistics  a negative variance, or running statistics that moved much further than others
    examples    not the number of samples that the client holds, or more than partition.most
    metrics     undeclared or out of bounds, or not the steps, multiply-adds or memory that follow from the assignment
    norm        weights that moved much further than others
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fl_engine.core import costs
from fl_engine.core.clients import (
    STATE,
    Shapes,
    apart,
    bounds_of,
    evaluation_bounds,
    header,
    kept_by_clients,
    out_of_bounds,
    travelling,
)
from fl_engine.core.contracts import Algorithm, ModelFamily
from fl_engine.core.errors import ClientError, FlexfleetError, IntegrityError, ModelError
from fl_engine.core.slicing import contains, largest, shapes, take
from fl_engine.core.task import Task
from fl_engine.core.types import (
    HEAD,
    ClientFailure,
    ClientUpdate,
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
from fl_engine.exchange.manifest import HEADER_BYTES, STAGES, Manifest, Read, Rejected
from fl_engine.fleet.devices import observe
from fl_engine.storage.store import decode, sha256


def payload_bytes(order: WorkOrder, state: Header | None = None) -> int:
    """Return the most bytes of an update's file: the encoding of all that was sent, and the client's `state`."""
    if order.evaluates:
        return _most_bytes({})
    weights = coding.header(coding.codec_up(order), coding.header_of(order.payload))
    return _most_bytes(weights | _on_the_way(state or {}))


@dataclass(frozen=True)
class Rules:
    """What the coordinator knows of honest updates."""

    layout: ParamLayout
    samples: Sequence[int]
    """Each client's number of samples."""
    pool: Pool = ()
    fleet: Sequence[Device] = ()
    algorithm: Algorithm | None = None
    """Determines sub-model, steps and multiply-adds. None: any part of what was sent and any work up to a bound is
    accepted."""
    family: ModelFamily | None = None
    seed: int | None = None
    """Determines the free memory; None: the client measures it."""
    held: Sequence[int] = ()
    """Each client's number of samples that it holds out for evaluation."""
    task: Task | None = None
    """Determines the metrics of an evaluation; None: no client evaluates."""
    most: int | None = None
    """The most samples that a client may claim; None: exactly `samples` and `held`."""

    @cached_property
    def kept(self) -> Shapes:
        """Shapes of what each client keeps."""
        return {} if self.family is None else kept_by_clients(self.algorithm, self.family, self.pool)

    @cached_property
    def client_state(self) -> Header:
        """Types and shapes of the tensors of what each client keeps."""
        return header(self.kept)


def update_of(manifest: Manifest, payload: Read, order: WorkOrder, rules: Rules | None) -> Outcome:
    """Return the outcome of a manifest, whose file `payload` reads. Raises Rejected; without rules only if the file
    does not match the manifest."""
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
    assert codec is None or rules is not None, "decoding needs the network, which the rules have"
    # Not the limit of the pruned sub-model, because a client pads its file if the upload has a fixed length.
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
    """Decode and check an encoded update of a client in this process. Raises Rejected."""
    expected = _expected(rules, update.spec, order)
    payload, decoding = _weights(update.travels, update.spec, order, expected, rules.layout)
    return replace(update, payload=payload, seconds_decode=decoding)


def _weights(
    tensors: Params, spec: SubmodelSpec, order: WorkOrder, expected: Header, layout: ParamLayout
) -> tuple[Params, float]:
    """Return the decoded and checked weights, and the seconds of decoding."""
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
    """Return the most tensors of an update."""
    return len(coding.header(coding.codec_up(order), coding.header_of(order.payload))) + len(rules.client_state)


def _check_header(value: bytes, tensors: int) -> None:
    """Limit the header before it is parsed, because the parser needs 25 times an entry's bytes, and a second for each
    MB. The header may be padded with spaces (`pieces.padded`)."""
    entries = value[8 : 8 + int.from_bytes(value[:8], "little")].rstrip(b" ")
    if len(entries) > HEADER_BYTES * (1 + tensors):
        raise Rejected("schema", f"a header of {len(entries)} bytes, for at most {tensors} tensors")


def _most_bytes(expected: Header) -> int:
    return coding.bytes_of(expected) + HEADER_BYTES * (1 + len(expected))


def _check_metrics(metrics: Mapping[str, float], bounds: Mapping[str, tuple[float, float]]) -> None:
    if wrong := out_of_bounds(metrics, bounds):
        raise Rejected("metrics", wrong)


def _check_evaluation(manifest: Manifest, spec: SubmodelSpec, order: WorkOrder, rules: Rules) -> None:
    if spec != order.spec:
        raise Rejected("spec", "not the sub-model that was sent for evaluation")
    _check_count(manifest.num_examples, order.client, rules.held, rules.most)
    _check_metrics(manifest.metrics, {} if rules.task is None else evaluation_bounds(rules.task))


def _check_count(said: int, client: int, known: Sequence[int], most: int | None) -> None:
    if most is not None and not 1 <= said <= most:
        raise Rejected("examples", f"expected from 1 to {most} samples (partition.most), got {said}")
    if most is None and said != (held := known[client] if client < len(known) else 0):
        raise Rejected("examples", f"expected {held} samples, got {said}")


def _check_made(spec: SubmodelSpec, order: WorkOrder, samples: int, metrics: Mapping[str, float], rules: Rules) -> None:
    """Check sub-model, steps, multiply-adds and free memory. The sub-model's classes depend on the client's data, so
    they are not compared. Machines differ in the last bits of a normal draw, so free memory is compared to nine
    digits."""
    free = metrics["free"]
    if rules.seed is not None:
        expected = observe(rules.fleet[order.client], rules.seed, order.round)
        if not math.isclose(free, expected, rel_tol=1e-9):
            raise Rejected("metrics", f"expected {expected:g} % of free memory, got {free:g} %")
    if rules.algorithm is None:
        return
    context = TaskContext(rules.layout, rules.pool, rules.fleet[order.client], free)
    try:
        task = rules.algorithm.task(order, context)
    except (ClientError, ModelError) as error:
        raise Rejected("spec", f"no sub-model fits into {free:g} % of free memory: {error}") from error
    if _but_classes(spec) != _but_classes(task.spec):
        raise Rejected("spec", f"not the sub-model for {free:g} % of free memory")
    work = {"steps": float(costs.steps(task, samples))}
    if rules.family is not None:
        work["macs"] = costs.macs(rules.family, task, samples)
    for name, count in work.items():
        if metrics[name] != count:
            raise Rejected("metrics", f"expected {count:g} {name}, got {metrics[name]:g}")


def fits_nobody(order: WorkOrder, rules: Rules | None, algorithm: Algorithm) -> bool:
    """Whether no sub-model of the assignment fits into the simulated free memory. False if clients measure it."""
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
    """Return the header of the decoded weights."""
    layout, kept = rules.layout, rules.kept
    try:
        layout.check(spec)
    except (ModelError, TypeError, ValueError) as error:
        raise Rejected("spec", str(error)) from error
    if not contains(layout, order.spec, spec):
        raise Rejected("spec", "not a part of the sub-model that was sent")
    found = shapes(layout, spec, {name: tensor.shape for name, tensor in order.payload.items()})
    return {name: (order.payload[name].dtype, shape) for name, shape in found.items() if name not in kept}


def check_state(state: Params, expected: Header) -> None:
    """Raise Rejected unless `state` has the header `expected` (`client_state.header`) and valid numbers."""
    tensors = travelling(state)
    if wrong := coding.misfit(tensors, _on_the_way(expected)):
        raise Rejected(*wrong)
    _check_numbers(tensors)


def _check_numbers(tensors: Params) -> None:
    for name, tensor in tensors.items():
        least, most = (float(end) for end in tensor.aminmax())  # both are NaN if one number is
        if not max(-least, most) <= largest(name):
            raise Rejected("finite", f"{name} holds numbers that are not finite, or beyond {largest(name):g}")
        if least < 0 and name.endswith("running_var") and not name.startswith(STATE):
            raise Rejected("statistics", f"{name} holds a negative variance")
