"""One run of a study: a setting with a seed, in a folder of the study."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_engine.core.errors import BadInput
from fl_engine.core.types import Pool
from flexfleet.config import Config, Range
from flexfleet.experiments.space import space_of
from flexfleet.experiments.trials import MERGED, check_converges
from flexfleet.files.artifacts import BareHistory, PoolFile
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import known_run
from flexfleet.pipeline.retry import name_in
from flexfleet.pipeline.share import adopt, fits, share


def resolved(config: Config, seed: int, out: Path | None = None) -> Resolved:
    """The run of a seed; if ledgers are in `run.remote`, its ledger is there in the folder `<study>/trials` or
    `<study>/held-out`, as `out` is in the study's."""
    own: dict[str, Any] = {"seed": seed}
    if out is not None and config.run.remote is not None:
        where = f"{config.run.remote.rstrip('/')}/{out.parent.parent.name}/{out.parent.name}"
        own["run"] = config.run.model_copy(update={"remote": where})
    return Resolved.of(config.model_copy(update=own))


def prepare(resolved: Resolved, prepared: Path, out: Path) -> None:
    """Writes partition, pre-training and pool of a run into `out`. If the search does not change what the runs of a
    seed share, it is computed once, in `prepared`."""
    shared = prepared / f"shared-s{resolved.config.seed}"
    if not (shared / "shared.json").exists():
        share(resolved, shared)
    if fits(resolved, shared):
        adopt(resolved, shared, out)
    else:
        share(resolved, out)
    model_pool(resolved, out / "pretrain", out / "pool")


def prepare_default(config: Config, folder: Path) -> None:
    """Prepares the run of the first seed with the default setting: its pool decides what is searched."""
    prepare(resolved(config, config.tune.seeds[0]), folder, folder / "default")


def searched(config: Config, prepared: Path) -> tuple[dict[str, Range], Pool]:
    """The search space, and the default's pool."""
    pool = PoolFile.read(prepared / "default" / "pool" / "pool.json").pool()
    return space_of(config, pool), pool


def rounds(resolved: Resolved, out: Path, tags: Mapping[str, str], observer: Any = None) -> float:
    """Runs the rounds that are missing, and returns the metric of the last one. The observer gets the measurements of
    all rounds. Raises ConfigError if `out` holds a run of another setting, Diverged if the metric is not finite in the
    end or no update was merged."""
    try:
        known = known_run(resolved.config, out, resume=True)
    except BadInput as error:
        raise type(error)(str(error).replace("--run-id", "--id")) from error
    if known is None or not (out / "history.json").exists():
        # Without its folder a study begins again: its runs get the numbers of earlier ones, whose ledgers are kept.
        name = out.name if resolved.config.run.remote is None else name_in(out, resolved)
        steps = out / "partition", out / "pool", out
        federate(resolved, *steps, run_id=name, resume=True, tags=dict(tags), observer=observer)
        observer = None
    rows, metric = BareHistory.read(out / "history.json").rounds, resolved.config.tune.metric
    if observer is not None:
        observer.metrics([(row["round"] + 1, row["metrics"]) for row in rows])
    value = rows[-1]["metrics"].get(metric)
    check_converges(value, sum(row["metrics"].get(MERGED, 0) for row in rows), metric)
    return float(value)
