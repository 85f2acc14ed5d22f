"""All that bits depend on besides configuration and seed: equal numerics, equal models, on whatever backend."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.lib.introspect import opt_func_info

Strategy = Literal["single", "batched"]
Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Numerics:
    """How the arithmetic of a run is done."""

    strategy: Strategy = "single"
    """`single`: one client at a time; `batched`: clients with tasks of equal kind side by side (`lanes`)."""
    lanes: int = 1
    """So many clients side by side at most, with `batched`. Moves no bit."""
    precision: Precision = "fp32"
    """`bf16`: forward and backward pass under autocast; weights, loss, optimiser and batch norm's sums stay float32."""

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(device.type, torch.bfloat16)


SINGLE = Numerics()


def describe(numerics: Numerics, devices: Iterable[str]) -> dict[str, Any]:
    """For the run's record: what has to be equal for equal bits, and `lanes`."""
    kinds = sorted({d.split(":")[0] for d in devices})
    names = [torch.cuda.get_device_name()] if "cuda" in kinds else []
    return {
        **asdict(numerics),
        "threads_per_client": 1,
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "mkl_cbwr": os.environ["MKL_CBWR"],
        "devices": kinds + names,
    }


NOISE = "^(log|cos|sin|sqrt)$"
"""What of numpy a private run's noise is computed with."""


def describe_noise() -> dict[str, Any]:
    """For a private run's record: what else has to be equal for equal bits."""
    used = opt_func_info(func_name=NOISE, signature="float64")
    return {"numpy": np.__version__, **{name: used[name]["dd"]["current"] for name in sorted(used)}}


def deciding(described: Mapping[str, Any]) -> dict[str, Any]:
    """Of what `describe` gave, that on which bits depend."""
    return {name: value for name, value in described.items() if name != "lanes"}
