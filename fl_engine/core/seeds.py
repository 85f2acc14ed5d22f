"""Derive random numbers from (seed, purpose, round, client), never from a global generator. The four values are hashed
with SHA-256, not with `hash(str)`, so the random stream is the same in every process, on every machine and after every
restart.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str, round: int = -1, client: int = -1) -> int:
    """Return a 63-bit seed for `torch.Generator.manual_seed`."""
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def rng(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """Return a separate generator for each purpose, so that extra draws do not change the numbers of other purposes.

    A seed of more than 128 bits is secret (`privacy.plan_seed`). For a secret seed, the generator's key has 128 bits,
    because a key of 63 bits could be found by brute force.
    """
    if seed >= 2**128:
        key = int.from_bytes(_digest(seed, purpose, round, client)[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))
    return np.random.Generator(np.random.Philox(derive(seed, purpose, round, client)))


def _digest(seed: int, purpose: str, round: int, client: int) -> bytes:
    return hashlib.sha256(f"flexfleet/{seed}/{purpose}/{round}/{client}".encode()).digest()


_LOCK = threading.RLock()
"""Lock for the global random states, which all threads share."""


def drawn() -> dict[str, object]:
    """Map the names of the three global generators to their states. Drawing a number changes a generator's state."""
    _, keys, *place = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (np.asarray(keys).tobytes(), *place),
        "random": random.getstate(),
    }


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, NumPy and `random`, and restore their states afterwards. Only one thread at
    a time can use this context manager."""
    cuda = [device] if device.type == "cuda" else []
    with _LOCK, torch.random.fork_rng(cuda):
        before = np.random.get_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])
            random.setstate(before[1])
