"""Searching an algorithm's hyper-parameters: trials, pruned by round; then the best against the default on seeds that
no trial has seen.

A study is a folder `<run.store>/<id>/`: the trials' runs, `study.log` (unless `tune.storage` names a data base), and in
the end `tune.json`, `params.yaml` (the configuration with the best values), `patch.yaml` (the values alone) and
`study.svg`. The same command with --resume goes on after a kill.
"""

from __future__ import annotations

import argparse
import html
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

import yaml

from components import common, plots
from components.artifacts import Artifact, History, PoolFile
from components.check import check
from components.compare import RunsFailed
from components.federate import alone, federate
from components.model_pool import model_pool
from components.names import plain
from components.overrides import hand_over, write_config
from components.run import need_packages
from components.share import adopt, fits, share
from components.side_by_side import Job, side_by_side
from components.track import of_job, tracker
from fl_engine import tune as search
from fl_engine.config import Config, load_config, public, set_path, shown
from fl_engine.errors import BadInput, ConfigError, Stopped
from fl_engine.tracking import MLflow, log_outcome

log = logging.getLogger("flexfleet")


class Tuned(Artifact):
    """tune.json."""

    id: str
    metric: Literal["avg", "full"]
    trials: dict[str, int]
    """How many by outcome: complete, pruned, infeasible."""
    space: dict[str, dict[str, Any]]
    default: dict[str, Any]
    """Of the first trial."""
    default_value: float | None
    best: dict[str, Any]
    best_trial: int
    best_value: float
    held_out: dict[Literal["seeds", "default", "best"], list[float]]
    """Figures of the unchanged configuration and of the best one, seed by seed."""
    gain: float
    """Mean of best - default over the held-out seeds."""


def tune(
    config: Config, id: str, *, resume: bool = False, at_once: int = 1, tags: Mapping[str, str] | None = None
) -> Tuned:
    """Runs what is left of a study's trials and the comparison on held-out seeds. `tags`: of the study's MLflow run.

    Raises ConfigError for an impossible search, Stopped after SIGTERM or where a worker was stopped.
    """
    folder = Path(config.run.store) / plain(id, "a study's id")
    if folder.exists() and not resume:
        raise ConfigError(f"{folder} exists already: go on with --resume, or choose another --id")
    clash = {"seed", *(p for p in config.tune.space if p.startswith(("tune.", "run.", "tracking.", "kubernetes.")))}
    if clash & config.tune.space.keys():
        raise ConfigError(f"tune.space: {', '.join(sorted(clash & config.tune.space.keys()))} cannot be searched")
    if set(config.tune.seeds) & set(config.tune.held_out):
        raise ConfigError("tune.held_out: these seeds are to be new, but trials run on some of them (tune.seeds)")
    check(config)
    need_packages(config)
    with alone(folder):
        space, first = _space(config, folder)
        _begin(config, folder, id, first)
        parent = _parent(config, folder, id, tags or {})
        _work_all(config, folder, id, at_once)
        found = _conclude(config, folder, id, space, first)
        if parent is not None and config.tracking.mlflow is not None:
            figures = {f"best/{found.metric}": found.best_value, "held_out/gain": found.gain}
            files = [str(folder / name) for name in ("tune.json", "params.yaml", "patch.yaml", "study.svg")]
            log_outcome(config.tracking.mlflow, parent.run_id, figures, {}, files)
            parent.finish("FINISHED")
        return found


def _space(config: Config, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is searched, and what the configuration has there: of the pool that the first seed's run would have."""
    prepared = _with_seed(config, config.tune.seeds[0])
    pool = PoolFile.read(_prepare(prepared, folder, folder / "default") / "pool" / "pool.json").pool()
    space = search.space_of(config, pool)
    return space, search.defaults(config, space, pool)


def _begin(config: Config, folder: Path, id: str, first: Mapping[str, Any]) -> None:
    study = search.open_study(config, folder, id)
    gone = search.clear_stale(study)
    if gone:
        log.info("trials whose worker is gone are tried again: %s", ", ".join(map(str, gone)))
    if not study.get_trials(deepcopy=False):
        study.enqueue_trial(dict(first))


PARENT = "mlflow-run"
"""File of the study: the MLflow run that those of the trials belong to."""


def _parent(config: Config, folder: Path, id: str, given: Mapping[str, str]) -> MLflow | None:
    path = folder / PARENT
    known = path.read_text() if path.exists() else None
    tags = {"flexfleet.study": id, "algorithm": str(config.algorithm["name"]), **given}
    run = tracker(config, f"study {id}", tags, known)
    if run is None:
        return None
    path.write_text(run.run_id)
    run.params(shown(config))
    return run


def _tags(folder: Path, **more: str) -> dict[str, str]:
    parent = folder / PARENT
    of = {"mlflow.parentRunId": parent.read_text()} if parent.exists() else {}
    return {**of, "flexfleet.study": folder.name, **{f"flexfleet.{key}": value for key, value in more.items()}}


def _work_all(config: Config, folder: Path, id: str, at_once: int) -> None:
    given, stdin = hand_over(config, folder / "config.yaml")
    if at_once == 1:
        work(config, folder, id)
        return
    asked = ("--config", given, "--study", str(folder), "--id", id, "--worker")
    names = [f"worker{i}" for i in range(at_once)]
    workers = [
        Job(name, "components.tune", (*asked, str(i)), folder / f"{name}.log", stdin) for i, name in enumerate(names)
    ]
    failed = [f"{name} ({folder / name}.log)" for name, code in side_by_side(workers, at_once).items() if code]
    if failed:
        raise RunsFailed(f"workers ended before the study was done: {', '.join(failed)}; go on with --resume", 1)


# ------------------------------------------------------------------------------------------------------- trials
def work(config: Config, folder: Path, id: str, worker: int = 0) -> None:
    """One worker: trial after trial, until the study has as many as are wanted."""
    import optuna

    study = search.open_study(config.model_copy(update={"seed": config.seed + worker}), folder, id)
    pool = PoolFile.read(folder / "default" / "pool" / "pool.json").pool()
    space = search.space_of(config, pool)

    def left() -> int:
        return config.tune.trials - len(_done(study))

    def objective(trial: Any) -> float:
        trial.set_user_attr(search.WORKER, search.me())
        values = search.suggest(trial, space)
        try:
            value = _trial(config, folder, trial, values)
        except search.Pruned:
            raise optuna.TrialPruned from None
        except BadInput as error:  # no such pool: sizes that cross, an adaptive model above the next level
            log.info("trial %d cannot be: %s", trial.number, error)
            trial.set_user_attr("infeasible", str(error))
            trial.set_constraint("possible", 1.0)
            raise optuna.TrialPruned from None
        except (Stopped, KeyboardInterrupt):
            study.enqueue_trial(dict(trial.params))
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            raise
        log.info("trial %d: %s %.4f with %s", trial.number, config.tune.metric, value, _said(values))
        return value

    while left() > 0:
        study.optimize(objective, n_trials=1)


def _done(study: Any) -> list[Any]:
    from optuna.trial import TrialState

    return [*study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))]


def _trial(config: Config, folder: Path, trial: Any, values: Mapping[str, Any]) -> float:
    """The metric of the last round, over the seeds; the first seed's rounds are what a trial is pruned by."""
    changed, found = search.applied(config, values), []
    for i, seed in enumerate(config.tune.seeds):
        out = folder / "trials" / f"{trial.number}-s{seed}"
        reporter = search.Reporter(trial, config.tune.metric) if i == 0 else None
        pool = PoolFile.read(_prepare(_with_seed(changed, seed), folder, out) / "pool" / "pool.json").pool()
        for name, points in search.excess(pool, changed).items():
            trial.set_constraint(f"{name}/s{seed}", points)
        found.append(_rounds(_with_seed(changed, seed), out, _tags(folder, trial=str(trial.number)), reporter))
        shutil.rmtree(out / "rounds", ignore_errors=True)  # a trial's models are of no use to anybody
    return mean(found)


def _with_seed(config: Config, seed: int) -> Config:
    return config.model_copy(update={"seed": seed})


def _prepare(config: Config, folder: Path, out: Path) -> Path:
    """Partition, pre-training and pool of a run, in `out`; what runs of a seed have in common is computed once, where
    the search does not touch it."""
    shared = folder / f"shared-s{config.seed}"
    if not (shared / "shared.json").exists():
        share(config, shared)
    if fits(config, shared):
        adopt(config, shared, out)
    else:
        share(config, out)
    model_pool(config, out / "pretrain", out / "pool")
    return out


def _rounds(config: Config, out: Path, tags: Mapping[str, str], observer: Any = None) -> float:
    """Runs the rounds that are not done; the observer is told of all."""
    if config.run.remote is not None:
        where = f"{config.run.remote.rstrip('/')}/{out.parent.parent.name}/{out.parent.name}"
        config = config.model_copy(update={"run": config.run.model_copy(update={"remote": where})})
    if not (out / "history.json").exists():
        federate(config, out / "partition", out / "pool", out, resume=True, tags=dict(tags), observer=observer)
    last = History.read(out / "history.json").rounds[-1]["metrics"]
    return float(last[config.tune.metric])


def _said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{k.rpartition('algorithm.')[2]} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
                     for k, v in values.items())  # fmt: skip


# ------------------------------------------------------------------------------------------------------ outcome
def _conclude(config: Config, folder: Path, id: str, space: Mapping[str, Any], first: Mapping[str, Any]) -> Tuned:
    from optuna.trial import TrialState

    study = search.open_study(config, folder, id)
    done = _done(study)
    complete = [t for t in done if t.state == TrialState.COMPLETE]
    feasible = [t for t in complete if all(v <= 0 for v in t.constraints.values())]
    if not feasible:
        raise BadInput(f"none of {len(done)} trials has a pool that its devices can hold: widen tune.space")
    best = max(feasible, key=lambda t: t.value)
    held: dict[Literal["seeds", "default", "best"], list[float]] = {"seeds": [*config.tune.held_out]}
    settings: dict[Literal["default", "best"], Config] = {
        "default": config, "best": search.applied(config, best.params)
    }  # fmt: skip
    for name, setting in settings.items():
        held[name] = []
        for seed in config.tune.held_out:
            out = folder / "held-out" / f"{name}-s{seed}"
            if not (out / "history.json").exists():
                _prepare(_with_seed(setting, seed), folder, out)
            held[name].append(_rounds(_with_seed(setting, seed), out, _tags(folder, held_out=name)))
    started = next((t.value for t in complete if first.items() <= t.params.items()), None)
    found = Tuned(
        id=id,
        metric=config.tune.metric,
        trials={
            "complete": len(complete),
            "pruned": sum(t.state == TrialState.PRUNED and "infeasible" not in t.user_attrs for t in done),
            "infeasible": sum("infeasible" in t.user_attrs for t in done),
        },
        space={path: range.model_dump(mode="json") for path, range in space.items()},
        default=dict(first),
        default_value=started,
        best=dict(best.params),
        best_trial=best.number,
        best_value=best.value,
        held_out=held,
        gain=mean(b - d for b, d in zip(held["best"], held["default"], strict=True)) if config.tune.held_out else 0.0,
    )
    write_config(public(settings["best"]), folder / "params.yaml")
    changed: dict[str, Any] = {}
    whole = settings["best"].model_dump(mode="json")
    for path in {p.rpartition(".")[0] if p.rpartition(".")[2].isdecimal() else p for p in best.params}:
        here: Any = whole
        for part in path.split("."):
            here = here[part]
        set_path(changed, path, here)
    (folder / "patch.yaml").write_text(yaml.safe_dump(changed))
    (folder / "study.svg").write_text(_drawn(study, complete, space))
    found.write(folder / "tune.json")
    return found


def _drawn(study: Any, complete: Sequence[Any], space: Mapping[str, Any]) -> str:
    import optuna

    varied = {p for p in space if len({repr(t.params.get(p)) for t in complete}) > 1}
    shares = dict.fromkeys(space, 0.0)
    if len(complete) > 3 and varied and len({t.value for t in complete}) > 1:
        shares |= optuna.importance.get_param_importances(study, params=sorted(varied))
    trials = [(t.number, t.value, t.params) for t in sorted(complete, key=lambda t: t.number)]
    wide = [path for path, range in space.items() if range.log and range.high >= 10 * range.low]
    return plots.study(trials, shares, wide)


def in_graph(config: Config, id: str, out: Path, text: Path, page: Path, job_id: str) -> Tuned:
    """A study as a task: what it has come to into `out`, as Markdown into `text` and as HTML into `page`."""
    found = tune(config, id, resume=True, tags=of_job(config, job_id))
    folder = Path(config.run.store) / id
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tune.json", "params.yaml", "patch.yaml", "study.svg"):
        shutil.copyfile(folder / name, out / name)
    patch = f"```yaml\n{(out / 'patch.yaml').read_text()}```\n"
    text.write_text("\n\n".join([*told(found, folder).splitlines(), patch]))
    page.write_text(f"<!doctype html><title>{html.escape(id)}</title>{(out / 'study.svg').read_text()}")
    return found


def told(found: Tuned, folder: Path) -> str:
    """What a person wants to know of it."""
    t = found.trials
    lines = [
        f"{t['complete']} trials complete, {t['pruned']} pruned, {t['infeasible']} impossible",
        f"best, trial {found.best_trial}: {found.metric} {100 * found.best_value:.2f} % with {_said(found.best)}",
    ]
    if found.default_value is not None:
        lines.append(f"default: {100 * found.default_value:.2f} % with {_said(found.default)}")
    if found.held_out["seeds"]:
        b, d = found.held_out["best"], found.held_out["default"]
        spread = stdev(x - y for x, y in zip(b, d, strict=True)) if len(b) > 1 else 0.0
        seeds = ", ".join(str(int(s)) for s in found.held_out["seeds"])
        against = f"{100 * mean(b):.2f} % against {100 * mean(d):.2f} %"
        lines.append(f"held-out seeds {seeds}: {against}, {100 * found.gain:+.2f} points (+- {100 * spread:.2f})")
    return "\n".join([*lines, f"settings: {folder / 'params.yaml'}"])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="One worker of a study.")
    p.add_argument("--config", type=Path, required=True, metavar="FILE")
    p.add_argument("--study", type=Path, required=True, metavar="DIR")
    p.add_argument("--id", required=True)
    p.add_argument("--worker", type=int, required=True)
    args = p.parse_args(argv)
    work(load_config(args.config), args.study, args.id, args.worker)
    return 0


if __name__ == "__main__":
    common.run_main(main)
