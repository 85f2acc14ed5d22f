"""Pods that train on a GPU (`kubernetes.pools.*.torch_device`). Without a GPU these tests are skipped."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

POOLS = json.dumps({tier: {"torch_device": "cuda"} for tier in ("weak", "medium", "strong")})


@pytest.mark.parametrize("lifetime", ["round", "run"])
def test_they_train_the_bits_of_one_process_with_a_gpu(
    lifetime: str, cluster: Any, rounds: Callable[..., Path], remote: tuple[str, ...]
) -> None:
    """New interpreters: a process that has used CUDA cannot be forked."""
    cluster.python = sys.executable
    cluster.slots = threading.Semaphore(100)
    pods = (*remote, f"kubernetes.lifetime={lifetime}", f"kubernetes.pools={POOLS}")

    def model(name: str, *sets: str) -> bytes:
        return (rounds(name, "rounds.stop=2", *sets) / "model.safetensors").read_bytes()

    found = model("pods", *pods)
    assert found == model("here", "run.devices=[cuda]"), "\n".join(cluster.logs)
    assert found != model("cpu"), "a GPU rounds in another way"
