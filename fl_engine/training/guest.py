"""A run as a guest in somebody else's process, a notebook's for example: it leaves the process as it was."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import current_thread, main_thread

import numpy as np
import torch

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)

_guest: ContextVar[bool] = ContextVar("guest", default=False)


def is_guest() -> bool:
    """Whether settings that cannot be taken back are to be left alone, as those of the C library's heap."""
    return _guest.get()


@contextmanager
def guest() -> Iterator[None]:
    """Afterwards torch's number of threads and cuDNN's flags, the random states of torch, numpy and Python, signal
    handlers and `sys.path` are as before; malloc's settings are not touched."""
    threads, cudnn = torch.get_num_threads(), torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    path, in_main = list(sys.path), current_thread() is main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    token = _guest.set(True)
    try:
        yield
    finally:
        _guest.reset(token)
        torch.set_num_threads(threads)
        cudnn.benchmark, cudnn.deterministic = flags
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        sys.path[:] = path
        for number, handler in handlers.items():
            if handler is not None:  # None: it was not set by Python, and cannot be set again
                signal.signal(number, handler)
