"""How quickly this machine exchanges values with a store."""

from __future__ import annotations

import os
import time

from fl_engine.core.errors import IntegrityError
from fl_engine.storage.store import Store

PROBE = "probe"
PROBE_BYTES = 4 * 2**20
"""The value that goes there and back: large against what a request takes before its first byte."""
LEAST_S, MOST_TURNS = 2.0, 8


def bits_per_second(store: Store, key: str = PROBE, size: int = PROBE_BYTES) -> float:
    """Writes `size` random bytes and reads them again, several times: all bits over all seconds, up and down, as the
    simulated clock counts them. The value stays there. Raises what the store raises; IntegrityError where other bytes
    come back."""
    seconds, turns = 0.0, 0
    while turns == 0 or (turns < MOST_TURNS and seconds < LEAST_S):
        value, began = os.urandom(size), time.perf_counter()
        store.put(key, value)
        back = store.get(key, size)
        seconds, turns = seconds + time.perf_counter() - began, turns + 1
        if back != value:
            raise IntegrityError(f"{store.uri(key)}: other bytes came back than were written")
    return 2 * 8 * size * turns / seconds
