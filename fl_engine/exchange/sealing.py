"""Client states, encrypted by the clients, so that the server stores them without being able to read them.

AES-SIV (RFC 5297) is deterministic: a client that answers an order twice sends the same bytes, and a state that did not
change is not written again. So a reader of the store learns whether a state changed, but not its content. The client's
number is authenticated: no client accepts another client's state. The round is not: a server that was killed sends an
earlier state again, so a server that lies can do so too.
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
"""The name of the uint8 tensor that holds an encrypted state."""


def forms(declared: Shapes, sealed: bool) -> Header:
    """The types and shapes of the tensors that the server gets for a state with these declared shapes."""
    if not declared or not sealed:
        return {name: (torch.float32, shape) for name, shape in declared.items()}
    return {SEALED: (torch.uint8, (TAG_BYTES + 4 * sum(map(math.prod, declared.values())),))}


def key_from(path: Path) -> bytes:
    """Reads a key from a file. Raises ClientError if the file does not hold a key."""
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
    """Encrypts `state`: float32 tensors, serialised in the order of their names, little-endian."""
    numbers = [state[name].reshape(-1).numpy().astype("<f4").tobytes() for name in sorted(state)]
    value = _cipher(key).encrypt(b"".join(numbers), _whose(client))
    return {SEALED: torch.frombuffer(bytearray(value), dtype=torch.uint8)}


def unseal(state: Params, declared: Shapes, key: bytes, client: int) -> Params:
    """Decrypts a state. Raises IntegrityError if it was not sealed with this key for this client, or is not as
    declared."""
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
