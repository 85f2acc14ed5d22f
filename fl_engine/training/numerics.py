"""Numerics: settings and hardware features that affect rounding. With the same configuration, seed and numerics, all
backends return the same global model bit for bit."""

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
"""Linux names of the CPU instructions that multiply bfloat16, on x86 and Arm. Without such an instruction, bf16 is
slower than float32."""
FP16 = ("amx_fp16", "avx512_fp16", "asimdhp")
"""Linux names of the CPU instructions that multiply float16."""


@dataclass(frozen=True)
class Numerics:
    """Settings of a run that affect rounding."""

    strategy: Strategy = "single"
    """`single` trains one client at a time. `batched` trains clients in parallel if their tasks have the same key
    (`local.kind`)."""
    lanes: int = 1
    """Maximum number of clients that `batched` trains in parallel on a CPU. The number does not affect results."""
    precision: Precision = "fp32"
    """The precision of training. The loss and the evaluation always use float32.

    `bf16` uses autocast; weights, optimizer and batch-norm sums stay float32. `amp` uses autocast to float16 with a
    scaled loss on CUDA, and is `bf16` on other devices. As in FedAIoT's code, `fp16` uses float16 for weights, samples,
    gradients and the optimizer (`model.half()`). `fp16` supports only SGD, without loss scaling and weight decay.
    `fp16` requires `single`, because torch's float16 convolutions round differently with several lanes."""

    def __post_init__(self) -> None:
        if self.precision == "fp16" and self.strategy == "batched":
            raise ValueError("strategy must be single with precision fp16, got batched")

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.precision in ("fp32", "fp16"):
            return nullcontext()
        return torch.autocast(device.type, torch.float16 if self.scales(device) else torch.bfloat16)

    def scales(self, device: torch.device) -> bool:
        """Return True if the loss is scaled before the backward pass."""
        return self.precision == "amp" and device.type == "cuda"


SINGLE = Numerics()

BRANCHES = {
    1: "OFF", 2: "AUTO", 3: "COMPATIBLE", 4: "SSE2", 6: "SSSE3", 7: "SSE4_1", 8: "SSE4_2", 9: "AVX", 10: "AVX2",
    11: "AVX512_MIC", 12: "AVX512", 13: "AVX512_MIC_E1", 14: "AVX512_E1",
}  # fmt: skip
"""Maps MKL's numeric codes (mkl_types.h) to values of the variable MKL_CBWR."""
STRICT = 0x10000


@cache
def _mkl() -> Any:
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return library if hasattr(library, "mkl_serv_cbwr_get") else None
    except OSError:
        return None


def mkl_cbwr() -> str:
    """Return MKL's setting for reproducible rounding. The variable MKL_CBWR is read only if MKL cannot return the
    setting, because the variable may have changed after MKL's first call."""
    library = _mkl()
    if library is None:
        return os.environ.get("MKL_CBWR", "unset")
    found = int(library.mkl_serv_cbwr_get(-1))
    branch = found & ~STRICT
    return BRANCHES.get(branch, str(branch)) + (",STRICT" if found & STRICT else "")


@cache  # Warn only once.
def set_mkl_branch() -> None:
    """If the variable MKL_CBWR is AUTO, set MKL's mode to AUTO. Log a warning if MKL rejects the mode."""
    library = _mkl()
    if library is None or os.environ.get("MKL_CBWR") != "AUTO" or mkl_cbwr() != "OFF":
        return
    if library.mkl_serv_cbwr_set(2) != 0:  # AUTO
        log.warning("torch was used before flexfleet was imported, which affects rounding. Import flexfleet first")


def cpu_bf16() -> tuple[str, ...]:
    """Return the instructions in `BF16` that this processor supports. Return () if the system is not Linux."""
    return tuple(name for name in BF16 if name in system.features())


def choose_precision(
    wanted: Literal["auto"] | Precision, devices: Iterable[str], before: Mapping[str, Any] | None
) -> Precision:
    """Return the precision that `run.precision` selects.

    With `auto`, a resumed run uses the precision in `before`, the stored numerics of the run. A new run uses bf16 if
    the processor has an instruction in `BF16` or the GPU has compute capability 8.0 or higher. Otherwise, a new run
    uses amp on GPUs with compute capability 7.0 or higher, and fp32 on all other devices.
    """
    if wanted != "auto":
        return wanted
    if before is not None and before.get("precision") in get_args(Precision):
        log.info("run.precision=auto: using %s, the precision of the resumed run", before["precision"])
        return before["precision"]  # type: ignore[no-any-return]
    found = {device: _suitable(torch.device(device)) for device in devices}
    if len(set(found.values())) != 1:
        each = ", ".join(f"{precision} on {device}" for device, precision in found.items())
        raise ConfigError.at(f"run.precision=auto selects {each}. Set one precision for all devices")
    precision = next(iter(found.values()))
    log.info("run.precision=auto: using %s, the fastest suitable precision of %s", precision, ", ".join(found))
    return precision


def _suitable(device: torch.device) -> Precision:
    if device.type == "cpu":
        return "bf16" if cpu_bf16() else "fp32"
    if device.type != "cuda":
        raise ConfigError.at(f"run.precision must be fp32 or bf16 on {device.type}, got auto")
    capability = torch.cuda.get_device_capability(device)
    return "bf16" if capability >= (8, 0) else "amp" if capability >= (7, 0) else "fp32"


def describe(numerics: Numerics, devices: Iterable[str]) -> dict[str, Any]:
    """Return the settings and hardware features that affect rounding, and the number of lanes. The run stores them."""
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
"""Regular expression for the numpy functions that compute the noise of differential privacy."""


def describe_noise() -> dict[str, Any]:
    """Return the NumPy version and CPU kernels, which affect rounding in a run with differential privacy."""
    used = opt_func_info(func_name=NOISE, signature="float64")
    return {"numpy": np.__version__, **{name: used[name]["dd"]["current"] for name in sorted(used)}}


def flushes_now() -> bool:
    """Return True if this thread treats denormal numbers as zero. torch has no function that returns this setting."""
    return not (torch.full((1,), 2.0**-140, dtype=torch.float32, device="cpu") * 1.0).any()


def deciding(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `described` that affect rounding. CPU core types are included only if clients train on a
    CPU. Half-precision instructions are included only if clients train on a CPU in half precision."""
    precision, on_cpu = described.get("precision"), "cpu" in described.get("devices", ())
    counts = {
        "lanes": False,
        "cpu_parts": on_cpu,
        "cpu_bf16": on_cpu and precision in ("bf16", "amp"),
        "cpu_fp16": on_cpu and precision == "fp16",
    }
    return {name: value for name, value in described.items() if counts.get(name, True)}


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """List the entries that affect rounding and differ between `before` and `now`. Return "" if no entry differs."""
    one, other = deciding(before), deciding(now)
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    return ", ".join(f"{name}: {one.get(name)!r} there, {other.get(name)!r} here" for name in names)
