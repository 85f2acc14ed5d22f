"""Run step 4 (the rounds) so that Kubeflow, DVC or a study can restart the step after it was killed.

The output folder contains only the results, because DVC deletes the output folder before it runs a stage. The rounds
are stored in a separate folder, so that the next attempt can resume them. The name of this folder contains a digest of
all inputs of the training. Therefore, an attempt resumes the rounds only if all inputs are unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import fl_engine
from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Moves
from fl_engine.storage.code import store_key
from fl_engine.storage.store import FolderStore, sha256
from fl_engine.training.numerics import Numerics, choose_precision, describe, describe_noise
from flexfleet.config import flatten, moves
from flexfleet.config.sources import sources
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.own_code import sha256_of
from flexfleet.pipeline.partition import folders_sum, simulated, site_of, trace_sum
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt, devices_decide

OUTCOME = ("run.json", "history.json", "model.safetensors")
DONE = ".done"
"""Suffix of a folder that is being deleted. A run in such a folder is never resumed, because files may be missing."""


def federate_in(
    folder: Path,
    resolved: Resolved,
    partition: Path,
    pool: Path,
    out: Path,
    tags: dict[str, str] | None = None,
    mlflow_run_id: str | None = None,
) -> Path:
    """Run or resume the rounds in `folder`, and copy the results into `out`. The name of `folder` is the run ID. Raises
    the errors of `federate`, and Diverged or NothingMerged if the model is unusable."""
    federate(resolved, partition, pool, folder, Attempt(resume=True, tags=tags or {}, mlflow_run_id=mlflow_run_id))
    tally_in(folder).check()
    code = RunFile.read(folder / "run.json").code_sha256
    for name in (*OUTCOME, *([store_key(code)] if code is not None else [])):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, out / name)
    return out


def federate_for_dvc(resolved: Resolved, partition: Path, pool: Path, out: Path) -> Path:
    """Run or resume the rounds, and write run.json, history.json and model.safetensors into `out`. Raises ConfigError
    if an input file of the training has changed, because DVC would record the new file as the input of this model."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    folder = unfinished / identity(resolved, partition, pool)
    for left in unfinished.glob(f"*{DONE}"):
        shutil.rmtree(left)
    federate_in(folder, resolved, partition, pool, out)
    if identity(resolved, partition, pool) != folder.name:
        raise ConfigError(
            f"code or input files have changed during the rounds, so {out} was computed from earlier versions. Run the "
            "step again"
        )
    done = folder.with_name(f"{folder.name}{DONE}")
    folder.rename(done)
    shutil.rmtree(done)
    if not any(unfinished.iterdir()):
        unfinished.rmdir()
    return out


def name_in(out: Path, resolved: Resolved) -> str:
    """Return the ID of the run in the folder `out`, whose ledger is in `run.remote`. The ID contains the result of
    `digest_of`, so that a run with the same inputs finds the ledger again if the folder is lost."""
    if (out / "run.json").exists():
        return RunFile.read(out / "run.json").run_id
    return f"{out.name}-{digest_of(resolved, out / 'partition', out / 'pool')}"


def identity(resolved: Resolved, partition: Path, pool: Path) -> str:
    """Return the name of the folder for the rounds. The name contains the algorithm, the seed and a digest."""
    config = resolved.config
    return f"{config.algorithm['name']}-s{config.seed}-{digest_of(resolved, partition, pool)}"


def digest_of(resolved: Resolved, partition: Path, pool: Path) -> str:
    """Return a digest (12 hexadecimal digits) of all inputs of the training."""
    config = resolved.config
    # Include the parameters for the number of rounds, because a longer run cannot provide the result of a shorter run.
    parameters = {k: v for k, v in flatten(config.settled()).items() if moves(k) in (Moves.RESULT, Moves.LENGTH)}
    precision = choose_precision(config.run.precision, config.run.devices, None)
    package = Path(fl_engine.__file__).parent
    local = config.partition.folders is not None and not config.run.apart
    parts: dict[str, Any] = {
        "parameters": parameters,
        "partition": sha256(FolderStore(partition).get("partition.json")),
        "pool": sha256(FolderStore(pool).get("pool.json")),
        "numerics": describe(Numerics(precision=precision), config.run.devices),
        "strategy": config.run.strategy,
        "code": {str(p.relative_to(package)): sha256(p.read_bytes()) for p in sorted(package.rglob("*.py"))},
        "own code": sha256_of(config),
        "sources": sources(config),
        "noise": describe_noise() if privacy.is_private(resolved.algorithm) else None,
        "devices decide": devices_decide(config),
        "trace": trace_sum(config),
        "folders": folders_sum(simulated(resolved, site_of(resolved, partition, pool))) if local else None,
    }
    return sha256(json.dumps(parts, sort_keys=True).encode())[:12]
