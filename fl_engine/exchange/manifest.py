"""The manifest of a result, its signature, and the largest sizes of a result's files.

A result is `<client>.safetensors`, and `<client>.json`: a manifest with its checksum. Neither can hold code.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_engine.codecs import sections_of
from fl_engine.core.clients import travelling
from fl_engine.core.errors import IntegrityError, brief, printable
from fl_engine.core.types import ClientFailure, Code, Outcome, Stage, WorkOrder
from fl_engine.exchange import coding
from fl_engine.storage.serialization import Pieces, laid_out, padded
from fl_engine.storage.store import canonical, sha256

MANIFEST_BYTES = 2**15
"""Upper bound of a manifest without its sub-model. A failure's reason of 4096 characters is the longest part."""
CHANNEL_BYTES = 8
"""Upper bound for a kept channel in a manifest: its number and a comma."""
HEADER_BYTES = 2**10
"""Upper bound for a tensor's entry in a safetensors header, and for a group's name in a manifest."""


def manifest_bytes(order: WorkOrder) -> int:
    """Return the most bytes of a manifest for this assignment, which lists the kept channels one by one."""
    shapes = [tensor.shape for tensor in order.payload.values()]
    return MANIFEST_BYTES + sum(HEADER_BYTES + CHANNEL_BYTES * sum(shape) for shape in shapes)


class Rejected(Exception):
    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {printable(text)[:1000]}")
        self.code = code


class Manifest(BaseModel):
    """One result. `sha256` and `spec` belong to an update, `stage`, `reason` and `code` to a failure."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    schema_version: Literal[1] = 1
    round: int
    client: int
    order: str
    """`order_sum`: an update is never adopted for another plan."""
    sha256: str | None = None
    spec: dict[str, Any] | None = None
    num_examples: int = 0
    metrics: dict[str, float] = Field(default={}, max_length=64)
    stage: str | None = Field(default=None, max_length=64)
    reason: str | None = Field(default=None, max_length=4096)
    code: Code | None = None
    signature: str | None = None
    """HMAC-SHA256 of all other fields."""


KeyOf = Callable[[WorkOrder], bytes]
"""Returns the key that signs the result of an assignment."""


def key_of(secret: bytes) -> KeyOf:
    """Derive the coordinator's keys from the run's secret. With them the coordinator signs the results that it has
    read, so that write access to the store is not enough to change them."""
    return lambda order: hmac.digest(secret, f"coordinator {order_sum(order)}".encode(), "sha256")


def order_sum(order: WorkOrder) -> str:
    """Return the sha256 of an assignment without its tensors, which follow from the round's state."""
    content = [order.round, order.client, order.seed, order.level, order.spec.to_json(), dict(order.hints)]
    codecs = order.codecs or coding.PLAIN
    content += [] if codecs == coding.PLAIN else [sections_of(codecs)]
    return sha256(canonical([*content, "evaluate"] if order.evaluates else content))


def packed(outcome: Outcome, order: WorkOrder, length: int | None = None) -> tuple[Manifest, Pieces | None]:
    """Return an unsigned manifest and the content of its file (None for a failure), padded to `length` if given."""
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
    """Without a key (clients of this machine) the signature is a checksum that reveals damage, not lies."""
    return manifest.model_copy(update={"signature": _signature(manifest, key or b"")})


def _signature(manifest: Manifest, key: bytes) -> str:
    return hmac.new(key, canonical(manifest.model_dump(exclude={"signature"})), "sha256").hexdigest()


Read = Callable[[int | None], bytes]
"""Reads a file of at most so many bytes. Raises IntegrityError."""


def manifest_of(
    file: Read, order: WorkOrder, key: bytes | None, by_worker: bool = False, closed: str | None = None
) -> Manifest:
    """Read and check the manifest of a result.

    Args:
        file: Reads the manifest.
        order: The assignment whose result is expected.
        key: The key of the signature.
        by_worker: A worker has signed it, which can report only that it could not prune, train or evaluate.
        closed: The manifest must have this checksum (`said_of`) instead of a signature, because an earlier coordinator
            may have had another key.

    Raises:
        Rejected: The manifest is missing, damaged, unsigned or of another assignment.
    """
    try:
        manifest = Manifest.model_validate_json(file(manifest_bytes(order)))
        said = canonical(manifest.model_dump(exclude={"signature"}))
    except IntegrityError as error:
        raise Rejected("file", str(error)) from error
    except ValidationError as error:
        raise Rejected("schema", f"not a manifest: {brief(error)}") from error
    except ValueError as error:  # a number that JSON cannot express
        raise Rejected("metrics", str(error)) from error
    found = (manifest.round, manifest.client, manifest.order)
    if found != (order.round, order.client, order_sum(order)):
        raise Rejected("order", f"of round {manifest.round}, client {manifest.client}, or another assignment")
    if closed is not None:
        if said_of(manifest) != closed:
            raise Rejected("order", "replaced after the round was closed")
        return manifest
    if not _is_signed(manifest, said, key or b""):
        raise Rejected("signature", "not signed with the key of its lease" if by_worker else "damaged")
    return _by_worker(manifest) if by_worker else manifest


def said_of(manifest: Manifest) -> str:
    """Return a checksum of everything in a manifest that can change the model."""
    return sha256(canonical(manifest.model_dump(exclude={"metrics", "signature"})))


def _by_worker(manifest: Manifest) -> Manifest:
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

SAID_BY_CLIENTS = ("prune", "train", "evaluate")
"""Stages that a client can report; only the coordinator reports the others."""
