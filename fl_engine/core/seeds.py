"""Randomness as a function of (seed, purpose, round, client).

Nothing draws from a global generator. The same four values give the same stream in every process, on every
machine and after every restart, because they pass through SHA-256 and never through `hash(str)`.
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


_ONE = threading.RLock()
"""The random states below are of the whole process, not of a thread."""


def drawn() -> dict[str, object]:
    """By name, the states of three generators; a draw changes one. Compare by ==."""
    _, keys, *place = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (np.asarray(keys).tobytes(), *place),
        "random": random.getstate(),
    }


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """What torch, numpy and `random` draw without a generator of their own follows from `seed`; afterwards their states
    are as before. Other threads wait."""
    cuda = [device] if device.type == "cuda" else []
    with _ONE, torch.random.fork_rng(cuda):
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
