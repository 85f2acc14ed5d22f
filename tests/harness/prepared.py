"""The steps before the rounds, in this process."""

from __future__ import annotations

from pathlib import Path

from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain


def prepare(resolved: Resolved, folder: Path) -> Path:
    """Write partition/, pretrain/ and pool/ into `folder`, and return it."""
    partition(resolved, folder / "partition")
    pretrain(resolved, folder / "partition", folder / "pretrain")
    model_pool(resolved, folder / "pretrain", folder / "pool")
    return folder


def model_of(resolved: Resolved, prepared: Path, out: Path) -> bytes:
    """Return the file of the model after the rounds of a run in `out`."""
    federate(resolved, prepared / "partition", prepared / "pool", out)
    return (out / "model.safetensors").read_bytes()
