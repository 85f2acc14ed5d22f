"""Links the rounds of a run in a hash chain, so that later changes are found.

The row of each round contains three checksums: `plan` of the assignments, `model` of the algorithm's state after the
merge, and `sha256` of each merged update. `link` is the checksum of the row and of the previous row's link. Therefore
the last link determines all rows. The coordinator signs the last link and the model's checksum with Ed25519 (RFC 8032).
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import Any

from fl_engine.core.clients import with_prefix
from fl_engine.core.errors import IntegrityError
from fl_engine.core.state import pack
from fl_engine.core.types import ClientUpdate, RoundPlan
from fl_engine.exchange.manifest import assignment_sum
from fl_engine.storage.checkpoints import Row
from fl_engine.storage.store import canonical, laid_out, sha256


def plan_sum(plan: RoundPlan) -> str:
    """Return a checksum of the assignments without their tensors, which the previous state determines."""
    return sha256(canonical([assignment_sum(assignment) for assignment in plan.assignments]))


def state_sum(state: Any) -> str:
    """Return a checksum of the tensors and of all other values of an algorithm's state. The order of the tensors is
    ignored, because updates that were read from files have another order."""
    tensors, rest = pack(state)
    rest = {name: value for name, value in rest.items() if not name.endswith("/order")}
    return sha256(canonical([sha256(laid_out(tensors)), rest]))


def update_sum(update: ClientUpdate) -> str:
    """Return the SHA-256 of the decoded weights and of the client's state."""
    return sha256(laid_out(update.payload | with_prefix(update.state)))


def linked(row: Row, previous: str) -> Row:
    """Return a copy of the row with its link. `previous` is the link of the previous round; "" for the first round."""
    content = row.model_dump(mode="json", exclude={"link"})
    return row.model_copy(update={"link": sha256(canonical({**content, "previous": previous}))})


def check_links(rows: Iterable[Row], name: str) -> str:
    """Return the last link. Raises IntegrityError with the first round whose row does not match its link."""
    previous = ""
    for number, row in enumerate(rows):
        if row.round != number:
            raise IntegrityError(f"{name}: round {number + 1} is missing, or rounds are not in order")
        if row.link != linked(row, previous).link:
            raise IntegrityError(f"{name}: round {number + 1} has changed, because it does not match its link")
        previous = row.link
    return previous


def sign(secret: bytes, link: str, model_sha256: str) -> tuple[str, str]:
    """Return a tuple (public key, signature) in hexadecimal digits. The key is derived from the run's secret."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"chain", "sha256"))
    return key.public_key().public_bytes_raw().hex(), key.sign(_signed(link, model_sha256)).hex()


def check_signature(public_key: str, signature: str, link: str, model_sha256: str, name: str) -> None:
    """Raise IntegrityError if the signature does not match."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), _signed(link, model_sha256))
    except (InvalidSignature, ValueError) as error:
        raise IntegrityError(f"{name}: the signature does not match the last link and the model") from error


def _signed(link: str, model_sha256: str) -> bytes:
    return canonical(["flexfleet", link, model_sha256])
