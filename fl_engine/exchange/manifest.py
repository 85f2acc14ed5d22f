"""Create, sign and check the manifest of a result.

A result consists of the tensors in `<client>.safetensors` and a manifest in `<client>.json`, which contains the
checksum of the tensor file. Neither of the two file formats can contain executable code.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, get_args

from pydantic import ConfigDict, Field, ValidationError

from fl_engine.codecs import sections_of
from fl_engine.core.clients import with_prefix
from fl_engine.core.errors import IntegrityError, brief, printable
from fl_engine.core.records import Record
from fl_engine.core.types import Assignment, ClientFailure, ClientResult, Code, FailureDetails, Stage
from fl_engine.exchange import coding
from fl_engine.storage.store import Pieces, canonical, laid_out, padded, sha256

MANIFEST_BYTES = 2**16
"""Maximum size of a manifest in bytes, excluding the sub-model. The longest field, `reason`, has 4096 characters."""
CHANNEL_BYTES = 8
"""Maximum length in bytes of a channel number in a manifest, including the comma."""
HEADER_BYTES = 2**10
"""Maximum length in bytes of a tensor's entry in a safetensors header, and of a group's name in a manifest."""


def manifest_bytes(assignment: Assignment) -> int:
    """Return the maximum size in bytes of a manifest, which lists all kept channels of the assignment's sub-model."""
    shapes = [tensor.shape for tensor in assignment.payload.values()]
    return MANIFEST_BYTES + sum(HEADER_BYTES + CHANNEL_BYTES * sum(shape) for shape in shapes)


STAGES: tuple[Stage, ...] = get_args(Stage)
CLIENT_STAGES = ("prune", "train", "evaluate")
"""Stages that a client can report in a failure."""


class Rejected(Exception):
    """Raised if a result is not valid. `exchange.updates` lists the codes."""

    def __init__(self, code: Code, text: str) -> None:
        super().__init__(f"{code}: {printable(text)[:1000]}")
        self.code = code

    def failure(self, assignment: Assignment) -> ClientFailure:
        return ClientFailure(assignment.round, assignment.client, "validate", str(self), self.code)


class ResultManifest(Record):
    """The manifest of a result. Updates have `sha256` and `spec`. Failures have `stage`, `reason`, `code` and
    `details`."""

    model_config = ConfigDict(strict=True)
    round: int
    client: int
    assignment: str
    """Checksum of the assignment (`assignment_sum`). A result with the checksum of another assignment is rejected."""
    sha256: str | None = None
    spec: dict[str, Any] | None = None
    num_examples: int = 0
    metrics: dict[str, float] = Field(default={}, max_length=64)
    stage: str | None = Field(default=None, max_length=64)
    reason: str | None = Field(default=None, max_length=4096)
    code: Code | None = None
    details: FailureDetails | None = None
    signature: str | None = None
    """HMAC-SHA256 of all other fields."""


KeyOf = Callable[[Assignment], bytes]
"""Function that returns the signing key for the result of an assignment."""


def key_of(secret: bytes) -> KeyOf:
    """Return a function that derives the coordinator's signing keys from the run's secret. The coordinator signs every
    result after reading it, so that it can detect later changes by other users of the store."""
    return lambda assignment: hmac.digest(secret, f"coordinator {assignment_sum(assignment)}".encode(), "sha256")


def assignment_sum(assignment: Assignment) -> str:
    """Return the SHA-256 of an assignment without its tensors, because the round's state determines the tensors."""
    a = assignment
    content = [a.round, a.client, a.seed, a.level, a.spec.to_json(), dict(a.hints)]
    content += [] if a.codecs is None or a.codecs == coding.PLAIN else [sections_of(a.codecs)]
    return sha256(canonical([*content, "evaluate"] if a.evaluates else content))


def pack_result(
    result: ClientResult, assignment: Assignment, length: int | None = None
) -> tuple[ResultManifest, Pieces | None]:
    """Convert a result to a tuple (unsigned manifest, content of the tensor file). The content is None for a failure.
    If `length` is given, the content is padded to `length` bytes."""
    manifest = ResultManifest(round=assignment.round, client=assignment.client, assignment=assignment_sum(assignment))
    if isinstance(result, ClientFailure):
        why = {"stage": result.stage, "reason": result.reason[:4096], "code": result.code, "details": result.details}
        return manifest.model_copy(update=why), None
    value = laid_out(result.travels | with_prefix(result.state))
    value = value if length is None else padded(value, length)
    content = {
        "sha256": sha256(value),
        "spec": result.spec.to_json(),
        "num_examples": result.num_examples,
        "metrics": {name: float(value) for name, value in result.metrics.items()},
    }
    return manifest.model_copy(update=content), value


def sign(manifest: ResultManifest, key: bytes | None) -> ResultManifest:
    """Sign a manifest. Without a key (clients on this machine), a signature detects damage but not forgery."""
    content = canonical(manifest.model_dump(exclude={"signature"}))
    return manifest.model_copy(update={"signature": hmac.new(key or b"", content, "sha256").hexdigest()})


Read = Callable[[int | None], bytes]
"""Function that reads a file. Raises IntegrityError if the file is missing or longer than the given number of bytes."""


def read_manifest(
    file: Read, assignment: Assignment, key: bytes | None, by_worker: bool = False, closed: str | None = None
) -> ResultManifest:
    """Read and check a manifest. Raises Rejected if the manifest is missing, damaged, unsigned or for another
    assignment.

    Args:
        by_worker: True if a worker signed the manifest. A worker can report only the stages in `CLIENT_STAGES`.
        closed: Expected checksum of the manifest (`content_sum`) if the round is closed, otherwise None. For a closed
            round the signature is not checked, because an earlier coordinator may have used another key.
    """
    try:
        manifest = ResultManifest.model_validate_json(file(manifest_bytes(assignment)))
        signature = sign(manifest, key).signature or ""
    except IntegrityError as error:
        raise Rejected("file", str(error)) from error
    except ValidationError as error:
        raise Rejected("schema", f"not a manifest: {brief(error)}") from error
    except ValueError as error:  # JSON cannot represent some values, for example NaN
        raise Rejected("metrics", str(error)) from error
    found = (manifest.round, manifest.client, manifest.assignment)
    if found != (assignment.round, assignment.client, assignment_sum(assignment)):
        raise Rejected("assignment", f"of round {manifest.round}, client {manifest.client}, or another assignment")
    if closed is not None:
        if content_sum(manifest) != closed:
            raise Rejected("assignment", "the manifest was replaced after the round was closed")
        return manifest
    if not hmac.compare_digest(signature.encode(), (manifest.signature or "").encode()):
        raise Rejected("signature", "not signed with the key of its lease" if by_worker else "damaged")
    if not by_worker or manifest.spec is not None:
        return manifest
    stage = manifest.stage if manifest.stage in CLIENT_STAGES else "train"
    reason = printable(manifest.reason or "")[:500]
    code = "finite" if stage == "train" and manifest.code == "finite" else None  # the client's training diverged
    return manifest.model_copy(update={"stage": stage, "reason": reason, "code": code})


def content_sum(manifest: ResultManifest) -> str:
    """Return a checksum of the fields of a manifest that affect the model."""
    return sha256(canonical(manifest.model_dump(exclude={"metrics", "signature"})))
