"""Check clients' updates, because the coordinator does not trust clients.

All checks run before any tensor of the update is aggregated. A rejected update is a failure at the stage `validate`
with one of these codes:

    `file`: The file is missing, or is larger than the sub-model allows.
    `unreadable`: The files of this client cannot be read from the store, but other files can.
    `schema`: The files are not a valid manifest and a valid safetensors file.
    `assignment`: The update is for another round, client or assignment.
    `signature`: The manifest is not signed with the key for the assignment.
    `spec`: The sub-model of the update differs from the sub-model that the assignment determines.
    `checksum`: The file's bytes do not match the manifest's checksum.
    `names`: Tensors are missing, or belong neither to the sub-model nor to the client's state.
    `dtype`, `shape`: The type or shape of a tensor differs from the sub-model.
    `encoding`: The codec cannot decode the tensors.
    `finite`: A value is NaN, infinite, or so large that sums overflow.
    `statistics`: A variance is negative, or the running statistics changed more than `rounds.norm_bound` allows.
    `examples`: The sample count is not the client's known sample count, or is larger than `partition.most`.
    `metrics`: A metric is undeclared or out of bounds, or differs from the value that the assignment determines.
    `norm`: The weights changed more than `rounds.norm_bound` allows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from fl_engine.core import clients, costs
from fl_engine.core.clients import STATE, Shapes, kept_by_clients, with_prefix
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ClientError, FlexfleetError, IntegrityError, ModelError
from fl_engine.core.slicing import all_classes, contains, largest, shapes, take
from fl_engine.core.types import (
    Assignment,
    ClientFailure,
    ClientResult,
    ClientUpdate,
    Header,
    ParamLayout,
    Params,
    Stage,
    SubmodelSpec,
    TaskContext,
)  # fmt: skip
from fl_engine.exchange import coding
from fl_engine.exchange.manifest import HEADER_BYTES, STAGES, Read, Rejected, ResultManifest
from fl_engine.fleet.devices import observe
from fl_engine.storage.store import decode, sha256

if TYPE_CHECKING:
    from fl_engine.exchange.client import Site


def payload_bytes(assignment: Assignment, state: Header | None = None) -> int:
    """Return the maximum size in bytes of an update's file, which contains encoded weights and the client's `state`."""
    tensors = _largest(assignment, state or {})
    return coding.bytes_of(tensors) + HEADER_BYTES * (1 + len(tensors))


def _largest(assignment: Assignment, state: Header) -> Header:
    if assignment.evaluates:
        return {}
    weights = coding.header(coding.codec_up(assignment), coding.header_of(assignment.payload))
    return weights | {STATE + name: form for name, form in state.items()}


@dataclass(frozen=True)
class Rules:
    """The rules that a valid update must satisfy."""

    site: Site
    algorithm: Algorithm | None = None
    """Algorithm that determines the sub-model, the steps and the multiply-adds; None to check only their bounds."""
    seed: int | None = None
    """Seed of the simulated free memory; None if clients measure their free memory."""

    @cached_property
    def samples(self) -> tuple[int, ...]:
        """Number of training samples of each client; empty if the server does not know these numbers."""
        return () if self.site.most is not None else tuple(map(len, self.site.partition.clients))

    @cached_property
    def kept(self) -> Shapes:
        """Shapes of the tensors in each client's state."""
        return kept_by_clients(self.algorithm, self.site.family, self.site.pool)

    @cached_property
    def client_state(self) -> Header:
        """Types and shapes of the tensors in each client's state."""
        return clients.header(self.kept)


def read_update(manifest: ResultManifest, payload: Read, assignment: Assignment, rules: Rules | None) -> ClientResult:
    """Return the result that a manifest describes. `payload` reads the update's file. If `rules` is None, only the
    checksum is checked. Raises Rejected if the update is not valid."""
    if manifest.spec is None:
        stage: Stage = next((stage for stage in STAGES if stage == manifest.stage), "train")
        why = (manifest.reason or "", manifest.code, 0.0, manifest.details)
        return ClientFailure(assignment.round, assignment.client, stage, *why)
    try:
        spec = SubmodelSpec.from_json(manifest.spec)
    except (FlexfleetError, TypeError, ValueError, AttributeError) as error:
        raise Rejected("spec", f"not a sub-model: {error}") from error
    if assignment.evaluates and rules is not None:
        _check_evaluation(manifest, spec, assignment, rules)
    expected = None if rules is None or assignment.evaluates else _expected(rules, spec, assignment)
    codec = None if assignment.evaluates else coding.codec_up(assignment)
    assert codec is None or rules is not None, "decoding needs the network, which the rules have"
    # If uploads must have a fixed length, clients pad the file, so the limit depends only on the sent sub-model.
    limit = None if rules is None else payload_bytes(assignment, rules.client_state)
    try:
        value = payload(limit)
    except IntegrityError as error:
        raise Rejected("file", str(error)) from error
    if sha256(value) != manifest.sha256:
        raise Rejected("checksum", f"the sha256 is not {manifest.sha256}")
    if rules is not None:
        _check_header(value, len(_largest(assignment, rules.client_state)))
    try:
        tensors = decode(value, "the update")
    except IntegrityError as error:
        raise Rejected("schema", str(error)) from error
    del value  # free memory, because `value` is as large as the tensors
    if assignment.evaluates and tensors:
        raise Rejected("names", f"an evaluation must not return tensors, got {', '.join(sorted(tensors)[:4])}")
    weights, state = clients.split_state(tensors)
    decoding = 0.0
    encoded = None if codec is None else weights
    if expected is not None and rules is not None:
        check_state(state, rules.client_state)
        weights, decoding = _weights(weights, spec, assignment, expected, rules.site.layout)
        known = rules.samples[assignment.client] if rules.samples else 0
        _check_count(manifest.num_examples, known, rules.site.most)
        if wrong := clients.out_of_bounds(manifest.metrics, clients.bounds_of(rules.algorithm, codec is not None)):
            raise Rejected("metrics", wrong)
        _check_work(spec, assignment, manifest.num_examples, manifest.metrics, rules)
    update = ClientUpdate(assignment.round, assignment.client, spec, weights, manifest.num_examples, manifest.metrics)
    return replace(update, state=state, encoded=encoded, seconds_decode=decoding)


def decode_and_check(update: ClientUpdate, assignment: Assignment, rules: Rules) -> ClientUpdate:
    """Decode and check an encoded update from a client in this process. Raises Rejected if the update is not valid."""
    expected = _expected(rules, update.spec, assignment)
    payload, decoding = _weights(update.travels, update.spec, assignment, expected, rules.site.layout)
    return replace(update, payload=payload, seconds_decode=decoding)


def _weights(
    tensors: Params, spec: SubmodelSpec, assignment: Assignment, expected: Header, layout: ParamLayout
) -> tuple[Params, float]:
    """Decode and check weights. Return the weights, and the seconds that decoding took."""
    codec, decoding = coding.codec_up(assignment), 0.0
    if wrong := coding.find_misfit(tensors, coding.header(codec, expected), coding.streams(codec, expected)):
        raise Rejected(*wrong)
    if codec is not None:
        started = time.monotonic()
        received, part = take(assignment.payload, layout, spec, have=assignment.spec), coding.coded(expected)
        try:
            change = coding.decode(codec, tensors, expected)
        except IntegrityError as error:
            raise Rejected("encoding", str(error)) from error
        tensors = {name: received[name] + t if name in part else t for name, t in change.items()}
        decoding = time.monotonic() - started
    _check_numbers(tensors)
    return tensors, decoding


def _check_header(value: bytes, tensors: int) -> None:
    """Check the size of the header before parsing, because parsing takes one second per MB and needs 25 times as much
    memory as the header. The header may be padded with spaces (`store.padded`)."""
    entries = value[8 : 8 + int.from_bytes(value[:8], "little")].rstrip(b" ")
    if len(entries) > HEADER_BYTES * (1 + tensors):
        raise Rejected("schema", f"a header of {len(entries)} bytes is too large for {tensors} tensors")


def _check_evaluation(manifest: ResultManifest, spec: SubmodelSpec, assignment: Assignment, rules: Rules) -> None:
    if spec != assignment.spec:
        raise Rejected("spec", "the update is not for the sub-model that was sent for evaluation")
    _check_count(manifest.num_examples, len(rules.site.held_by(assignment.client)), rules.site.most)
    bounds = clients.evaluation_bounds(rules.site.data.task) if rules.site.held else {}
    if wrong := clients.out_of_bounds(manifest.metrics, bounds):
        raise Rejected("metrics", wrong)


def _check_count(count: int, known: int, most: int | None) -> None:
    if most is not None and not 1 <= count <= most:
        raise Rejected("examples", f"expected from 1 to {most} samples (partition.most), got {count}")
    if most is None and count != known:
        raise Rejected("examples", f"expected {known} samples, got {count}")


def _check_work(
    spec: SubmodelSpec, assignment: Assignment, samples: int, metrics: Mapping[str, float], rules: Rules
) -> None:
    """Check the sub-model, steps, multiply-adds and free memory. The sub-model's classes depend on the client's data,
    so they are not compared. Only the first nine digits of the free memory are compared, because normally distributed
    random numbers differ slightly between machines."""
    free = metrics["free"]
    if rules.seed is not None:
        expected = observe(rules.site.fleet[assignment.client], rules.seed, assignment.round)
        if not math.isclose(free, expected, rel_tol=1e-9):
            raise Rejected("metrics", f"expected {expected:g} % of free memory, got {free:g} %")
    if rules.algorithm is None:
        return
    context = TaskContext(rules.site.layout, rules.site.pool, rules.site.fleet[assignment.client], free)
    try:
        task = rules.algorithm.task(assignment, context)
    except (ClientError, ModelError) as error:
        raise Rejected("spec", f"no sub-model fits into {free:g} % of free memory: {error}") from error
    if all_classes(spec) != all_classes(task.spec):
        raise Rejected("spec", f"the update is not for the sub-model that fits into {free:g} % of free memory")
    work = {"steps": float(costs.steps(task, samples)), "macs": costs.macs(rules.site.family, task, samples)}
    for name, count in work.items():
        if metrics[name] != count:
            raise Rejected("metrics", f"expected {count:g} {name}, got {metrics[name]:g}")


def fits_nobody(assignment: Assignment, rules: Rules | None, algorithm: Algorithm) -> bool:
    """Return True if no sub-model of the assignment fits into the memory; False if clients measure their memory."""
    if rules is None or rules.seed is None or assignment.evaluates:
        return False
    device = rules.site.fleet[assignment.client]
    context = TaskContext(rules.site.layout, rules.site.pool, device, observe(device, rules.seed, assignment.round))
    try:
        take(assignment.payload, rules.site.layout, algorithm.task(assignment, context).spec, have=assignment.spec)
    except (ClientError, ModelError):
        return True
    return False


def _expected(rules: Rules, spec: SubmodelSpec, assignment: Assignment) -> Header:
    layout, kept = rules.site.layout, rules.kept
    try:
        layout.check(spec)
    except (ModelError, TypeError, ValueError) as error:
        raise Rejected("spec", str(error)) from error
    if not contains(layout, assignment.spec, spec):
        raise Rejected("spec", "the update is not for a part of the sub-model that was sent")
    found = shapes(layout, spec, {name: tensor.shape for name, tensor in assignment.payload.items()})
    return {name: (assignment.payload[name].dtype, shape) for name, shape in found.items() if name not in kept}


def check_state(state: Params, expected: Header) -> None:
    """Raise Rejected if `state` does not have the header `expected` (`clients.header`) or has invalid values."""
    tensors = with_prefix(state)
    if wrong := coding.find_misfit(tensors, {STATE + name: form for name, form in expected.items()}):
        raise Rejected(*wrong)
    _check_numbers(tensors)


def _check_numbers(tensors: Params) -> None:
    for name, tensor in tensors.items():
        least, most = (float(end) for end in tensor.aminmax())  # both bounds are NaN if any value is NaN
        if not max(-least, most) <= largest(name):
            raise Rejected("finite", f"{name} has values that are not finite, or larger than {largest(name):g}")
        if least < 0 and name.endswith("running_var") and not name.startswith(STATE):
            raise Rejected("statistics", f"{name} contains a negative variance")
