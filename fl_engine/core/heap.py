"""The C library's heap: what steps of training use again is kept, what large models leave behind goes back.

Every step asks for the same blocks again, and each block that the kernel gives anew costs a page fault per 4 kB: up to
a fifth of a step's time. But a hole that was kept does not take an aligned block of its own size, so outside training
models leave holes: with all of them kept, a coordinator held ten times its model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LARGE_MODEL = 2**26
"""Bytes. A round of such a model takes seconds, beside which the page faults outside training count for nothing."""
WORKING_BLOCK, LARGE_BLOCK = 2**25, 2**20
"""Bytes. With a large model, larger blocks go back when they are freed: in training and evaluation (the largest number
that glibc takes), and outside of them."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
_MANY = 2**16
"""Blocks that go back; more than a process has."""
_kept = False
"""Whether `keep_freed_memory` was called: else the heap is somebody else's, who has settings of his own."""


def keep_freed_memory() -> None:
    """Lets glibc keep freed blocks. Does nothing with other C libraries."""
    global _kept
    _kept = True
    _call("mallopt", _MMAP_MAX, 0)
    _call("mallopt", _TRIM_THRESHOLD, -1)
    _call("mallopt", _ARENA_MAX, 1)


def give_back(size: int) -> None:
    """Where a model of `size` bytes is large: gives freed memory back to the system, now and later."""
    if _kept and size >= LARGE_MODEL:
        _goes_back(LARGE_BLOCK)
        trim()


def trim() -> None:
    """Gives freed memory back to the system, once. Does nothing with other C libraries."""
    _call("malloc_trim", 0)


@contextmanager
def at_work(size: int) -> Iterator[None]:
    """Around training or evaluating a model of `size` bytes: freed memory is kept meanwhile, as far as the model's size
    allows."""
    if _kept and size >= LARGE_MODEL:
        _goes_back(WORKING_BLOCK)
    yield
    give_back(size)


def _goes_back(block: int) -> None:
    """Larger blocks than this, when they are freed."""
    _call("mallopt", _MMAP_MAX, _MANY)
    _call("mallopt", _MMAP_THRESHOLD, block)


def _call(name: str, *arguments: int) -> None:
    try:
        function: Any = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):
        return
    function(*arguments)
