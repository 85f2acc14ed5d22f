"""The end of a study: the best setting against the default on seeds that no trial has used.

The best setting becomes the study's configuration only if it is better by a paired t test over these seeds: a gain
within the noise is not a gain. A setting that diverges on one of them loses.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

from fl_engine.core.errors import BadInput, Diverged
from fl_engine.core.text import write_yaml
from fl_engine.data import partition_files
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, algorithm, public, set_path
from flexfleet.config.form import write_config
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.experiments.ranking import LEVEL, tested
from flexfleet.experiments.tune_report import (
    Figures,
    Outcome,
    Tuned,
    finite,
    importance,
    outcome_of,
    page,
    tried,
    why_none,
)
from flexfleet.experiments.tune_space import applied, symbols, unchanged
from flexfleet.experiments.tune_trials import done, is_default
from flexfleet.pipeline.prepare import Resolved
from flexfleet.tracking.trackers import log_outcome

log = logging.getLogger("flexfleet")

FILES = ("tune.json", "params.yaml", "patch.yaml", "study.html")
"""What a study leaves."""


def conclude(config: Config, study: Any, folder: Path, prepared: Path) -> Tuned:
    """Runs the best setting and the default on the held-out seeds, and writes FILES into `folder`."""
    from optuna.trial import TrialState

    space, pool = tune_worker.searched(config, prepared)
    if config.tune.held_out:  # raises where they are other data than the trials had
        partition_files.load(
            prepared / "default" / "partition", tune_worker.resolved(config, config.tune.seeds[0]).data
        )
    ended = done(study)
    complete = [t for t in ended if t.state == TrialState.COMPLETE]
    counts = Counter(map(outcome_of, ended))
    best = _best(config, ended, complete, counts)
    setting = config if is_default(best) else applied(config, best.params)
    same = _same(setting, config)
    of_default = of_best = _held_out(config, config, study, folder, "default", "default")
    if not same:  # more trials may find a better one, so the runs' folders name the trial
        of_best = _held_out(config, setting, study, folder, "best", f"best-t{best.number}")
    held: dict[Literal["seeds", "default", "best"], Figures] = {
        "seeds": [*config.tune.held_out], "default": of_default, "best": of_best,
    }  # fmt: skip
    default = {
        path: value
        for path, value in unchanged(config, space, pool).items()
        if isinstance(value, bool | int | float | str)
    }
    default_value = next((t.value for t in complete if is_default(t)), None)
    if config.tune.held_out:
        better = not same and beats(of_best, of_default)
    else:
        better = not same and (default_value is None or best.value > default_value)
    params = best.params if better else {}
    tuned = Tuned(
        id=study.study_name,
        metric=config.tune.metric,
        measured=Resolved.of(config).data.task.metric.name,
        trials={name: counts[name] for name in get_args(Outcome)},
        space={path: range.model_dump(mode="json") for path, range in space.items()},
        symbols=symbols(config, space),
        importance=importance(study, complete, space),
        default=default,
        default_value=default_value,
        best=default if is_default(best) else dict(best.params),
        best_trial=best.number,
        best_value=best.value,
        held_out=held,
        gain=_gain(of_best, of_default),
        better=better,
        tried=tuple(map(tried, sorted(ended, key=lambda t: t.number))),
    )
    write_config(public(setting if better else config), folder / "params.yaml")
    FolderStore(folder).put("patch.yaml", write_yaml(_patch(setting, params), sort_keys=True).encode())
    trials = [(t.number, t.value, t.params) for t in sorted(complete, key=lambda t: t.number)]
    FolderStore(folder).put("study.html", page(tuned, trials).encode())
    tuned.write(folder / "tune.json")
    parent = tune_storage.parent(config, study, {})
    if parent is not None:
        tune_storage.end_left(parent, study)
        figures = {f"best/{tuned.metric}": tuned.best_value}
        figures |= {} if tuned.gain is None else {"held_out/gain": tuned.gain}
        log_outcome(parent.client, parent.run_id, figures, {}, [str(folder / name) for name in FILES])
        parent.finish("FINISHED")
    return tuned


def _best(config: Config, done: Sequence[Any], complete: Sequence[Any], counts: Mapping[Outcome, int]) -> Any:
    """The trial of the highest value among the `complete` ones whose pool devices can hold. Raises Diverged if all
    trials that are `done` have diverged, else BadInput, if there is no such trial; `counts`: trials by outcome."""
    feasible = [t for t in complete if all(v <= 0 for v in t.constraints.values())]
    if not feasible:
        why = next((f". Trial {t.number}: {why_none(t)}" for t in done if why_none(t)), "")
        if done and counts["diverged"] == len(done):
            raise Diverged(f"all {len(done)} trials have diverged: widen tune.space, or change the configuration{why}")
        finite = f" and a finite {config.tune.metric}" if counts["diverged"] else ""
        raise BadInput(
            f"none of {len(done)} trials has a pool that its devices can hold{finite}: widen tune.space{why}"
        )
    return max(feasible, key=lambda t: t.value)


def beats(best: Figures, default: Figures) -> bool:
    """Whether the best setting is better than the default on the held-out seeds, by Student's paired t test at 5 %,
    two-sided. None: a run that diverged, with which its setting loses."""
    b, d = finite(best), finite(default)
    if b is None or d is None:
        return b is not None
    test = tested(b, d)
    return test is not None and test.mean > 0 and test.p < LEVEL


def _gain(best: Figures, default: Figures) -> float | None:
    b, d = finite(best), finite(default)
    return mean(x - y for x, y in zip(b, d, strict=True)) if b and d else None


def _same(setting: Config, config: Config) -> bool:
    """Whether runs are the same: an option of the algorithm may be there with its default's value, or not."""
    whole = setting.model_copy(update={"algorithm": config.algorithm})
    return whole == config and algorithm(setting) == algorithm(config)


def _held_out(config: Config, setting: Config, study: Any, folder: Path, name: str, of: str) -> Figures:
    """The metric of the `setting`, which is called `name`, for each held-out seed, or None if it diverges. The names of
    the runs' folders begin with `of`."""
    values: Figures = []
    for seed in config.tune.held_out:
        out = folder / "held-out" / f"{of}-s{seed}"
        run = tune_worker.resolved(setting, seed, out)
        try:
            if not (out / "history.json").exists():
                tune_worker.prepare(run, folder, out)
            values.append(tune_worker.rounds(run, out, tune_storage.tags(study, held_out=name)))
        except Diverged as error:
            log.warning("the %s setting diverged on the held-out seed %d: %s", name, seed, error)
            values.append(None)
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
