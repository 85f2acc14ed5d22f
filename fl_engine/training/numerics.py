"""Everything besides configuration and seed that a run's bits depend on. With equal numerics, all backends return the
same global model."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.lib.introspect import opt_func_info

from fl_engine.core import system
from fl_engine.core.errors import ConfigError

log = logging.getLogger("flexfleet")

Strategy = Literal["single", "batched"]
Precision = Literal["fp32", "bf16", "amp", "fp16"]


BF16 = ("amx_bf16", "avx512_bf16", "bf16", "svebf16")
"""Linux' names of the instructions that multiply bfloat16, on x86 and Arm. Without them a processor computes bf16 in
float32, slower than float32 itself."""
FP16 = ("amx_fp16", "avx512_fp16", "asimdhp")
"""The same for float16."""


@dataclass(frozen=True)
class Numerics:
    """How the arithmetic of a run is done."""

    strategy: Strategy = "single"
    """`single`: one client at a time; `batched`: clients with tasks of equal kind side by side (`lanes`)."""
    lanes: int = 1
    """With `batched`, the most clients side by side on a CPU. It does not change the bits."""
    precision: Precision = "fp32"
    """The precision of training. The loss and evaluation are always float32.

    `bf16`: autocast; weights, optimizer and batch norm's sums stay float32. `amp`: on CUDA autocast to float16 with a
    scaled loss (`optimizers.LossScale`), elsewhere `bf16`. `fp16`: weights, samples, gradients and the optimizer in
    float16, without loss scaling or weight decay, and only with SGD: `model.half()`, as in FedAIoT's code. `fp16` needs
    `single`, because torch's float16 convolutions round a lane differently if others run beside it."""

    def __post_init__(self) -> None:
        if self.precision == "fp16" and self.strategy == "batched":
            raise ValueError("fp16 trains one client at a time: the strategy must be single")

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.precision in ("fp32", "fp16"):
            return nullcontext()
        return torch.autocast(device.type, torch.float16 if self.scales(device) else torch.bfloat16)

    def scales(self, device: torch.device) -> bool:
        """Whether the loss is scaled before the backward pass."""
        return self.precision == "amp" and device.type == "cuda"


SINGLE = Numerics()

BRANCHES = {
    1: "OFF", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2", 9: "AVX", 10: "AVX2",
    11: "AVX512_MIC", 12: "AVX512", 13: "AVX512_MIC_E1", 14: "AVX512_E1",
}  # fmt: skip
"""MKL's numbers for the values of MKL_CBWR (mkl_types.h)."""
STRICT = 0x10000


@cache
def _mkl() -> Any:
    """The library that contains MKL, or None."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library if hasattr(library, "mkl_serv_cbwr_get") else None
    except OSError:
        return None


def mkl_cbwr() -> str:
    """The setting of MKL that decides its bits. MKL reads the variable MKL_CBWR at its first call only, so the variable
    is used only if MKL cannot be asked."""
    library = _mkl()
    if library is None:
        return os.environ.get("MKL_CBWR", "unset")
    found = int(library.mkl_serv_cbwr_get(-1))
    branch = found & ~STRICT
    return BRANCHES.get(branch, str(branch)) + (",STRICT" if found & STRICT else "")


def settle() -> None:
    """Set MKL_CBWR in MKL itself; warn if MKL has computed already."""
    library, wanted = _mkl(), os.environ.get("MKL_CBWR")
    if library is None or wanted != "AUTO" or mkl_cbwr() != "OFF":
        return
    number = next(number for number, name in BRANCHES.items() if name == wanted)
    if library.mkl_serv_cbwr_set(number) != 0 and log.isEnabledFor(logging.WARNING):
        _warn_late()


@cache
def _warn_late() -> None:
    log.warning(
        "torch computed before flexfleet was imported, so this process computes other last bits, and a run that begins "
        "here resumes only in a process like it. Import flexfleet before torch computes"
    )


def cpu_bf16() -> tuple[str, ...]:
    """The instructions of `BF16` that this processor has; none if the system is not Linux."""
    return tuple(name for name in BF16 if name in system.features())


def settled(asked: Literal["auto"] | Precision, devices: Iterable[str], before: Mapping[str, Any] | None) -> Precision:
    """Return the precision for `run.precision`. `auto` keeps that of a resumed run, whose numerics are `before`. A new
    run gets bf16 if the processor multiplies bfloat16 (`BF16`) or the GPU does (compute capability 8.0), amp on GPUs
    from 7.0 on, which only have float16, and else fp32."""
    if asked != "auto":
        return asked
    if before is not None and before.get("precision") in get_args(Precision):
        log.info("run.precision=auto: %s, as the run began", before["precision"])
        return before["precision"]  # type: ignore[no-any-return]
    found = {device: _suits(torch.device(device)) for device in devices}
    chosen = {precision for precision, _ in found.values()}
    if len(chosen) != 1:
        said = ", ".join(f"{precision} on {device}" for device, (precision, _) in found.items())
        raise ConfigError(f"run.precision=auto would be {said}, but a run has one precision: set it")
    precision, why = next(iter(found.values()))
    log.info("run.precision=auto: %s, since %s", precision, why)
    return precision


def _suits(device: torch.device) -> tuple[Precision, str]:
    """The precision for `auto` on a device, and the reason."""
    if device.type == "cpu":
        if found := cpu_bf16():
            return "bf16", f"the processor has {found[0]}"
        return "fp32", f"the processor does not multiply bfloat16 (it has none of {', '.join(BF16)})"
    if device.type != "cuda":
        raise ConfigError(f"run.precision=auto supports cpu and cuda, not {device.type}: set fp32, bf16, amp or fp16")
    capability = torch.cuda.get_device_capability(device)
    said = f"the GPU has compute capability {'.'.join(map(str, capability))}"
    return ("bf16" if capability >= (8, 0) else "amp" if capability >= (7, 0) else "fp32"), said


def describe(numerics: Numerics, devices: Iterable[str]) -> dict[str, Any]:
    """The values that must be equal for equal bits, and `lanes`, for the run's record."""
    devices = tuple(devices)
    kinds = sorted({d.split(":")[0] for d in devices})
    names = sorted({torch.cuda.get_device_name(d) for d in devices if d.startswith("cuda")})
    return {
        **asdict(numerics),
        "flush_denormal": True,
        "threads_per_client": 1,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_parts": list(system.parts()),
        "cpu_bf16": list(cpu_bf16()),
        "cpu_fp16": [name for name in FP16 if name in system.features()],
        "mkl_cbwr": mkl_cbwr(),
        "devices": kinds + names,
        **({"cudnn": torch.backends.cudnn.version()} if names else {}),  # type: ignore[no-untyped-call]
    }


NOISE = "^(log|cos|sin|sqrt)$"
"""The numpy functions that compute the noise of a private run."""


def describe_noise() -> dict[str, Any]:
    """Further values that must be equal for equal bits of a private run."""
    used = opt_func_info(func_name=NOISE, signature="float64")
    return {"numpy": np.__version__, **{name: used[name]["dd"]["current"] for name in sorted(used)}}


def flushes_now() -> bool:
    """Whether this thread treats denormal numbers as zero. torch can set that, but not report it."""
    return not (torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).any()


def deciding(described: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `describe` that decide the bits: half-precision instructions only if a processor trains in that
    precision, types of cores only if a processor trains."""
    precision, on_cpu = described.get("precision"), "cpu" in described.get("devices", ())
    counts = {
        "lanes": False,
        "cpu_parts": on_cpu,
        "cpu_bf16": on_cpu and precision in ("bf16", "amp"),
        "cpu_fp16": on_cpu and precision == "fp16",
    }
    return {name: value for name, value in described.items() if counts.get(name, True)}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Name the entries of `describe` that decide the bits and that differ, with both values; empty if none differs."""
    one, other = deciding(before), deciding(now)
    pairs = {name: (one.get(name), other.get(name)) for name in {**one, **other}}
    return ", ".join(
        f"{name}: {there!r} there, {here!r} here" for name, (there, here) in pairs.items() if there != here
    )
