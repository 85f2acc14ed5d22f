"""A worker of a study, which runs trial after trial. `python -m flexfleet.experiments.tune_worker` starts one.

Workers know of each other only through the study: you may kill any of them, and start others, at any time.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fl_engine.core.errors import BadInput, Diverged, Refused, Unreachable
from fl_engine.core.text import path_of
from fl_engine.core.types import Pool
from flexfleet.config import Config, Range, load_config
from flexfleet.experiments import tune_storage, tune_trials
from flexfleet.experiments.tune_report import said
from flexfleet.experiments.tune_space import applied, excess, space_of, suggest, symbols
from flexfleet.experiments.tune_trials import MERGED, check_converges
from flexfleet.files import terminal
from flexfleet.files.artifacts import BareHistory, PoolFile
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import known_run
from flexfleet.pipeline.retry import name_in
from flexfleet.pipeline.share import adopt, fits, share
from flexfleet.pipeline.site import check_fleet

log = logging.getLogger("flexfleet")

POLL_S = 1.0
"""Seconds after which a worker looks again, while the last trials run elsewhere."""


def work(config: Config, folder: Path, id: str, worker: int = 0, prepared: Path | None = None) -> list[int]:
    """Run trial after trial of a study that has begun, until the study has enough, and return their numbers.

    If no trial is left to begin, wait for the trials of other workers, and take over those whose workers are gone.
    `prepared`: the folder of partition, pre-training and the default's pool; None: the study's folder.
    """
    prepared, mine = prepared or folder, list[int]()
    study = tune_storage.open_study(config, folder, id, begun=True)
    # A restarted worker must not draw the same values as the one before it.
    study.sampler = tune_storage.sampler(config.seed + worker + 1000 * len(tune_trials.begun(study)))
    space, _ = searched(config, prepared)
    seen: dict[int, tuple[Any, float]] = {}
    waiting = False
    while len(tune_trials.done(study)) < config.tune.trials:
        tune_trials.give_back_stale(study, seen)
        if len(tune_trials.begun(study)) >= config.tune.trials:
            if not waiting:
                log.info("waiting for the last trials of other workers")
            waiting = True
            time.sleep(POLL_S)
            continue
        trial = study.ask()
        if tune_trials.surplus(study, trial, config.tune.trials):
            tune_trials.drop(study, trial)
        elif _try(config, folder, study, trial, space, prepared):
            mine.append(trial.number)
    return mine


def _try(config: Config, folder: Path, study: Any, trial: Any, space: Mapping[str, Range], prepared: Path) -> bool:
    """Run a trial and store its value; False if another worker got the trial meanwhile."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    value, state = None, None
    try:
        with tune_storage.answering(config), tune_trials.beating(trial):
            values, ready = suggest(trial, _drawn(trial, space)), None
            try:
                ready = _pools(config, folder, trial, values, prepared)
                setting = "the default" if tune_trials.is_default(trial) else said(values, symbols(config, values))
                log.info("trial %d begins (%d in all): %s", trial.number, config.tune.trials, setting)
                value = _trial(config, study, trial, ready)
            except tune_trials.Pruned:
                state = TrialState.PRUNED
            except Diverged as error:
                log.info("trial %d has no value: %s", trial.number, error)
                state = tune_trials.give_up(trial, tune_trials.DIVERGED, error)
            except BadInput as error:
                # An error of a run, or of a server, is not caused by the trial's values.
                if ready is not None or isinstance(error, Unreachable):
                    raise
                # Such as sizes that cross, or an adaptive model above the next level.
                log.info("trial %d is infeasible: %s", trial.number, error)
                state = tune_trials.give_up(trial, tune_trials.INFEASIBLE, error)
            taken = study.tell(trial, value, state=state, skip_if_finished=True).state == TrialState.FAIL
    except (tune_trials.TakenOver, UpdateFinishedTrialError):
        taken = True
    except (Exception, KeyboardInterrupt) as error:
        interrupted = tune_trials.meets_any_values(error)
        goes_on = interrupted and not isinstance(error, Refused)  # it may be the run that is refused
        try:
            with tune_storage.answering(config):
                tune_trials.give_back(study, study.trials[trial.number], died=not interrupted, goes_on=goes_on)
        except (Unreachable, Refused) as failed:
            log.warning("%s: trial %d is given back when the study is resumed", failed, trial.number)
        raise
    if taken:
        log.info("trial %d was silent for too long: another worker tries its values", trial.number)
        return False
    if value is not None:
        log.info("trial %d: %s %.4f with %s", trial.number, config.tune.metric, value, setting)
    return True


def _drawn(trial: Any, space: Mapping[str, Range]) -> Mapping[str, Range]:
    """Return the part of the space that a trial draws. The default's trial has values only for the sampler, which
    cannot learn from a configured value outside its range."""
    if not tune_trials.is_default(trial):
        return space
    return {path: space[path] for path in trial.user_attrs[tune_trials.DEFAULT]}


def _pools(
    config: Config, folder: Path, trial: Any, values: Mapping[str, Any], prepared: Path
) -> list[tuple[Resolved, Path]]:
    """Prepare the trial's runs, one for each seed, and return them with their folders. Raises BadInput if the values
    give no pool, or a pool of which devices can hold no model."""
    changed, ready = config if tune_trials.is_default(trial) else applied(config, values), []
    for seed in config.tune.seeds:
        out = folder / "trials" / f"{tune_trials.runs_of(trial)}-s{seed}"
        run = resolved(changed, seed, out)
        prepare(run, prepared, out)
        built = PoolFile.read(out / "pool" / "pool.json").pool()
        check_fleet(run, built)
        for name, points in excess(built, run.config, run.family).items():
            trial.set_constraint(f"{name}/s{seed}", points)
        ready.append((run, out))
    return ready


def _trial(config: Config, study: Any, trial: Any, ready: Sequence[tuple[Resolved, Path]]) -> float:
    """Return the mean over the seeds of the last round's metric. The rounds of the first seed decide about pruning.
    Raises Diverged if the run of a seed diverges or merges no update."""
    scores = []
    for i, (run, out) in enumerate(ready):
        reporter = tune_trials.Reporter(trial, config.tune.metric) if i == 0 else None
        scores.append(rounds(run, out, tune_storage.tags(study, trial=str(tune_trials.runs_of(trial))), reporter))
        for folder in ("rounds", "states", "flights"):  # a trial's models are not needed any more
            shutil.rmtree(out / folder, ignore_errors=True)
    return mean(scores)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="One worker of a study.")
    p.add_argument("--config", type=path_of, required=True, metavar="FILE")
    p.add_argument("--study", type=path_of, required=True, metavar="DIR")
    p.add_argument("--id", required=True)
    p.add_argument("--worker", type=int, required=True)
    args = p.parse_args(argv)
    config = load_config(args.config)
    with stopping_at_once(), tune_storage.answering(config):
        work(config, args.study, args.id, args.worker)
    return 0


def resolved(config: Config, seed: int, out: Path | None = None) -> Resolved:
    """Return the run of a seed. In `run.remote` its ledger is in `<study>/trials` or `<study>/held-out`, like `out`."""
    own: dict[str, Any] = {"seed": seed}
    if out is not None and config.run.remote is not None:
        where = f"{config.run.remote.rstrip('/')}/{out.parent.parent.name}/{out.parent.name}"
        own["run"] = config.run.model_copy(update={"remote": where})
    return Resolved.of(config.model_copy(update=own))


def prepare(resolved: Resolved, prepared: Path, out: Path) -> None:
    """Write partition, pre-training and pool of a run into `out`. Partition and pre-training are computed once, in
    `prepared`, unless the search changes them."""
    shared = prepared / f"shared-s{resolved.config.seed}"
    if not (shared / "shared.json").exists():
        share(resolved, shared)
    if fits(resolved, shared):
        adopt(resolved, shared, out)
    else:
        share(resolved, out)
    model_pool(resolved, out / "pretrain", out / "pool")


def prepare_default(config: Config, folder: Path) -> None:
    """Prepare the run of the first seed with the default setting, whose pool decides what is searched."""
    prepare(resolved(config, config.tune.seeds[0]), folder, folder / "default")


def searched(config: Config, prepared: Path) -> tuple[dict[str, Range], Pool]:
    """Return the search space and the default's pool."""
    pool = PoolFile.read(prepared / "default" / "pool" / "pool.json").pool()
    return space_of(config, pool), pool


def rounds(resolved: Resolved, out: Path, tags: Mapping[str, str], observer: Any = None) -> float:
    """Run the missing rounds, and return the metric of the last round. The observer gets all measurements.

    Raises:
        ConfigError: `out` holds a run of another setting.
        Diverged: The metric is not finite in the end, or no update was merged.
    """
    known = known_run(resolved.config, out, resume=True)
    if known is None or not (out / "history.json").exists():
        # A study whose folder is lost begins again at number 0, but the ledgers of its earlier runs remain.
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


if __name__ == "__main__":
    terminal.run_main(main)
