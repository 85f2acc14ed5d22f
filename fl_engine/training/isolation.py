"""Isolates a run from its host process, such as a notebook, and restores the process's settings afterwards."""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from threading import current_thread, main_thread

import numpy as np
import torch

from fl_engine.training.numerics import flushes_now

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))

PRECISIONS = {
    **dict.fromkeys([("generic", "all"), ("mkldnn", "all"), ("cuda", "all")], "none"),
    **dict.fromkeys([("mkldnn", "conv"), ("mkldnn", "rnn"), ("mkldnn", "matmul"), ("cuda", "matmul")], "none"),
    **dict.fromkeys([("cuda", "conv"), ("cuda", "rnn")], "tf32"),
}
"""Float32 precision of each backend and operation in a new process. With "none", an operation inherits the precision of
its backend, and a backend inherits the generic precision."""

_isolated: ContextVar[bool] = ContextVar("isolated", default=False)


def is_isolated() -> bool:
    """Return True if the run must not change settings that cannot be restored, such as the settings of the C heap."""
    return _isolated.get()


def set_repeatable(repeatable: bool, *, warn_only: bool = False, fill: bool = False) -> None:
    """Enable or disable torch's deterministic algorithms. With `warn_only`, nondeterministic algorithms cause a warning
    instead of an error. With `fill`, torch initialises new memory."""
    torch._C._set_deterministic_algorithms(repeatable, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _set_precisions(wanted: Mapping[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    """Set the float32 precisions and return the previous precisions. Use torch's private functions, because assigning
    to torch.backends.mkldnn.fp32_precision would set the generic precision."""
    read, write, before = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter, {}
    for place, precision in wanted.items():
        before[place] = read(*place)
        # Skip unchanged values, because after any write cuDNN's tf32 setting no longer follows the generic precision.
        if before[place] != precision:
            write(*place, precision)
    return before


def _by_older_names() -> tuple[str, bool] | None:
    """Return the float32 precisions from torch's older options; None if the host has set torch's newer options."""
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return None


@contextmanager
def _precisions_as_in_a_new_process() -> Iterator[None]:
    older = _by_older_names()
    before = _set_precisions(PRECISIONS)
    try:
        yield
    finally:
        if older is not None and older != _by_older_names():
            torch.set_float32_matmul_precision(older[0])
            torch.backends.cudnn.allow_tf32 = older[1]
        _set_precisions(PRECISIONS)
        _set_precisions(dict(reversed(before.items())))


@contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    dtype, mkldnn, cudnn = torch.get_default_dtype(), torch.backends.mkldnn, torch.backends.cudnn
    enabled = mkldnn.enabled, cudnn.enabled
    repeatable = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    # A device context slows down every operation, so enter it only if the default device is not the CPU.
    on_cpu = torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()
    try:
        torch.set_default_dtype(torch.float32)
        mkldnn.enabled = True  # type: ignore[assignment]
        cudnn.enabled = True
        set_repeatable(False)
        with (
            _precisions_as_in_a_new_process(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            on_cpu,
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        mkldnn.enabled, cudnn.enabled = enabled
        set_repeatable(repeatable[0], warn_only=repeatable[1], fill=filled)


@contextmanager
def isolated() -> Iterator[None]:
    """Within the context, set torch's settings to the defaults of a new process: precision, default type and device,
    gradients, denormal numbers, deterministic algorithms and cuDNN. After the context, restore the host's settings, the
    random states of torch, numpy and Python, the signal handlers and `sys.path`."""
    threads, cudnn, flushed = torch.get_num_threads(), torch.backends.cudnn, flushes_now()
    flags = cudnn.benchmark, cudnn.deterministic
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    path, in_main = list(sys.path), current_thread() is main_thread()
    handlers = {number: signal.getsignal(number) for number in SIGNALS} if in_main else {}
    token = _isolated.set(True)
    torch.set_flush_denormal(False)
    try:
        with _as_in_a_new_process():
            yield
    finally:
        _isolated.reset(token)
        torch.set_num_threads(threads)
        torch.set_flush_denormal(flushed)
        cudnn.benchmark, cudnn.deterministic = flags
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        torch.set_rng_state(drawn[2])
        if on_devices:
            torch.cuda.set_rng_state_all(on_devices)
        sys.path[:] = path
        for number, handler in handlers.items():
            if handler is not None:  # Python cannot restore a handler that is None.
                signal.signal(number, handler)
