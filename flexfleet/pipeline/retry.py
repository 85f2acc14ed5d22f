"""Step 4 if something else restarts it: a retry of Kubeflow, `dvc repro` after an interruption, or a study that has
lost its folder.

All need a folder with the results only, and the rounds in a place that survives a killed attempt. DVC deletes a stage's
folder before it runs the stage. So `main` keeps the rounds in another folder, whose name is derived from everything
that the model's bits depend on: parameters, partition, pool, traces, folders of clients, numerics, the engine's code
and the user's own. The same inputs find an interrupted run again, and other inputs never do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fl_engine
from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError
from fl_engine.core.fields import Moves
from fl_engine.fleet.trace_sources import digest
from fl_engine.storage.code import store_key
from fl_engine.storage.store import FolderStore, sha256
from fl_engine.training.numerics import Numerics, describe, describe_noise, settled
from flexfleet.config import flatten, moves
from flexfleet.config.sources import sources
from flexfleet.files import terminal
from flexfleet.files.artifacts import RunFile
from flexfleet.files.run_status import tally_in
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.own_code import sha256_of
from flexfleet.pipeline.partition import folders_sum, simulated
from flexfleet.pipeline.prepare import Resolved, check_unchanged, resolved_of
from flexfleet.pipeline.resume import devices_decide
from flexfleet.pipeline.site import site_of

OUTCOME = ("run.json", "history.json", "model.safetensors")
DONE = ".done"
"""End of the names of folders that are being deleted. A kill may have left a part of one, so none is resumed."""


def federate_in(
    folder: Path,
    resolved: Resolved,
    partition: Path,
    pool: Path,
    out: Path,
    tags: dict[str, str] | None = None,
    mlflow_run_id: str | None = None,
) -> Path:
    """Run or resume the rounds in `folder`, whose name is the run's, and copy the results into `out`. Raises what
    `federate` raises, and Diverged or NothingMerged if the model is useless."""
    federate(resolved, partition, pool, folder, resume=True, tags=tags, mlflow_run_id=mlflow_run_id)
    tally_in(folder).check()
    code = RunFile.read(folder / "run.json").code_sha256
    for name in (*OUTCOME, *([store_key(code)] if code is not None else [])):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, out / name)
    return out


def federate_for_dvc(
    resolved: Resolved, partition: Path, pool: Path, out: Path, check: Callable[[], None] = lambda: None
) -> Path:
    """Write run.json, history.json and model.safetensors into `out`, and resume an interrupted run. `check` is called
    before the rounds are deleted. Raises ConfigError if the files that the model depends on have changed, because DVC
    would record the model as theirs."""
    unfinished = out.with_name(f"{out.name}.unfinished")
    folder = unfinished / identity(resolved, partition, pool)
    for left in unfinished.glob(f"*{DONE}"):
        shutil.rmtree(left)
    federate_in(folder, resolved, partition, pool, out)
    check()
    if identity(resolved, partition, pool) != folder.name:
        raise ConfigError(
            f"code or files on which the rounds depend have changed while they ran, and {out} is of those before. "
            "Start it again"
        )
    done = folder.with_name(f"{folder.name}{DONE}")
    folder.rename(done)
    shutil.rmtree(done)
    if not any(unfinished.iterdir()):
        unfinished.rmdir()
    return out


def name_in(out: Path, resolved: Resolved) -> str:
    """The name of a run whose folder `out` may be lost while its ledger is stored in `run.remote`: the folder's name
    and `digest_of`. So a new folder with the same inputs finds the ledger, and other inputs get another one."""
    if (out / "run.json").exists():
        return RunFile.read(out / "run.json").run_id
    return f"{out.name}-{digest_of(resolved, out / 'partition', out / 'pool')}"


def identity(resolved: Resolved, partition: Path, pool: Path) -> str:
    """Algorithm, seed, and `digest_of`."""
    config = resolved.config
    return f"{config.algorithm['name']}-s{config.seed}-{digest_of(resolved, partition, pool)}"


def digest_of(resolved: Resolved, partition: Path, pool: Path) -> str:
    """12 hexadecimal digits of everything that the model depends on."""
    config = resolved.config
    # A run with more rounds has no result for fewer rounds.
    parameters = {k: v for k, v in flatten(config.settled()).items() if moves(k) in (Moves.RESULT, Moves.LENGTH)}
    precision = settled(config.run.precision, config.run.devices, None)
    package = Path(fl_engine.__file__).parent
    parts: dict[str, Any] = {
        "parameters": parameters,
        "partition": sha256(FolderStore(partition).get("partition.json")),
        "pool": sha256(FolderStore(pool).get("pool.json")),
        "numerics": describe(Numerics(precision=precision), config.run.devices),
        "strategy": config.run.strategy,
        "code": {str(p.relative_to(package)): sha256(p.read_bytes()) for p in sorted(package.rglob("*.py"))},
    }
    if (code := sha256_of(config)) is not None:
        parts["own code"] = code
    if found := sources(config):
        parts["sources"] = found
    if privacy.is_private(resolved.algorithm):
        parts["noise"] = describe_noise()
    if devices_decide(config):
        parts["devices decide"] = True
    if config.fleet.trace is not None and config.fleet.trace.files:
        parts["trace"] = digest(config.fleet.trace)
    if config.partition.folders is not None and not config.run.apart:
        parts["folders"] = folders_sum(simulated(resolved, site_of(resolved, partition, pool)))
    return sha256(json.dumps(parts, sort_keys=True).encode())[:12]


def main(argv: Sequence[str] | None = None) -> int:
    p = terminal.step_parser(__doc__ or "", partition="partition", pool="model_pool")
    args = terminal.parsed(p, argv)
    resolved = resolved_of(args)
    written = federate_for_dvc(
        resolved, args.partition, args.pool, args.out, lambda: check_unchanged(args, resolved.config)
    )
    terminal.show(str(written))
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
