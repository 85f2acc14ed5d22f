"""The end of a study: the best setting against the default on seeds that no trial has used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

from fl_engine.core.errors import BadInput, Diverged
from fl_engine.core.plain import write_yaml
from fl_engine.data import partition_files
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, algorithm, public, set_path
from flexfleet.config.overrides import write_config
from flexfleet.steps.prepare import Resolved
from flexfleet.studies import runs, tracked
from flexfleet.studies.outcome import Outcome, Tuned, importance, outcome_of, page, tried, why_none
from flexfleet.studies.space import applied, unchanged
from flexfleet.studies.trials import done
from flexfleet.tracking.trackers import log_outcome

FILES = ("tune.json", "params.yaml", "patch.yaml", "study.html")
"""What a study leaves."""


def conclude(config: Config, study: Any, folder: Path, prepared: Path) -> Tuned:
    """Runs the best setting and the default on the held-out seeds, and writes FILES into `folder`."""
    from optuna.trial import TrialState

    space, pool = runs.searched(config, prepared)
    if config.tune.held_out:  # raises where they are other data than the trials had
        partition_files.load(prepared / "default" / "partition", runs.resolved(config, config.tune.seeds[0]).data)
    ended = done(study)
    complete = [t for t in ended if t.state == TrialState.COMPLETE]
    counts = Counter(map(outcome_of, ended))
    best = _best(config, ended, complete, counts["diverged"] > 0)
    setting = applied(config, best.params)
    of_default = of_best = _held_out(config, config, study, folder, "default", "default")
    if not _same(setting, config):  # more trials may find a better one, so the runs' folders name the trial
        of_best = _held_out(config, setting, study, folder, "best", f"best-t{best.number}")
    held: dict[Literal["seeds", "default", "best"], list[float]] = {
        "seeds": [*config.tune.held_out], "default": of_default, "best": of_best,
    }  # fmt: skip
    default = unchanged(config, space, pool)
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
        tried=tuple(map(tried, sorted(ended, key=lambda t: t.number))),
    )
    write_config(public(setting), folder / "params.yaml")
    FolderStore(folder).put("patch.yaml", write_yaml(_patch(setting, best.params), sort_keys=True).encode())
    trials = [(t.number, t.value, t.params) for t in sorted(complete, key=lambda t: t.number)]
    FolderStore(folder).put("study.html", page(tuned, trials).encode())
    tuned.write(folder / "tune.json")
    parent = tracked.parent(config, study, {})
    if parent is not None and config.tracking.mlflow is not None:
        tracked.end_left(parent, study)
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
        run = runs.resolved(setting, seed, out)
        try:
            if not (out / "history.json").exists():
                runs.prepare(run, folder, out)
            values.append(runs.rounds(run, out, tracked.tags(study, held_out=name)))
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
