"""A worker of a study, which runs trial after trial. `python -m flexfleet.experiments.worker` starts one.

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
from flexfleet.config import Config, Range, load_config
from flexfleet.experiments import runs, storage, tracked, trials
from flexfleet.experiments.outcome import said
from flexfleet.experiments.space import applied, excess, suggest, symbols
from flexfleet.files import terminal
from flexfleet.files.artifacts import PoolFile
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.prepare import Resolved
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
    study = storage.open_study(config, folder, id, begun=True)
    # A restarted worker must not draw the same values as the one before it.
    study.sampler = storage.sampler(config.seed + worker + 1000 * len(trials.begun(study)))
    space, _ = runs.searched(config, prepared)
    seen: dict[int, tuple[Any, float]] = {}
    waiting = False
    while len(trials.done(study)) < config.tune.trials:
        trials.clear_stale(study, folder, seen)
        if len(trials.begun(study)) >= config.tune.trials:
            if not waiting:
                log.info("the last trials are with other workers: waiting for their ends")
            waiting = True
            time.sleep(POLL_S)
            continue
        trial = study.ask()
        if trials.surplus(study, trial, config.tune.trials):
            trials.drop(study, trial)
        elif _try(config, folder, study, trial, space, prepared):
            mine.append(trial.number)
    return mine


def _try(config: Config, folder: Path, study: Any, trial: Any, space: Mapping[str, Range], prepared: Path) -> bool:
    """Runs a trial and tells the study its value; False if another worker got the trial meanwhile."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    value, state = None, None
    try:
        with storage.answering(config), trials.beating(trial):
            trial.set_user_attr(trials.WORKER, trials.me())
            values, ready = suggest(trial, _drawn(trial, space)), None
            try:
                ready = _pools(config, folder, trial, values, prepared)
                setting = "the default" if trials.is_default(trial) else said(values, symbols(config, values))
                log.info("trial %d begins (%d in all): %s", trial.number, config.tune.trials, setting)
                value = _trial(config, study, trial, ready)
            except trials.Pruned:
                state = TrialState.PRUNED
            except Diverged as error:
                log.info("trial %d has no value: %s", trial.number, error)
                state = trials.give_up(trial, trials.DIVERGED, error)
            except BadInput as error:
                # What is wrong with a run is no property of its values, nor who does not answer.
                if ready is not None or isinstance(error, Unreachable):
                    raise
                # Impossible: sizes that cross, an adaptive model above the next level.
                log.info("trial %d cannot be: %s", trial.number, error)
                state = trials.give_up(trial, trials.INFEASIBLE, error)
            taken = study.tell(trial, value, state=state, skip_if_finished=True).state == TrialState.FAIL
    except (trials.Taken, UpdateFinishedTrialError):
        taken = True
    except (Exception, KeyboardInterrupt) as error:
        interrupted = trials.meets_any_values(error)
        goes_on = interrupted and not isinstance(error, Refused)  # it may be the run that is refused
        try:
            with storage.answering(config):
                trials.give_back(study, study.trials[trial.number], died=not interrupted, goes_on=goes_on)
        except (Unreachable, Refused) as failed:
            log.warning("%s: trial %d is given back by a resumed study", failed, trial.number)
            if interrupted:
                trials.cut_off(folder, trial.number)
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
    if not trials.is_default(trial):
        return space
    return {path: space[path] for path in trial.user_attrs[trials.DEFAULT]}


def _pools(
    config: Config, folder: Path, trial: Any, values: Mapping[str, Any], prepared: Path
) -> list[tuple[Resolved, Path]]:
    """The trial's runs, one for each seed and ready to begin, with their folders. Raises BadInput if the values give no
    pool, or one of which devices can hold no model."""
    changed, ready = config if trials.is_default(trial) else applied(config, values), []
    for seed in config.tune.seeds:
        out = folder / "trials" / f"{trials.runs_of(trial)}-s{seed}"
        run = runs.resolved(changed, seed, out)
        runs.prepare(run, prepared, out)
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
        reporter = trials.Reporter(trial, config.tune.metric) if i == 0 else None
        scores.append(runs.rounds(run, out, tracked.tags(study, trial=str(trials.runs_of(trial))), reporter))
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
    with stopping_at_once(), storage.answering(config):
        work(config, args.study, args.id, args.worker)
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
