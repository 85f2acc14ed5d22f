"""The part of a run's outcome that must not depend on kills, and what the run has left behind."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_engine.core.clients import ENCODING, LEASE_S
from fl_engine.rounds.timing import MEASURED
from tests.harness.processes import Done, marked
from tests.harness.world import BUCKET, Place
from tests.k8s import fake

MAY_DIFFER = ("seconds", "peak_mb", MEASURED, "link")
"""Prefixes of metrics that are measured, and the links, which depend on them. `seconds_simulated` is not measured."""
ENDS_S = 10.0
"""Seconds within which a process has to end after the run."""


@dataclass(frozen=True)
class Outcome:
    model_sha256: str
    """From history.json."""
    model: str
    """sha256 of the model file's bytes."""
    model_in_store: str
    rounds: dict[str, Any]
    """The rounds and clients in history.json."""
    tracked: dict[str, Any]
    """Values in MLflow, by metric and step."""
    printed: dict[str, Any]
    """The JSON object on stdout; empty for a single step."""
    files: dict[str, str]
    """sha256 of the files of other steps."""


def outcome(place: Place, done: Done) -> Outcome:
    """The outcome of a run whose last command ended with `done`."""
    history = json.loads((place.out / "history.json").read_text())
    model = _sha256((place.out / "model.safetensors").read_bytes())
    stored = model
    if place.s3 is not None:
        stored = _sha256(place.s3.get_object(Bucket=BUCKET, Key=f"{place.prefix}a/model.safetensors")["Body"].read())
    names = ("evaluation.json", "confusion.json", "pool/pool.json", "partition/partition.json")
    here = [name for name in names if (place.out / name).exists()]
    return Outcome(
        history["model_sha256"],
        model,
        stored,
        _rounds(history["rounds"]),
        _tracked(place.folder / "mlflow.db"),
        _timeless(done.json if place.variant.whole else {}, ("mlflow_run_id", "seconds", "store_uri", "forecast")),
        {name: _sha256((place.out / name).read_bytes()) for name in here},
    )


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """Return a line for each difference."""
    lines = []
    for field in fields(Outcome):
        one, other = getattr(expected, field.name), getattr(found, field.name)
        if not isinstance(one, dict):
            one, other = {"": one}, {"": other}
        for key in [key for key in one | other if key not in one or key not in other or one[key] != other[key]][:5]:
            what = " ".join(filter(None, (field.name, key)))
            lines.append(f"{what}: {one.get(key, 'nothing')} was expected, got {other.get(key, 'nothing')}")
    return lines


def leftovers(place: Place) -> list[str]:
    """Return a line for each thing that a finished run must not leave."""
    lines = [f"temporary file: {path}" for path in sorted(place.folder.rglob("*.part"))]
    lines += [f"temporary folder: {path}" for path in sorted(place.folder.rglob(".mlflow-*"))]
    until = time.monotonic() + ENDS_S
    while (alive := marked(place.token)) and time.monotonic() < until:
        time.sleep(0.05)
    lines += [f"process: {pid}" for pid in alive]
    if place.devices is not None:
        lines += place.devices.wrong(place.read_mailbox)
    if place.variant.clients in ("pod", "staying"):
        lines += [f"in the cluster: {kind} {name}" for kind, name in fake.leftovers(place.world.cluster)]
        lines += [f"pod that runs: {name}" for name in sorted(place.world.cluster.running)]
    return lines + _mlflow_runs(place.folder / "mlflow.db")


def _rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"in order": [row.pop("round") for row in rows]}
    for number, row in zip(found["in order"], rows, strict=True):
        metrics, clients = row.pop("metrics"), row.pop("clients")
        found |= {f"{number} {name}": value for name, value in {**row, **metrics}.items() if _same_always(name)}
        for line in clients:
            told = _timeless(line, ("client", "seconds", LEASE_S, *ENCODING))
            found |= {f"{number} client {line['client']} {name}": value for name, value in told.items()}
    return found


def _same_always(metric: str) -> bool:
    return metric == "seconds_simulated" or not metric.startswith(MAY_DIFFER)


def _timeless(values: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _tracked(data_base: Path) -> dict[str, Any]:
    """Values in MLflow. Of a metric that may differ, only that it is there; of one that is there more than once, how
    often."""
    rows = _asked(data_base, "select key, step, value, is_nan from metrics")
    often = Counter((key, step) for key, step, *_ in rows)
    values = {(key, step): (value, nan) if _same_always(key) else "" for key, step, value, nan in rows}
    return {
        f"{key} at step {step}": value if often[key, step] == 1 else f"{often[key, step]} times"
        for (key, step), value in values.items()
    }


def _mlflow_runs(data_base: Path) -> list[str]:
    """A line if MLflow has anything else than one run, which is finished."""
    states = [state for (state,) in _asked(data_base, "select status from runs")]
    return [] if states == ["FINISHED"] else [f"runs in MLflow: {', '.join(states) or 'none'}"]


def _asked(data_base: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(data_base)) as connection:
        return connection.execute(sql).fetchall()


def _sha256(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()
