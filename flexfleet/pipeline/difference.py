"""Report where two runs part, and why (`flexfleet diff`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_engine.core.errors import IntegrityError
from fl_engine.core.fields import Moves
from fl_engine.core.types import Params
from fl_engine.data.partition import MANIFEST, read_manifest
from fl_engine.storage.checkpoints import Checkpoints, Row
from fl_engine.storage.run_files import round_folder
from fl_engine.storage.store import decode
from flexfleet import config as configs
from flexfleet.files.artifacts import RunFile
from flexfleet.pipeline.resume import store_of


@dataclass(frozen=True)
class Difference:
    """The first differences between two runs.

    Attributes:
        equal: True if all common rounds have the same assignments, updates and models.
        rounds: Number of rounds that both runs have.
        settings: Map each parameter that can change the result to its two values.
        inputs: Map each input that differs to its two values: the data, the partition, the pool, torch, the processor.
        round: First round that differs, counted from 1; None if no round differs.
        what: First difference in this round: `assignments`, `update` or `model`.
        client: Client of the first update that differs.
        tensor: Tensor with the largest absolute difference in this update or model; None if the tensors were not kept.
        largest: This absolute difference.
    """

    equal: bool
    rounds: int
    settings: dict[str, tuple[Any, Any]]
    inputs: dict[str, tuple[Any, Any]]
    round: int | None = None
    what: str | None = None
    client: int | None = None
    tensor: str | None = None
    largest: float | None = None


def difference(first: Path, second: Path) -> Difference:
    """Compare two runs. Raises IntegrityError if a file of a run is damaged."""
    runs = [RunFile.read(folder / "run.json") for folder in (first, second)]
    parsed = [configs.parse_schema(run.config) for run in runs]
    flat = [configs.flatten(config) for config in parsed]
    names = [name for name in flat[0] | flat[1] if configs.moves(name) in (Moves.RESULT, Moves.NUMERICS)]
    inputs = [_inputs(folder, run) for folder, run in zip((first, second), runs, strict=True)]
    ledgers = [
        Checkpoints(store_of(config, run.run_id, folder))
        for config, run, folder in zip(parsed, runs, (first, second), strict=True)
    ]
    settings, others = _unequal(flat[0], flat[1], names), _unequal(inputs[0], inputs[1])
    common, found = 0, None
    for row, other in zip(*(ledger.each_row() for ledger in ledgers), strict=False):
        common += 1
        found = found or _first(row, other)
    if found is None:
        return Difference(True, common, settings, others)
    round, what, client = found
    name, largest = _largest(ledgers, round, client)
    return Difference(False, common, settings, others, round + 1, what, client, name, largest)


def _inputs(folder: Path, run: RunFile) -> dict[str, Any]:
    data = read_manifest(folder / "partition" / MANIFEST).data_sha256
    found = {"data": data, "partition": run.partition_sha256, "pool": run.pool_sha256, "code": run.code_sha256}
    return found | run.sources | run.numerics


def _unequal(
    first: Mapping[str, Any], second: Mapping[str, Any], names: Sequence[str] | None = None
) -> dict[str, tuple[Any, Any]]:
    names = sorted(first.keys() | second.keys()) if names is None else names
    pairs = {name: (first.get(name), second.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _first(row: Row, other: Row) -> tuple[int, str, int | None] | None:
    """Return the round, what differs, and the client; None if the rounds are equal."""
    if row.plan != other.plan:
        return row.round, "assignments", None
    sums = {line["client"]: line.get("sha256") for line in other.clients}
    for line in row.clients:
        if line.get("sha256") != sums.get(line["client"]):
            return row.round, "update", line["client"]
    return (row.round, "model", None) if row.model != other.model else None


def _largest(ledgers: Sequence[Checkpoints], round: int, client: int | None) -> tuple[str | None, float | None]:
    """Return the tensor with the largest difference; (None, None) if a run did not keep the tensors."""
    try:
        first, second = (_tensors(ledger, round, client) for ledger in ledgers)
    except IntegrityError:
        return None, None
    gaps = {
        name: float((first[name].double() - second[name].double()).abs().max())
        for name in first.keys() & second.keys()
        if first[name].shape == second[name].shape and first[name].numel()
    }
    name = max(sorted(gaps), key=lambda name: gaps[name], default=None)
    return (None, None) if name is None else (name, gaps[name])


def _tensors(ledger: Checkpoints, round: int, client: int | None) -> Params:
    if client is None:
        return ledger.read(round)[0]
    key = f"{round_folder(round)}updates/{client}.safetensors"
    return decode(ledger.store.get(key), ledger.store.uri(key))
