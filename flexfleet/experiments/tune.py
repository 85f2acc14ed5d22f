"""Search an algorithm's hyper-parameters: trials, pruned by round; then the best setting against the default on seeds
that no trial has used.

A study is a folder `<run.store>/<id>/`: the trials' runs, `study.log` (unless `tune.storage` names a database), and in
the end `tune.json`, `params.yaml` (the configuration with the best values if they are better), `patch.yaml` (the
changed values) and `study.html`. After a kill, the same command with --resume continues: an interrupted trial is tried
again under another number, and continues the runs of the first.
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
from flexfleet.config import Config, flatten, load_config, moves, shown
from flexfleet.config.form import check_workers, hand_over, write_config
from flexfleet.config.run_names import plain
from flexfleet.experiments import tune_space, tune_storage, tune_trials, tune_worker
from flexfleet.experiments.compare import RunsFailed
from flexfleet.experiments.executor import Command, side_by_side, told_failures
from flexfleet.experiments.tune_conclusion import FILES, conclude
from flexfleet.experiments.tune_report import Tuned, markdown
from flexfleet.experiments.tune_worker import work
from flexfleet.files.run_folder import check_free, check_same, folder_lock, go_on
from flexfleet.files.signals import stopping_at_once
from flexfleet.pipeline.check import check
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.run import need_packages
from flexfleet.pipeline.share import share
from flexfleet.tracking.record import of_job
from flexfleet.tracking.trackers import MLflow, ending

CONFIG = "configuration"
"""Attribute of the study: the parameters that a resumed study must not change, by dotted name."""


def tune(config: Config, id: str, *, resume: bool = False) -> Tuned:
    """Run the trials that a study still needs, with `tune.workers` processes, then the comparison on held-out seeds.

    Raises:
        ConfigError: The search is impossible.
        Stopped: The process or a worker got SIGTERM, or the terminal was closed.
    """
    folder = Path(config.run.store) / plain(id, "a study's id")
    check_free(folder, resume, "--id")
    _examine(config)
    with folder_lock(folder), tune_storage.told_how_to_go_on(id), stopping_at_once(), tune_storage.answering(config):
        study = tune_storage.open_study(config, folder, id)  # before anything trains
        tune_worker.prepare_default(config, folder)
        with ending(_begin(config, folder, study, folder, {})):
            _work_all(config, folder, study)
            return conclude(config, study, folder, folder)


def _examine(config: Config) -> None:
    """Raise ConfigError and others for a search that is meaningless or cannot run."""
    searched = (Moves.RESULT, Moves.LENGTH)
    clash = sorted(path for path in config.tune.space if path == "seed" or moves(path) not in searched)
    if clash:
        raise ConfigError(f"tune.space: {', '.join(clash)} cannot be searched")
    tune_space.check_names(config)
    tune_space.check_whole(config.tune.space)
    if not config.tune.seeds:
        raise ConfigError("tune.seeds is empty: name at least one seed for the trials' runs, e.g. [0]")
    for name, seeds in (("seeds", config.tune.seeds), ("held_out", config.tune.held_out)):
        if twice := [str(seed) for seed, count in Counter(seeds).items() if count > 1]:
            raise ConfigError(f"tune.{name} must not repeat a seed, got {', '.join(twice)} more than once")
    if known := sorted({*config.tune.seeds} & {*config.tune.held_out}):
        raise ConfigError(
            f"tune.held_out must have seeds that tune.seeds does not have, got {', '.join(map(str, known))}"
        )
    resolved = Resolved.of(config)
    check(resolved, publishes=False)
    need_packages(resolved)


def _begin(config: Config, folder: Path, study: Any, prepared: Path, tags: Mapping[str, str]) -> MLflow | None:
    """Begin or resume the study and its MLflow run with these `tags`; return the MLflow run. The default is the first
    trial. Raises ConfigError for a study that was begun with another configuration or in another storage."""
    new = not study.get_trials(deepcopy=False)
    if new and (folder / "trials").exists():  # numbers begin at 0, so new trials would take the results of old ones
        where = masked(tune_storage.address(config) or str(folder / "study.log"))
        raise ConfigError(
            f"{folder / 'trials'} has trials that the study in {where} does not have: set the tune.storage that the "
            "study was begun with, or choose another --id"
        )
    _check_same(study, config, folder)
    if tune_storage.address(config) is None:  # the study is a file, and this process has its folder
        tune_trials.give_back_all(study)
    if new:
        first = tune_space.defaults(config, *tune_worker.searched(config, prepared))
        study.enqueue_trial(first, user_attrs={tune_trials.DEFAULT: [*first]})
    parent = tune_storage.parent(config, study, tags)
    if parent is not None:
        study.set_user_attr(tune_storage.PARENT, parent.run_id)
        parent.params(shown(config))
    return parent


def _check_same(study: Any, config: Config, folder: Path) -> None:
    """Raise ConfigError for a study that was begun with another configuration, whose trials are not comparable. The
    number of trials, the workers and the held-out seeds may change."""
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


def _work_all(config: Config, folder: Path, study: Any) -> None:
    id = study.study_name
    given, stdin = hand_over(config, folder / "config.yaml")
    many = config.tune.workers
    if many == 1:
        work(config, folder, id)
        return
    asked = ("--config", given, "--study", str(folder), "--id", id, "--worker")
    workers = [
        Command(f"worker{i}", "flexfleet.experiments.tune_worker", (*asked, str(i)), folder / f"worker{i}.log", stdin)
        for i in range(many)
    ]
    codes = side_by_side(workers, many)
    failed = [code for code in codes.values() if code]
    if failed and len(tune_trials.done(study)) < config.tune.trials:
        ended = told_failures(codes, {each.name: each.log for each in workers})
        raise RunsFailed(f"workers ended before the study was done: {ended}; {go_on(id)}", failed[0])


# ------------------------------------------------------------------------------------------- as tasks of a graph
def prepare(config: Config, id: str, out: Path, job_id: str) -> list[dict[str, str]]:
    """Check the search, write the data that all workers need into `out`, and begin a study in a database. Return a
    mapping for each worker, of texts, because a graph may turn numbers into floats."""
    many = config.tune.workers
    check_workers(many)
    if many > 1 and tune_storage.address(config) is None:
        raise ConfigError(
            f"tune.workers = {many} needs a database that pods can share: set tune.storage to its address, or put the "
            "address into the Secret flexfleet-tune as FLEXFLEET_TUNE_STORAGE, or set tune.workers to 1"
        )
    _examine(config)
    study = None if tune_storage.address(config) is None else tune_storage.open_study(config, out, id)
    write_config(config, out / "config.yaml")
    for seed in config.tune.seeds:
        share(tune_worker.resolved(config, seed), out / f"shared-s{seed}")
    tune_worker.prepare_default(config, out)
    if study is not None:
        _begin(config, out, study, out, of_job(config, job_id))
    return [{"study": id, "worker": str(i)} for i in range(many)]


def work_in_graph(prepared: Path, id: str, worker: int, out: Path, job_id: str) -> list[int]:
    """Run a worker as a task; return the numbers of its trials, and write them into `out`. Without a database this is
    the only worker, and the study is written into `out` too."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    out.mkdir(parents=True, exist_ok=True)
    alone_with_it = tune_storage.address(config) is None
    with stopping_at_once(), tune_storage.answering(config):
        if alone_with_it:
            study = tune_storage.open_study(config, folder, id)
            parent = _begin(config, folder, study, prepared, of_job(config, job_id))
        else:
            parent = tune_storage.parent(config, tune_storage.open_study(config, folder, id, begun=True), {})
        with ending(parent):
            mine = work(config, folder, id, worker, prepared)
    (out / "trials.json").write_text(json.dumps(mine), encoding="utf-8")
    if alone_with_it:
        shutil.copyfile(folder / "study.log", out / "study.log")
    return mine


def report(prepared: Path, id: str, workers: Sequence[Path], out: Path, text: Path, html: Path) -> Tuned:
    """Run the last task: write the outcome of the study into `out`, as Markdown into `text` and as HTML into `html`.
    `workers`: the folders that `work_in_graph` wrote."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    with folder_lock(folder), tune_storage.answering(config):
        study = tune_storage.open_study(config, workers[0], id, begun=True)
        with ending(tune_storage.parent(config, study, {})):
            tuned = conclude(config, study, folder, prepared)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(folder / name, out / name)
    text.write_text(markdown(tuned, (out / "patch.yaml").read_text("utf-8")), encoding="utf-8")
    shutil.copyfile(out / "study.html", html)
    return tuned
