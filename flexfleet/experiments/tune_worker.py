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
    """One worker of a study that has begun: it runs trial after trial until the study has enough. Gives the numbers of
    the trials that this worker has finished. `prepared`: the folder of partition, pre-training and the default's pool,
    if it is not the study's folder.

    If no trial is left to begin, the worker waits for the trials that run elsewhere, and takes over those whose workers
    are gone.
    """
    prepared, mine = prepared or folder, list[int]()
    study = tune_storage.open_study(config, folder, id, begun=True)
    # A restarted worker must not draw the same values as the one before it.
    study.sampler = tune_storage.sampler(config.seed + worker + 1000 * len(tune_trials.begun(study)))
    space, _ = searched(config, prepared)
    seen: dict[int, tuple[Any, float]] = {}
    waiting = False
    while len(tune_trials.done(study)) < config.tune.trials:
        tune_trials.clear_stale(study, folder, seen)
        if len(tune_trials.begun(study)) >= config.tune.trials:
            if not waiting:
                log.info("the last trials are with other workers: waiting for their ends")
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
    """Runs a trial and tells the study its value; False if another worker got the trial meanwhile."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    value, state = None, None
    try:
        with tune_storage.answering(config), tune_trials.beating(trial):
            trial.set_user_attr(tune_trials.WORKER, tune_trials.me())
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
                # What is wrong with a run is no property of its values, nor who does not answer.
                if ready is not None or isinstance(error, Unreachable):
                    raise
                # Impossible: sizes that cross, an adaptive model above the next level.
                log.info("trial %d cannot be: %s", trial.number, error)
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
            log.warning("%s: trial %d is given back by a resumed study", failed, trial.number)
            if interrupted:
                tune_trials.cut_off(folder, trial.number)
        raise
    if taken:
        log.info("trial %d was silent for too long: another worker tries its values", trial.number)
        return False
    if value is not None:
        log.info("trial %d: %s %.4f with %s", trial.number, config.tune.metric, value, setting)
    return True


def _drawn(trial: Any, space: Mapping[str, Range]) -> Mapping[str, Range]:
    """The part of the space that a trial draws. The default's trial is told its values only so that the sampler learns
    from it, and a configured value outside its range cannot be told."""
    if not tune_trials.is_default(trial):
        return space
    return {path: space[path] for path in trial.user_attrs[tune_trials.DEFAULT]}


def _pools(
    config: Config, folder: Path, trial: Any, values: Mapping[str, Any], prepared: Path
) -> list[tuple[Resolved, Path]]:
    """The trial's runs, one for each seed and ready to begin, with their folders. Raises BadInput if the values give no
    pool, or one of which devices can hold no model."""
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
    """The mean over the seeds of the last round's metric; the rounds of the first seed decide about pruning. Raises
    Diverged if the run of a seed diverges or merges no update."""
    scores = []
    for i, (run, out) in enumerate(ready):
        reporter = tune_trials.Reporter(trial, config.tune.metric) if i == 0 else None
        scores.append(rounds(run, out, tune_storage.tags(study, trial=str(tune_trials.runs_of(trial))), reporter))
        for folder in ("rounds", "states", "flights"):  # nobody needs a trial's models
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


if __name__ == "__main__":
    terminal.run_main(main)
