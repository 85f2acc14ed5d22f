"""Randomness as a function of (seed, purpose, round, client).

Nothing draws from a global generator. The same four values give the same stream in every process, on every
machine and after every restart, because they pass through SHA-256 and never through `hash(str)`.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(seed: int, purpose: str, round: int = -1, client: int = -1) -> int:
    """A 63-bit seed for `torch.Generator.manual_seed` and the like."""
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def rng(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """A generator of its own for every purpose, so that drawing more in one place moves nothing elsewhere.

    A seed of more than 128 bits is a secret (`privacy.plan_seed`). 63 bits could be searched through, so all 128 bits
    of the generator's key follow from it.
    """
    if seed >= 2**128:
        key = int.from_bytes(_digest(seed, purpose, round, client)[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))
    return np.random.Generator(np.random.Philox(derive(seed, purpose, round, client)))


def _digest(seed: int, purpose: str, round: int, client: int) -> bytes:
    return hashlib.sha256(f"flexfleet/{seed}/{purpose}/{round}/{client}".encode()).digest()
