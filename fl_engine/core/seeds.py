"""Randomness as a function of (seed, purpose, round, client).

Nothing draws from a global generator. The four values pass through SHA-256, never through `hash(str)`, so they give
the same stream in every process, on every machine and after every restart.
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
    """Return a seed of 63 bits, as `torch.Generator.manual_seed` takes it."""
    return int.from_bytes(_digest(seed, purpose, round, client)[:8], "little") >> 1


def rng(seed: int, purpose: str, round: int = -1, client: int = -1) -> np.random.Generator:
    """Return a generator for one purpose, so that drawing more in one place changes nothing elsewhere.

    A seed above 128 bits is a secret (`privacy.plan_seed`). All 128 bits of the generator's key then follow from it,
    because 63 bits could be searched through.
    """
    if seed >= 2**128:
        key = int.from_bytes(_digest(seed, purpose, round, client)[:16], "little")
        return np.random.Generator(np.random.Philox(key=key))
    return np.random.Generator(np.random.Philox(derive(seed, purpose, round, client)))


def _digest(seed: int, purpose: str, round: int, client: int) -> bytes:
    return hashlib.sha256(f"flexfleet/{seed}/{purpose}/{round}/{client}".encode()).digest()


# ------------------------------------------------------------------- code of the user's that draws globally
_ONE = threading.RLock()
"""Guards the global random states, which belong to the whole process."""


def drawn() -> dict[str, object]:
    """Return the states of the three global generators by name. Compare two results by == to detect a draw."""
    _, keys, *place = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (np.asarray(keys).tobytes(), *place),
        "random": random.getstate(),
    }


@contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators of torch, numpy and `random`, and restore their states afterwards. Other threads
    wait."""
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
