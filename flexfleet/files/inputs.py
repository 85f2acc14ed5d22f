"""The files in a run's folder that its rounds were computed from: those of partition, preparations and pool."""

from __future__ import annotations

from pathlib import Path

from fl_engine.core.errors import IntegrityError
from fl_engine.storage.store import sha256
from flexfleet.files import prepared
from flexfleet.files.artifacts import RunFile


def check_inputs(folder: Path, run: RunFile) -> None:
    """Raises IntegrityError naming the file that is missing, or not the one that the run used."""
    scores = prepared.index(folder / "pretrain").get("apoz")  # none where the algorithm asks for no APoZ
    for name, expected, record in (
        ("partition/partition.json", run.partition_sha256, "run.json"),
        ("pretrain/apoz.json", None if scores is None else scores.sha256, prepared.INDEX),
        ("pool/pool.json", run.pool_sha256, "run.json"),
    ):
        try:
            actual = sha256((folder / name).read_bytes())
        except OSError as error:
            raise IntegrityError(
                f"{folder / name}, which the run used, cannot be read ({error.strerror}): put it back, or run again"
            ) from error
        if expected is not None and actual != expected:
            raise IntegrityError(
                f"{folder / name} is not the one that the run used: its sha256 is {actual[:16]}..., {record} says "
                f"{expected[:16]}... . Put the right one back, or run again"
            )
