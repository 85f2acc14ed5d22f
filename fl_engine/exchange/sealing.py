"""The state of a client, encrypted by the client: the server stores it, and cannot read it.

AES-SIV (RFC 5297) is deterministic: an order that is answered twice has one answer, and a state that did not change is
not written again. So who reads the store learns whether a state changed, but not what it is. The client's number is
authenticated: no client accepts the state of another.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fl_engine.core.client_state import Shapes
from fl_engine.core.errors import ClientError, EnvironmentFailure, IntegrityError
from fl_engine.core.types import Header, Params

KEY_BYTES = 64
"""AES-256-SIV: two keys of 32 bytes."""
TAG_BYTES = 16
SEALED = "sealed"
"""The name of the one tensor, uint8, that an encrypted state is."""


def forms(declared: Shapes, sealed: bool) -> Header:
    """Types and shapes of a state with these declared shapes, as the server gets it."""
    if not declared or not sealed:
        return {name: (torch.float32, shape) for name, shape in declared.items()}
    return {SEALED: (torch.uint8, (TAG_BYTES + 4 * sum(map(math.prod, declared.values())),))}


def key_from(path: Path) -> bytes:
    """Raises ClientError where the file is not a key."""
    try:
        key = path.read_bytes()
    except OSError as error:
        raise ClientError(
            f"the key that encrypts what clients keep cannot be read: {path}: {error.strerror}"
        ) from error
    if len(key) != KEY_BYTES:
        raise ClientError(f"{path} holds {len(key)} bytes; the key that encrypts what clients keep has {KEY_BYTES}")
    return key


def seal(state: Params, key: bytes, client: int) -> Params:
    """`state` is float32; it is written in the order of the names, little-endian."""
    numbers = [state[name].reshape(-1).numpy().astype("<f4").tobytes() for name in sorted(state)]
    value = _cipher(key).encrypt(b"".join(numbers), _whose(client))
    return {SEALED: torch.frombuffer(bytearray(value), dtype=torch.uint8)}


def unseal(state: Params, declared: Shapes, key: bytes, client: int) -> Params:
    """Raises IntegrityError for what was not sealed with this key for this client, or is no state as declared."""
    from cryptography.exceptions import InvalidTag

    if state.keys() != {SEALED}:
        raise IntegrityError(f"it is not encrypted, it has the names {sorted(state)[:4]}")
    try:
        value = _cipher(key).decrypt(state[SEALED].numpy().tobytes(), _whose(client))
    except (InvalidTag, ValueError) as error:
        raise IntegrityError("it was not encrypted with this key for this client") from error
    numbers = np.frombuffer(value, "<f4") if len(value) % 4 == 0 else np.empty(0, "<f4")
    sizes = {name: math.prod(declared[name]) for name in sorted(declared)}
    if len(numbers) != sum(sizes.values()):
        raise IntegrityError(f"it holds {len(value)} bytes, 4 times {sum(sizes.values())} are declared")
    ends = np.cumsum(list(sizes.values()))[:-1]
    parts = np.split(numbers.astype(np.float32), ends)
    return {name: torch.from_numpy(part).view(declared[name]) for name, part in zip(sizes, parts, strict=True)}


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    except ImportError as error:
        raise EnvironmentFailure(
            "what clients keep is encrypted with the package cryptography: pip install 'flexfleet[kubernetes]'"
        ) from error
    return AESSIV(key)


def _whose(client: int) -> list[bytes]:
    return [b"flexfleet client state", str(client).encode()]
