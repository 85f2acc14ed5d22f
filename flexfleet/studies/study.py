"""Searches an algorithm's hyper-parameters: trials, pruned by round; then the best setting against the default on seeds
that no trial has used.

A study is a folder `<run.store>/<id>/`: the trials' runs, `study.log` (unless `tune.storage` names a database), and in
the end `tune.json`, `params.yaml` (the configuration with the best values), `patch.yaml` (the values alone) and
`study.html`. After a kill, the same command with --resume continues.

Workers know of each other only through the study: you may kill any of them, and start others, at any time.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

from fl_engine.core.errors import BadInput, ConfigError, Diverged, masked
from fl_engine.core.fields import Moves
from fl_engine.core.plain import write_yaml
from fl_engine.core.types import Pool
from fl_engine.storage.store import FolderStore
from flexfleet.comparisons.side_by_side import Command, side_by_side, told_failures
from flexfleet.comparisons.whole import RunsFailed
from flexfleet.config import Config, Range, algorithm, flatten, load_config, moves, public, set_path, shown
from flexfleet.config.names import plain
from flexfleet.config.overrides import hand_over, write_config
from flexfleet.files import terminal
from flexfleet.files.alone import alone
from flexfleet.files.artifacts import BareHistory, PoolFile
from flexfleet.files.begun import check_free, check_same, go_on
from flexfleet.files.signals import stopping_at_once
from flexfleet.runs.check import check
from flexfleet.runs.resumable import name_in
from flexfleet.runs.whole import need_packages
from flexfleet.steps.evaluate import SMALLER
from flexfleet.steps.federate import federate
from flexfleet.steps.model_pool import model_pool
from flexfleet.steps.prepare import Resolved
from flexfleet.steps.resumed import known_run
from flexfleet.steps.share import adopt, fits, share
from flexfleet.studies import search
from flexfleet.studies.outcome import (
    Outcome,
    Tuned,
    importance,
    markdown,
    outcome_of,
    page,
    said,
    tried,
    why_none,
)
from flexfleet.tracking import server
from flexfleet.tracking.record import of_job, tracker
from flexfleet.tracking.trackers import TOKEN, MLflow, ending, log_outcome

log = logging.getLogger("flexfleet")

FILES = ("tune.json", "params.yaml", "patch.yaml", "study.html")
"""What a study leaves."""
PARENT = "mlflow-run"
"""Attribute of the study: the MLflow run that is the parent of the trials' runs."""
CONFIG = "configuration"
"""Attribute of the study: what may not change when it goes on, by dotted name."""
POLL_S = 1.0
"""Seconds after which a worker looks again, while the last trials run elsewhere."""


def tune(config: Config, id: str, *, resume: bool = False) -> Tuned:
    """Runs the trials that a study still needs, with `tune.workers` processes, then the comparison on held-out seeds.

    Raises ConfigError for an impossible search; Stopped after SIGTERM, a terminal that was closed, or if a worker was
    stopped. It and EnvironmentFailure say how to go on.
    """
    folder = Path(config.run.store) / plain(id, "a study's id")
    check_free(folder, resume, "--id")
    _examine(config)
    with alone(folder), search.told_how_to_go_on(id), stopping_at_once(), search.answering(config):
        _reach(config, folder, id)
        _prepare_default(config, folder)
        with ending(_begin(config, folder, id, folder, {})):
            _work_all(config, folder, id)
            return _conclude(config, search.open_study(config, folder, id), folder, folder)


def _examine(config: Config) -> None:
    """Raises ConfigError and others for a search that has no meaning or cannot run."""
    searched = (Moves.RESULT, Moves.LENGTH)
    clash = sorted(path for path in config.tune.space if path == "seed" or moves(path) not in searched)
    if clash:
        raise ConfigError(f"tune.space: {', '.join(clash)} cannot be searched")
    search.check_names(config)
    search.check_whole(config.tune.space)
    if not config.tune.seeds:
        raise ConfigError("tune.seeds is empty: name at least one seed for the trials' runs, e.g. [0]")
    for name, seeds in (("seeds", config.tune.seeds), ("held_out", config.tune.held_out)):
        if twice := [str(seed) for seed, count in Counter(seeds).items() if count > 1]:
            raise ConfigError(f"tune.{name}: given more than once: {', '.join(twice)}; each seed counts as one run")
    if known := sorted({*config.tune.seeds} & {*config.tune.held_out}):
        raise ConfigError(
            f"tune.held_out: these seeds are to be new, but trials run on {', '.join(map(str, known))} too "
            "(tune.seeds): name others"
        )
    resolved = Resolved.of(config)
    check(resolved, publishes=False)
    need_packages(resolved)


def _reach(config: Config, folder: Path, id: str) -> None:
    """Raises ConfigError where the study's database cannot be used, before anything trains."""
    if search.address(config) is not None:
        search.open_study(config, folder, id)


def _prepare_default(config: Config, folder: Path) -> None:
    """Prepares the run of the first seed with the default setting: its pool decides what is searched."""
    _prepare(_resolved(config, config.tune.seeds[0]), folder, folder / "default")


def _space(config: Config, prepared: Path) -> tuple[dict[str, Range], Pool]:
    """The search space, and the default's pool."""
    pool = PoolFile.read(prepared / "default" / "pool" / "pool.json").pool()
    return search.space_of(config, pool), pool


def _begin(config: Config, folder: Path, id: str, prepared: Path, tags: Mapping[str, str]) -> MLflow | None:
    """Begins the study, with the default as its first trial, and its MLflow run with these `tags`; or resumes it. Gives
    the MLflow run. Raises ConfigError for a study that was begun with another configuration or in another storage."""
    study = search.open_study(config, folder, id)
    new = not study.get_trials(deepcopy=False)
    if new and (folder / "trials").exists():  # numbers begin at 0 again: new trials would take the results of old ones
        where = masked(search.address(config) or str(folder / "study.log"))
        raise ConfigError(
            f"{folder / 'trials'} holds trials that the study in {where} does not know: give the tune.storage that "
            "the study was begun with, or choose another --id"
        )
    _check_same(study, config, folder)
    _take_up(study)
    if new:
        study.enqueue_trial(search.defaults(config, *_space(config, prepared)))
    parent = _parent(config, study, tags)
    if parent is not None:
        study.set_user_attr(PARENT, parent.run_id)
        parent.params(shown(config))
    return parent


def _check_same(study: Any, config: Config, folder: Path) -> None:
    """Raises ConfigError for a study that was started with another configuration: its trials would not be comparable.
    How many there are, who runs them and what is compared in the end may change."""
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


def _parent(config: Config, study: Any, given: Mapping[str, str]) -> MLflow | None:
    """The study's MLflow run, begun or continued. `given`: more tags. The study keeps a token before the MLflow run
    exists, so that a resumed study finds one that began as MLflow went away."""
    id, known = study.study_name, study.user_attrs.get(PARENT)
    if known is None and TOKEN not in study.user_attrs:
        study.set_user_attr(TOKEN, uuid.uuid4().hex)
    token = study.user_attrs.get(TOKEN, "")
    tags = {"flexfleet.study": id, "algorithm": str(config.algorithm["name"]), TOKEN: token, **given}
    return tracker(config, f"study {id}", tags, known)


def _tags(study: Any, **more: str) -> dict[str, str]:
    parent = study.user_attrs.get(PARENT)
    of = {} if parent is None else {server.PARENT: str(parent)}
    return {**of, "flexfleet.study": study.study_name, **{f"flexfleet.{key}": value for key, value in more.items()}}


def _work_all(config: Config, folder: Path, id: str) -> None:
    given, stdin = hand_over(config, folder / "config.yaml")
    many = config.tune.workers
    if many == 1:
        work(config, folder, id)
        return
    asked = ("--config", given, "--study", str(folder), "--id", id, "--worker")
    workers = [
        Command(f"worker{i}", "flexfleet.studies.study", (*asked, str(i)), folder / f"worker{i}.log", stdin)
        for i in range(many)
    ]
    codes = side_by_side(workers, many)
    failed = [code for code in codes.values() if code]
    if failed and len(_done(search.open_study(config, folder, id))) < config.tune.trials:
        ended = told_failures(codes, {each.name: each.log for each in workers})
        raise RunsFailed(f"workers ended before the study was done: {ended}; {go_on(id)}", failed[0])


# ------------------------------------------------------------------------------------------------------- trials
def work(config: Config, folder: Path, id: str, worker: int = 0, prepared: Path | None = None) -> list[int]:
    """One worker of a study that has begun: it runs trial after trial until the study has enough. Gives the numbers of
    the trials that this worker has finished. `prepared`: the folder of partition, pre-training and the default's pool,
    if it is not the study's folder.

    If no trial is left to begin, the worker waits for the trials that run elsewhere, and takes over those whose workers
    are gone.
    """
    prepared, mine = prepared or folder, list[int]()
    study = search.open_study(config, folder, id, begun=True)
    # A restarted worker must not draw the same values as the one before it.
    study.sampler = search.sampler(config.seed + worker + 1000 * len(_begun(study)))
    space, _ = _space(config, prepared)
    seen: dict[int, tuple[Any, float]] = {}
    waiting = False
    while len(_done(study)) < config.tune.trials:
        _take_up(study, seen)
        if len(_begun(study)) >= config.tune.trials:
            if not waiting:
                log.info("the last trials are with other workers: waiting for their ends")
            waiting = True
            time.sleep(POLL_S)
            continue
        trial = study.ask()
        if search.surplus(study, trial, config.tune.trials):
            search.drop(study, trial)
        elif _try(config, folder, study, trial, space, prepared):
            mine.append(trial.number)
    return mine


def _take_up(study: Any, seen: dict[int, tuple[Any, float]] | None = None) -> None:
    gone = search.clear_stale(study, seen)
    if gone:
        log.info("trials whose worker is gone are tried again: %s", ", ".join(map(str, gone)))


def _try(config: Config, folder: Path, study: Any, trial: Any, space: Mapping[str, Range], prepared: Path) -> bool:
    """Runs a trial and tells the study its value; False if another worker got the trial meanwhile."""
    from optuna.exceptions import UpdateFinishedTrialError
    from optuna.trial import TrialState

    value, state = None, None
    try:
        with search.beating(trial):
            trial.set_user_attr(search.WORKER, search.me())
            values, ready = search.suggest(trial, space), None
            try:
                ready = _pools(config, folder, trial, values, prepared)
                log.info("trial %d begins (%d in all): %s", trial.number, config.tune.trials, said(values))
                value = _trial(config, study, trial, ready)
            except search.Pruned:
                state = TrialState.PRUNED
            except Diverged as error:
                log.info("trial %d has no value: %s", trial.number, error)
                state = search.give_up(trial, search.DIVERGED, error)
            except BadInput as error:
                if ready is not None:  # what is wrong with a run is no property of its values
                    raise
                # Impossible: sizes that cross, an adaptive model above the next level.
                log.info("trial %d cannot be: %s", trial.number, error)
                state = search.give_up(trial, search.INFEASIBLE, error)
        taken = study.tell(trial, value, state=state, skip_if_finished=True).state == TrialState.FAIL
    except (search.Taken, UpdateFinishedTrialError):
        taken = True
    except (Exception, KeyboardInterrupt) as error:
        search.give_back(study, study.trials[trial.number], search.tried(trial, error))
        raise
    if taken:
        log.info("trial %d was silent for too long: another worker tries its values", trial.number)
        return False
    if value is not None:
        log.info("trial %d: %s %.4f with %s", trial.number, config.tune.metric, value, said(values))
    return True


def _begun(study: Any) -> list[Any]:
    """The trials that count: done, or running."""
    from optuna.trial import TrialState

    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    return [*study.get_trials(deepcopy=False, states=states)]


def _done(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return [*study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))]


def _pools(
    config: Config, folder: Path, trial: Any, values: Mapping[str, Any], prepared: Path
) -> list[tuple[Resolved, Path]]:
    """The trial's runs, one for each seed and ready to begin, with their folders. Raises BadInput if the values give no
    pool."""
    changed, ready = search.applied(config, values), []
    for seed in config.tune.seeds:
        out = folder / "trials" / f"{trial.number}-s{seed}"
        run = _resolved(changed, seed, out)
        _prepare(run, prepared, out)
        built = PoolFile.read(out / "pool" / "pool.json").pool()
        for name, points in search.excess(built, run.config, run.family).items():
            trial.set_constraint(f"{name}/s{seed}", points)
        ready.append((run, out))
    return ready


def _trial(config: Config, study: Any, trial: Any, ready: Sequence[tuple[Resolved, Path]]) -> float:
    """The mean over the seeds of the last round's metric; the rounds of the first seed decide about pruning. Raises
    Diverged where a model does."""
    scores = []
    for i, (run, out) in enumerate(ready):
        reporter = search.Reporter(trial, config.tune.metric) if i == 0 else None
        scores.append(_rounds(run, out, _tags(study, trial=str(trial.number)), reporter))
        for folder in ("rounds", "states", "flights"):  # nobody needs a trial's models
            shutil.rmtree(out / folder, ignore_errors=True)
    return mean(scores)


def _resolved(config: Config, seed: int, out: Path | None = None) -> Resolved:
    """The run of a seed; if ledgers are in `run.remote`, its ledger is there in the folder `<study>/trials` or
    `<study>/held-out`, as `out` is in the study's."""
    own: dict[str, Any] = {"seed": seed}
    if out is not None and config.run.remote is not None:
        where = f"{config.run.remote.rstrip('/')}/{out.parent.parent.name}/{out.parent.name}"
        own["run"] = config.run.model_copy(update={"remote": where})
    return Resolved.of(config.model_copy(update=own))


def _prepare(resolved: Resolved, prepared: Path, out: Path) -> None:
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


def _rounds(resolved: Resolved, out: Path, tags: Mapping[str, str], observer: Any = None) -> float:
    """Runs the rounds that are not done; the observer gets the measurements of all rounds. Raises ConfigError if `out`
    holds a run of another setting, Diverged where the metric is no finite number in the end."""
    try:
        known = known_run(resolved.config, out, resume=True)
    except BadInput as error:
        raise type(error)(str(error).replace("--run-id", "--id")) from error
    if known is None or not (out / "history.json").exists():
        # Without its folder a study begins again: its runs get the numbers of earlier ones, whose ledgers are kept.
        name = out.name if resolved.config.run.remote is None else name_in(out, resolved)
        steps = out / "partition", out / "pool", out
        federate(resolved, *steps, run_id=name, resume=True, tags=dict(tags), observer=observer)
    last, metric = BareHistory.read(out / "history.json").rounds[-1]["metrics"], resolved.config.tune.metric
    if metric not in last:  # histories leave out what is not finite
        raise Diverged(f"the model has diverged: {metric} of the last round is no finite number. {SMALLER}")
    return float(last[metric])


# ------------------------------------------------------------------------------------------------------ outcome
def _conclude(config: Config, study: Any, folder: Path, prepared: Path) -> Tuned:
    """Runs the best setting and the default on the held-out seeds, and writes FILES into `folder`."""
    from optuna.trial import TrialState

    space, pool = _space(config, prepared)
    done = _done(study)
    complete = [t for t in done if t.state == TrialState.COMPLETE]
    counts = Counter(map(outcome_of, done))
    best = _best(config, done, complete, counts["diverged"] > 0)
    setting = search.applied(config, best.params)
    of_default = of_best = _held_out(config, config, study, folder, "default", "default")
    if not _same(setting, config):  # more trials may find a better one, so the runs' folders name the trial
        of_best = _held_out(config, setting, study, folder, "best", f"best-t{best.number}")
    held: dict[Literal["seeds", "default", "best"], list[float]] = {
        "seeds": [*config.tune.held_out], "default": of_default, "best": of_best,
    }  # fmt: skip
    default = search.unchanged(config, space, pool)
    tuned = Tuned(
        id=study.study_name,
        metric=config.tune.metric,
        measured=Resolved.of(config).data.task.metric.name,
        trials={name: counts[name] for name in get_args(Outcome)},
        space={path: range.model_dump(mode="json") for path, range in space.items()},
        importance=importance(study, complete, space),
        default={path: value for path, value in default.items() if isinstance(value, bool | int | float | str)},
        default_value=next((t.value for t in complete if t.params == default), None),
        best=dict(best.params),
        best_trial=best.number,
        best_value=best.value,
        held_out=held,
        gain=mean(b - d for b, d in zip(held["best"], held["default"], strict=True)) if config.tune.held_out else 0.0,
        tried=tuple(map(tried, sorted(done, key=lambda t: t.number))),
    )
    write_config(public(setting), folder / "params.yaml")
    FolderStore(folder).put("patch.yaml", write_yaml(_patch(setting, best.params), sort_keys=True).encode())
    trials = [(t.number, t.value, t.params) for t in sorted(complete, key=lambda t: t.number)]
    FolderStore(folder).put("study.html", page(tuned, trials).encode())
    tuned.write(folder / "tune.json")
    parent = _parent(config, study, {})
    if parent is not None and config.tracking.mlflow is not None:
        figures = {f"best/{tuned.metric}": tuned.best_value, "held_out/gain": tuned.gain}
        log_outcome(config.tracking.mlflow, parent.run_id, figures, {}, [str(folder / name) for name in FILES])
        parent.finish("FINISHED")
    return tuned


def _best(config: Config, done: Sequence[Any], complete: Sequence[Any], diverged: bool) -> Any:
    """The trial of the highest value among the `complete` ones whose pool devices can hold. Raises BadInput where none
    is; `diverged`: whether some trials that are `done` have no finite value."""
    feasible = [t for t in complete if all(v <= 0 for v in t.constraints.values())]
    if not feasible:
        why = next((f". Trial {t.number}: {why_none(t)}" for t in done if why_none(t)), "")
        finite = f" and a finite {config.tune.metric}" if diverged else ""
        raise BadInput(
            f"none of {len(done)} trials has a pool that its devices can hold{finite}: widen tune.space{why}"
        )
    return max(feasible, key=lambda t: t.value)


def _same(setting: Config, config: Config) -> bool:
    """Whether runs are the same: an option of the algorithm may be there with its default's value, or not."""
    whole = setting.model_copy(update={"algorithm": config.algorithm})
    return whole == config and algorithm(setting) == algorithm(config)


def _held_out(config: Config, setting: Config, study: Any, folder: Path, name: str, of: str) -> list[float]:
    """The metric of the `setting`, which is called `name`, for each held-out seed; the runs' folders begin with `of`.
    Raises Diverged."""
    values = []
    for seed in config.tune.held_out:
        out = folder / "held-out" / f"{of}-s{seed}"
        run = _resolved(setting, seed, out)
        try:
            if not (out / "history.json").exists():
                _prepare(run, folder, out)
            values.append(_rounds(run, out, _tags(study, held_out=name)))
        except Diverged as error:
            raise Diverged(
                f"the {name} setting has diverged with the held-out seed {seed}: name other seeds in "
                "tune.held_out, or none, [], and go on with --resume"
            ) from error
    return values


def _patch(setting: Config, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that were searched, lists whole, as `setting` has them."""
    changed: dict[str, Any] = {}
    whole = setting.model_dump(mode="json")
    for path in {p.rpartition(".")[0] if p.rpartition(".")[2].isdecimal() else p for p in params}:
        here: Any = whole
        for part in path.split("."):
            here = here[part]
        set_path(changed, path, here)
    return changed


# ------------------------------------------------------------------------------------------- as tasks of a graph
def prepare(config: Config, id: str, out: Path, job_id: str) -> list[dict[str, str]]:
    """Checks the search, and writes what all workers start from into `out`; begins the study if they share one. Gives a
    mapping for each worker. All values are texts, since a graph may turn numbers into floats."""
    many = config.tune.workers
    if many > 1 and search.address(config) is None:
        raise ConfigError(
            f"tune.workers is {many}, and pods share a study by a database alone: set tune.storage to its address, or "
            "put the address into the Secret flexfleet-tune (FLEXFLEET_TUNE_SECRET names another) as "
            "FLEXFLEET_TUNE_STORAGE; or set tune.workers to 1"
        )
    _examine(config)
    _reach(config, out, id)
    write_config(config, out / "config.yaml")
    for seed in config.tune.seeds:
        share(_resolved(config, seed), out / f"shared-s{seed}")
    _prepare_default(config, out)
    if search.address(config) is not None:
        _begin(config, out, id, out, of_job(config, job_id))
    return [{"study": id, "worker": str(i)} for i in range(many)]


def work_in_graph(prepared: Path, id: str, worker: int, out: Path, job_id: str) -> list[int]:
    """A worker as a task: gives the numbers of its trials, and writes them into `out`. Without a database the study
    belongs to this worker alone, and is written into `out` too."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    out.mkdir(parents=True, exist_ok=True)
    alone_with_it = search.address(config) is None
    with stopping_at_once(), search.answering(config):
        if alone_with_it:
            parent = _begin(config, folder, id, prepared, of_job(config, job_id))
        else:
            parent = _parent(config, search.open_study(config, folder, id, begun=True), {})
        with ending(parent):
            mine = work(config, folder, id, worker, prepared)
    (out / "trials.json").write_text(json.dumps(mine), encoding="utf-8")
    if alone_with_it:
        shutil.copyfile(folder / "study.log", out / "study.log")
    return mine


def report(prepared: Path, id: str, workers: Sequence[Path], out: Path, text: Path, html: Path) -> Tuned:
    """The last task: writes the outcome of the study into `out`, as Markdown into `text` and as HTML into `html`.
    `workers`: the folder that `work_in_graph` wrote for each worker."""
    config = load_config(prepared / "config.yaml")
    folder = Path(config.run.store) / id
    with alone(folder), search.answering(config):
        study = search.open_study(config, workers[0], id, begun=True)
        with ending(_parent(config, study, {})):
            tuned = _conclude(config, study, folder, prepared)
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(folder / name, out / name)
    text.write_text(markdown(tuned, (out / "patch.yaml").read_text("utf-8")), encoding="utf-8")
    shutil.copyfile(out / "study.html", html)
    return tuned


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="One worker of a study.")
    p.add_argument("--config", type=Path, required=True, metavar="FILE")
    p.add_argument("--study", type=Path, required=True, metavar="DIR")
    p.add_argument("--id", required=True)
    p.add_argument("--worker", type=int, required=True)
    args = p.parse_args(argv)
    config = load_config(args.config)
    with stopping_at_once(), search.answering(config):
        work(config, args.study, args.id, args.worker)
    return 0


if __name__ == "__main__":
    terminal.run_main(main)
