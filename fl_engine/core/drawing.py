"""Random numbers that somebody else's code draws without a generator of its own."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

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
