"""Run, prune and retry the trials of a study. `python -m flexfleet.experiments.tune_worker` starts a worker.

Workers exchange data only through the study, so each worker can be killed or started at any time.
"""

from __future__ import annotations

import argparse
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fl_engine.core.contracts import Tracker
from fl_engine.core.errors import BadInput, Diverged, NothingMerged, Refused, Stopped, Unreachable
from fl_engine.core.text import path_of
from fl_engine.core.types import Pool
from flexfleet.config import Config, Range, load_config
from flexfleet.experiments import tune_storage
from flexfleet.experiments.tune_space import applied, excess, listed, space_of, suggest, symbols
from flexfleet.files import terminal
from flexfleet.files.artifacts import History, PoolFile
from flexfleet.files.run_status import tally_of
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import check_fleet
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import adopt, can_adopt, share
from flexfleet.pipeline.resume import Attempt, known_run
from flexfleet.pipeline.retry import name_in

log = logging.getLogger("flexfleet")

WORKER = "worker"
"""Trial attribute with the number of the worker that runs the trial, and that retries it after a restart."""
DEATHS = "tried"
"""Trial attribute with the number of workers that died while they ran a trial with the same values."""
MOST_DEATHS = 4
"""A trial is not retried if this many workers have died while running its values, which may need too much memory."""
RESUMES = "resumes"
"""Attribute of a retried trial with the number of the interrupted trial whose runs are resumed."""
DEFAULT = "default"
"""Attribute of the trial that runs the unchanged configuration. The attribute lists the parameters whose values are
inside the search space."""
INFEASIBLE, DIVERGED = "infeasible", "diverged"
"""Attributes with the reason why a trial has no value: its pool cannot be used, or its training failed."""


class Pruned(Stopped):
    """Raised if a trial is pruned, because other trials had higher metrics after the same round."""


DONE = ("COMPLETE", "PRUNED")
"""States of trials that have ended, including pruned trials."""
BEGUN = (*DONE, "RUNNING")


def trials_in(study: Any, *states: str) -> list[Any]:
    """Return all trials whose state is in `states`."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.name in states]


def is_default(trial: Any) -> bool:
    """Return whether the trial runs the unchanged configuration."""
    return DEFAULT in trial.user_attrs


def runs_of(trial: Any) -> int:
    """Return the number of the trial that started the runs of this trial. The names of the runs contain this number."""
    return int(trial.user_attrs.get(RESUMES, trial.number))


def surplus(study: Any, trial: Any, wanted: int) -> bool:
    """Return whether the study has `wanted` or more earlier trials, including trials that wait for a retry. A surplus
    trial exists if two workers start the last missing trial at the same time."""
    before = [each for each in trials_in(study, *BEGUN, "WAITING") if each.number < trial.number]
    return len(before) >= wanted


class Reporter(Tracker):
    """Report the metric of a run to the trial. Raises Pruned if the trial is worse than the other trials. Raises
    Diverged or NothingMerged instead if the run does not have a usable model."""

    def __init__(self, trial: Any, metric: str) -> None:
        self._trial, self._metric, self._rounds = trial, metric, list[Mapping[str, float]]()

    def metrics(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        for step, values in rows:
            self._rounds.append(values)
            if self._metric in values:
                self._trial.report(values[self._metric], step)
                if self._trial.should_prune():
                    tally_of(self._rounds).check()
                    raise Pruned(f"pruned after round {step}")


def retry_all(study: Any, worker: int | None = None) -> list[int]:
    """Retry the running trials of a dead worker, or of all workers if `worker` is None. Returns the trial numbers."""
    running = trials_in(study, "RUNNING")
    own = [trial for trial in running if worker is None or trial.user_attrs.get(WORKER) == worker]
    numbers = [trial.number for trial in own if retry(study, trial, died=True, resume=True)]
    if numbers:
        log.info("retrying the trials of dead workers: %s", ", ".join(map(str, numbers)))
    return numbers


def retry(study: Any, trial: Any, died: bool, resume: bool) -> bool:
    """Mark the trial as failed, and enqueue a new trial with its values. Returns False if the trial had already ended.

    Args:
        died: True if the values may be the reason why the worker died.
        resume: True if the new trial resumes the runs of this trial. False if the new trial must start new runs.
    """
    import optuna

    try:
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    except (ValueError, optuna.exceptions.UpdateFinishedTrialError):
        return False
    values = {**trial.system_attrs.get("fixed_params", {}), **trial.params}  # combine enqueued and sampled values
    deaths = int(trial.user_attrs.get(DEATHS, 0)) + died
    default = {DEFAULT: trial.user_attrs[DEFAULT]} if is_default(trial) else {}
    if deaths < MOST_DEATHS and (values or default):
        runs = {RESUMES: runs_of(trial)} if resume else {}
        study.enqueue_trial(values, user_attrs={DEATHS: deaths, **default, **runs})
    elif values or default:
        log.warning("%d workers have died with these values, so the values are not retried: %s", deaths, values)
    return True


def give_up(trial: Any, outcome: str, why: Exception) -> Any:
    """Store the error in the trial's attribute `outcome`, and return the final state of the trial."""
    from optuna.trial import TrialState

    trial.set_user_attr(outcome, str(why))
    trial.set_constraint("possible", 1.0)  # a positive value marks a violation, so the sampler avoids these parameters
    return TrialState.PRUNED


def work(config: Config, folder: Path, id: str, worker: int = 0, prepared: Path | None = None) -> list[int]:
    """Run trials until the study has `tune.trials` trials, and return the numbers of the trials that this worker ran.
    After a restart, the worker first retries its interrupted trial.

    Args:
        worker: Number of the worker in the study.
        prepared: Folder with partition, pre-training and pool of the default setting; None for the study's folder.
    """
    from optuna.trial import TrialState

    prepared, mine = prepared or folder, list[int]()
    study = tune_storage.open_study(config, folder, id, begun=True)
    retry_all(study, worker)
    # Change the seed, because a restarted worker must not draw the same values again.
    study.sampler = tune_storage.sampler(config.seed + worker + 1000 * len(trials_in(study, *BEGUN)))
    space, _ = searched(config, prepared)
    while len(trials_in(study, *BEGUN)) < config.tune.trials:
        trial = study.ask()
        if surplus(study, trial, config.tune.trials):
            study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
        else:
            trial.set_user_attr(WORKER, worker)
            _run_trial(config, folder, study, trial, space, prepared)
            mine.append(trial.number)
    return mine


def _run_trial(
    config: Config, folder: Path, study: Any, trial: Any, space: Mapping[str, Range], prepared: Path
) -> None:
    """Run a trial, and store its value in the study. If the trial fails, store the reason instead."""
    from optuna.trial import TrialState

    value, state, ready = None, None, None
    try:
        with tune_storage.answering(config):
            # Suggest only default values inside the search space, because the sampler rejects other values.
            names = trial.user_attrs[DEFAULT] if is_default(trial) else space
            values = suggest(trial, {path: space[path] for path in names})
            setting = "the default" if is_default(trial) else listed(values, symbols(config, values))
            try:
                ready = _pools(config, folder, trial, values, prepared)
                log.info("trial %d starts (%d in total): %s", trial.number, config.tune.trials, setting)
                value = _trial(config, study, trial, ready)
                log.info("trial %d: %s %.4f with %s", trial.number, config.tune.metric, value, setting)
            except Pruned:
                state = TrialState.PRUNED
            except (Diverged, NothingMerged) as error:
                log.info("trial %d ended without a value: %s", trial.number, error)
                state = give_up(trial, DIVERGED, error)
            except BadInput as error:
                # Only errors before the run starts are caused by the values of the trial.
                if ready is not None or isinstance(error, Unreachable):
                    raise
                log.info("trial %d is infeasible: %s", trial.number, error)
                state = give_up(trial, INFEASIBLE, error)
            study.tell(trial, value, state=state)
    except (Exception, KeyboardInterrupt) as error:
        # An interruption is not caused by the trial's values, so it does not count as a worker's death. Other errors
        # may be caused by the values or by the run's files.
        interrupted = isinstance(error, Stopped | KeyboardInterrupt | Unreachable)
        try:
            with tune_storage.answering(config):
                retry(study, study.trials[trial.number], died=not interrupted, resume=interrupted)
        except (Unreachable, Refused) as failed:
            log.warning("%s. Trial %d will be retried when the study is resumed", failed, trial.number)
        raise


def _pools(
    config: Config, folder: Path, trial: Any, values: Mapping[str, Any], prepared: Path
) -> list[tuple[Resolved, Path]]:
    """Prepare a run for each seed of the trial, and return each run with its folder. Raises BadInput if a pool cannot
    be built, or if a device does not have the memory for any model of the pool."""
    changed, ready = config if is_default(trial) else applied(config, values), []
    for seed in config.tune.seeds:
        out = folder / "trials" / f"{runs_of(trial)}-s{seed}"
        run = resolved(changed, seed, out)
        prepare(run, prepared, out)
        built = PoolFile.read(out / "pool" / "pool.json").pool()
        check_fleet(run, built)
        for name, points in excess(built, run.config, run.family).items():
            trial.set_constraint(f"{name}/s{seed}", points)
        ready.append((run, out))
    return ready


def _trial(config: Config, study: Any, trial: Any, ready: Sequence[tuple[Resolved, Path]]) -> float:
    """Execute the runs of the trial, and return the metric of the last round as a mean over the seeds. Only the run of
    the first seed is checked for pruning. Raises Diverged or NothingMerged if a run does not have a usable model."""
    scores = []
    for i, (run, out) in enumerate(ready):
        reporter = Reporter(trial, config.tune.metric) if i == 0 else None
        name = f"trial-{runs_of(trial)}" + (f"-s{run.config.seed}" if len(ready) > 1 else "")
        scores.append(rounds(run, out, tune_storage.tags(study, name, trial=str(runs_of(trial))), reporter))
        for folder in ("rounds", "states", "pending"):  # the stored models are no longer needed
            shutil.rmtree(out / folder, ignore_errors=True)
    return mean(scores)


def resolved(config: Config, seed: int, out: Path | None = None) -> Resolved:
    """Return the run of a seed. If `run.remote` is set, the ledger is stored there in `<study>/trials` or
    `<study>/held-out`, with the same subfolder as in `out`."""
    own: dict[str, Any] = {"seed": seed}
    if out is not None and config.run.remote is not None:
        where = f"{config.run.remote.rstrip('/')}/{out.parent.parent.name}/{out.parent.name}"
        own["run"] = config.run.model_copy(update={"remote": where})
    return Resolved.of(config.model_copy(update=own))


def prepare(resolved: Resolved, prepared: Path, out: Path) -> None:
    """Write the partition, pre-training and pool of a run into `out`. The partition and the pre-training are copied
    from `prepared` unless the values of the trial change them."""
    shared = prepared / f"shared-s{resolved.config.seed}"
    if not (shared / "shared.json").exists():
        share(resolved, shared)
    if can_adopt(resolved, shared):
        adopt(resolved, shared, out)
    else:
        share(resolved, out)
    model_pool(resolved, out / "pretrain", out / "pool")


def prepare_default(config: Config, folder: Path) -> None:
    """Prepare the run of the first seed with the default setting. The pool of this run determines the search space."""
    prepare(resolved(config, config.tune.seeds[0]), folder, folder / "default")


def searched(config: Config, prepared: Path) -> tuple[dict[str, Range], Pool]:
    """Return the search space and the pool of the default setting."""
    pool = PoolFile.read(prepared / "default" / "pool" / "pool.json").pool()
    return space_of(config, pool), pool


def rounds(resolved: Resolved, out: Path, tags: Mapping[str, str], observer: Any = None) -> float:
    """Run the missing rounds, and return the metric of the last round. `observer` receives the metrics of all rounds.

    Raises:
        ConfigError: `out` contains a run with a different configuration.
        Diverged, NothingMerged: The run does not have a usable model.
    """
    if known_run(resolved.config, out, resume=True) is None or not (out / "history.json").exists():
        # If the study's folder was deleted, trials are numbered from 0 again, but ledgers of earlier runs still exist.
        name = out.name if resolved.config.run.remote is None else name_in(out, resolved)
        steps = out / "partition", out / "pool", out
        federate(resolved, *steps, Attempt(resume=True, tags=tags, observer=observer), run_id=name)
        observer = None
    rows = History.read(out / "history.json").rounds
    if observer is not None:
        observer.metrics([(row.round + 1, row.metrics) for row in rows])
    tally_of(row.metrics for row in rows).check()
    return rows[-1].metrics[resolved.config.tune.metric]


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


if __name__ == "__main__":
    terminal.run_main(main)
