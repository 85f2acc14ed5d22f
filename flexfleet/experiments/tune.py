"""Search hyper-parameters: run trials with pruning, then compare the best trial with the default on held-out seeds.

A study is stored in the folder `<run.store>/<id>/`, which contains the runs of all trials. The trials are recorded in
`study.log` or in the database `tune.storage`. At the end, `tune.json`, `study.html` and `params.yaml` are written. To
continue an interrupted study, repeat the command with --resume. An interrupted trial gets a new number, and its runs
are resumed.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, masked
from fl_engine.core.fields import Moves
from flexfleet.config import Config, algorithm, flatten, load_config, moves, shown
from flexfleet.config.form import check_count, hand_over, write_config
from flexfleet.config.read import split, used_options
from flexfleet.config.run_names import check_name
from flexfleet.experiments import tune_space, tune_storage, tune_worker
from flexfleet.experiments.executor import Command, RunsFailed, report_failures, resumable, side_by_side
from flexfleet.experiments.tune_report import FILES, Tuned, conclude, markdown
from flexfleet.experiments.tune_worker import work
from flexfleet.files.run_folder import check_free, check_same, folder_lock, how_to_resume
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.check import check, check_folders
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import share
from flexfleet.pipeline.run import need_packages
from flexfleet.tracking.record import of_job
from flexfleet.tracking.trackers import MLflow, ending

CONFIG = "configuration"
"""Attribute of the study with the parameters that must not change on resume, as {dotted name: value}."""


def tune(config: Config, id: str, *, resume: bool = False) -> Tuned:
    """Run the missing trials of a study in `tune.workers` processes, and then compare the best trial with the default.

    Raises:
        ConfigError: The search space or another setting is invalid.
        Stopped: The process or a worker received SIGTERM, or the terminal was closed.
    """
    folder = Path(config.run.store) / check_name(id, "a study's id")
    check_free(folder, resume, "--id")
    check_folders(config)
    _check(config)
    with resumable(folder, id), tune_storage.answering(config):
        study = tune_storage.open_study(config, folder, id)  # check the storage before training
        tune_worker.prepare_default(config, folder)
        with ending(_begin(config, folder, study, folder, {})):
            _execute(config, folder, study)
            return conclude(config, study, folder, folder)


def _check(config: Config) -> None:
    """Raise an error if the study cannot run, such as ConfigError for an invalid search space or invalid seeds."""
    import optuna  # noqa: F401 - report a missing package before the study's folder is created

    tune = config.tune
    tune_space.check_names(config)
    for path, seeds in (("tune.seeds", tune.seeds), ("tune.held_out", (*tune.seeds, *tune.held_out))):
        if twice := [str(seed) for seed, count in Counter(seeds).items() if count > 1]:
            raise ConfigError.at(f"`{path}` must not repeat seeds, got {', '.join(twice)} more than once")
    resolved = Resolved.of(config)
    check(resolved, publishes=False)
    need_packages(resolved)


def _begin(config: Config, folder: Path, study: Any, prepared: Path, tags: Mapping[str, str]) -> MLflow | None:
    """Start or resume the study, and return its MLflow run, which gets the `tags`. Return None if tracking is off. Call
    this function before workers start. The first trial of a new study runs the unchanged configuration. Raises
    ConfigError if the study was started with another configuration or storage."""
    new = not study.get_trials(deepcopy=False)
    if new and (folder / "trials").exists():  # new trials would reuse the runs of old trials with the same number
        where = masked(tune_storage.address(config) or str(folder / "study.log"))
        raise ConfigError(
            f"{folder / 'trials'} contains trials that are missing from the study in {where}. Set the tune.storage "
            "with which the study was started, or choose another --id",
            path="tune.storage",
        )
    _check_same(study, config, folder)
    tune_worker.retry_all(study)  # call before workers start, because it retries all running trials
    if new:
        first = tune_space.defaults(config, *tune_worker.searched(config, prepared))
        study.enqueue_trial(first, user_attrs={tune_worker.DEFAULT: [*first]})
    parent = tune_storage.parent(config, study, tags)
    if parent is not None:
        study.set_user_attr(tune_storage.PARENT, parent.run_id)
        results, settings = split(used_options(config, algorithm(config), tune_worker.searched(config, prepared)[1]))
        parent.params(results)
        parent.settings(settings | {key: value for key, value in shown(config).items() if key.startswith("tune.")})
    return parent


def _check_same(study: Any, config: Config, folder: Path) -> None:
    """Raise ConfigError if the study was started with another configuration, because its trials would not be
    comparable. The number of trials, the number of workers and the held-out seeds may change."""
    fixed = tuple(f"tune.{name}" for name in ("metric", "seeds", "space"))
    values = {
        key: value
        for key, value in flatten(config).items()
        if moves(key) not in (Moves.EXECUTION, Moves.PLACE) or key.startswith(fixed)
    }
    now, known = json.loads(json.dumps(values)), study.user_attrs.get(CONFIG)
    if known is None:
        study.set_user_attr(CONFIG, now)
        return
    check_same(folder, known, now, name="--id")


def _execute(config: Config, folder: Path, study: Any) -> None:
    """Run the missing trials in this process, or in `tune.workers` processes."""
    id, many = study.study_name, config.tune.workers
    given, stdin = hand_over(config, folder / "config.yaml")
    if many == 1:
        work(config, folder, id)
        return
    argv = ("--config", given, "--study", str(folder), "--id", id, "--worker")
    workers = [
        Command(f"worker{i}", "flexfleet.experiments.tune_worker", (*argv, str(i)), folder / f"worker{i}.log", stdin)
        for i in range(many)
    ]
    codes = side_by_side(workers, many)
    failed = [code for code in codes.values() if code]
    if failed and len(tune_worker.trials_in(study, *tune_worker.DONE)) < config.tune.trials:
        ended = report_failures(codes, workers)
        raise RunsFailed(f"workers failed before the study ended: {ended}. To retry, {how_to_resume(id)}", failed[0])


# ------------------------------------------------------------------------------------------- pipeline tasks
def prepare(config: Config, id: str, out: Path, job_id: str) -> list[dict[str, str]]:
    """Check the study, and write into `out` the files that all workers read. Start a study that is stored in a
    database. Returns the task parameters of each worker as strings, because Kubeflow can convert integers to floats."""
    many, has_database = config.tune.workers, tune_storage.address(config) is not None
    check_count(many, "tune.workers", "tune.workers")
    if many > 1 and not has_database:
        raise ConfigError.at(
            f"`tune.workers` = {many} requires a database that all pods can reach. Set tune.storage to the address, "
            "or store the address in the Secret flexfleet-tune as FLEXFLEET_TUNE_STORAGE, or set tune.workers to 1"
        )
    _check(config)
    study = tune_storage.open_study(config, out, id) if has_database else None
    write_config(config, out / "config.yaml")
    for seed in config.tune.seeds:
        share(tune_worker.resolved(config, seed), out / f"shared-s{seed}")
    tune_worker.prepare_default(config, out)
    if study is not None:
        _begin(config, out, study, out, of_job(config, job_id))
    return [{"study": id, "worker": str(i)} for i in range(many)]


def work_in_graph(prepared: Path, id: str, worker: int, out: Path, job_id: str) -> list[int]:
    """Run a worker as a pipeline task, write the numbers of the worker's trials into `out`, and return these numbers.
    Without a database there is only one worker, which also writes the study into `out`."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    out.mkdir(parents=True, exist_ok=True)
    has_database = tune_storage.address(config) is not None
    with stopping_at_once(), tune_storage.answering(config):
        study = tune_storage.open_study(config, folder, id, begun=has_database)
        if has_database:
            parent = tune_storage.parent(config, study, {})
        else:
            parent = _begin(config, folder, study, prepared, of_job(config, job_id))
        with ending(parent):
            mine = work(config, folder, id, worker, prepared)
    (out / "trials.json").write_text(json.dumps(mine), encoding="utf-8")
    if not has_database:
        shutil.copyfile(folder / "study.log", out / "study.log")
    return mine


def report(prepared: Path, id: str, workers: Sequence[Path], out: Path, text: Path, html: Path) -> Tuned:
    """Run the last task: write FILES into `out`, a summary in Markdown into `text`, and the HTML page into `html`.
    `workers` are the folders that `work_in_graph` has written."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    with folder_lock(folder), tune_storage.answering(config):
        study = tune_storage.open_study(config, workers[0], id, begun=True)
        with ending(tune_storage.parent(config, study, {})):
            tuned = conclude(config, study, folder, prepared)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(folder / name, out / name)
    text.write_text(markdown(tuned), encoding="utf-8")
    shutil.copyfile(out / "study.html", html)
    return tuned
