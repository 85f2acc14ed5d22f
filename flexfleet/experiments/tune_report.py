"""Compare the best setting of a study with the default on held-out seeds, and write the results.

The held-out seeds are not used in trials. params.yaml contains the best setting if a paired t test over these seeds
shows that it is significantly better. Otherwise, params.yaml contains the default. A setting that diverges on a
held-out seed is never considered better.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

from pydantic import Field

from fl_engine.core.errors import BadInput, Diverged, NothingMerged
from fl_engine.core.records import Strict
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, public
from flexfleet.config.form import write_config
from flexfleet.experiments import tune_storage, tune_worker
from flexfleet.experiments.ranking import LEVEL, tested
from flexfleet.experiments.tune_space import applied, importance, listed, named, same, shown, symbols, unchanged
from flexfleet.experiments.tune_worker import DIVERGED, DONE, INFEASIBLE, is_default, trials_in
from flexfleet.files.artifacts import Artifact
from flexfleet.files.measure import Measure
from flexfleet.pipeline.prepare import Resolved
from flexfleet.reports import plots
from flexfleet.reports.answer import Answer, Metric, Tile, count, p_value
from flexfleet.reports.page import NONE, PageSection, Table, escaped
from flexfleet.reports.page import page as html_page
from flexfleet.tracking.trackers import log_outcome

log = logging.getLogger("flexfleet")

FILES = ("tune.json", "params.yaml", "study.html")
"""Files of a finished study."""
Figures = list[int | float | None]
"""Values of the metric, one for each held-out seed. A value is None if the run diverged."""
TrialOutcome = Literal["complete", "pruned", "infeasible", "diverged"]


class EndedTrial(Strict):
    """Result of a trial that has ended."""

    number: int
    outcome: TrialOutcome
    value: float | None
    """Metric of the trial if the trial is complete, otherwise null."""
    params: dict[str, Any]
    why: str | None = None
    """Reason why the trial is infeasible or diverged, or why its pool does not fit into the devices; otherwise null."""


class Tuned(Artifact):
    """Contents of tune.json."""

    id: str
    metric: Literal["avg", "full"]
    measured: str = "accuracy"
    """Main metric of the task. The value of a trial is avg or full, computed from this metric."""
    trials: dict[str, int]
    """Map each outcome to the number of trials with this outcome."""
    space: dict[str, dict[str, Any]]
    symbols: dict[str, str] = Field(default={})
    """Map dotted names of parameters to symbols in the algorithm's paper."""
    importance: dict[str, float]
    """Map each parameter to its importance. The values sum to 1, or are all 0 if there are too few trials."""
    default: dict[str, Any]
    """Configured values of the searched parameters. Only numbers, strings and booleans are included."""
    default_value: float | None
    """Value of the trial that runs the unchanged configuration; null if this trial is not complete."""
    best: dict[str, Any]
    best_trial: int
    best_value: float
    held_out: dict[Literal["seeds", "default", "best"], Figures]
    """Metrics of the unchanged configuration and of the best setting for each held-out seed. A metric is null if the
    run diverged."""
    gain: float | None
    """Mean difference best - default over the held-out seeds. Null without held-out seeds or if a run diverged."""
    better: bool
    """True if the best setting is significantly better than the default on the held-out seeds, as tested by `beats`.
    Without held-out seeds, the values of the trials are compared."""
    tried: tuple[EndedTrial, ...]
    """All trials that have ended."""

    @property
    def measure(self) -> Measure:
        return Measure(self.measured)


def finite(figures: Figures) -> list[float] | None:
    """Return the metrics of all runs. Return None if a run diverged."""
    return None if None in figures else [each for each in figures if each is not None]


# ------------------------------------------------------------------------------------------------- sentences
def headline(tuned: Tuned) -> str:
    """Return a sentence that compares the best setting with the default, and lists the values of a better setting."""
    metric, seeds = Metric(tuned.measure), len(tuned.held_out["seeds"])
    best, default = finite(tuned.held_out["best"]), finite(tuned.held_out["default"])
    test = tested(best, default) if best and default else None
    how = f"{p_value(test.p) if test else 'not tested'}, {count(seeds, 'held-out seed')}"
    trials, gain = count(tuned.trials["complete"], "complete trial"), tuned.gain
    if tuned.better:
        value = mean(best) if best else tuned.best_value
        reached = f"The best of {trials} reaches {tuned.metric} {metric.score(value)}"
        if gain is not None:
            reached += f", {metric.gap(gain)} the default ({how})"
        else:
            reached += ", and the default diverges" if seeds else "; not compared on held-out seeds"
        return f"{reached}: {listed(tuned.best, tuned.symbols)}"
    found = "Nothing better than the default was found"
    if not gain:
        return found + (": the best setting diverges on a held-out seed" if best is None else f" in {trials}")
    if gain < 0:
        return f"{found}: the best of {trials} is {metric.gap(gain)} it ({how})"
    return f"{found}: {tuned.measure.points(gain)} may be noise ({how}); add seeds to tune.held_out"


def answer(tuned: Tuned) -> Answer:
    """Return the sentence and the tiles with which the page begins. A study does not count bytes or clients."""
    counts, shown = tuned.trials, tuned.measure.with_unit
    default = "" if tuned.default_value is None else f"default {shown(tuned.default_value)}"
    seeds, failed = ", ".join(map(str, tuned.held_out["seeds"])), counts["infeasible"] + counts["diverged"]
    gain = NONE if tuned.gain is None else tuned.measure.points(tuned.gain)
    return Answer(
        tuned.id,
        headline(tuned),
        [
            Tile(f"{tuned.metric} {tuned.measured}, best trial", shown(tuned.best_value), default),
            Tile("gain over the default", gain, f"held-out seeds {seeds}" if seeds else "no held-out seeds"),
            Tile("complete trials", str(counts["complete"]), f"{counts['pruned']} pruned"),
            Tile("failed trials", str(failed), f"{counts['infeasible']} infeasible, {counts['diverged']} diverged"),
        ],
    )


def _lines(tuned: Tuned) -> list[str]:
    """Return lines that describe the trials, the best setting, the default, and the gain on the held-out seeds."""
    counts, measure = tuned.trials, tuned.measure
    lines = [
        f"{counts['complete']} trials complete, {counts['pruned']} pruned, {counts['infeasible']} infeasible, "
        f"{counts['diverged']} diverged",
        f"best, trial {tuned.best_trial}: {tuned.metric} {measure.with_unit(tuned.best_value)} with "
        f"{listed(tuned.best, tuned.symbols)}",
    ]
    if tuned.default_value is not None:
        value = measure.with_unit(tuned.default_value)
        lines.append(f"default: {value} with {listed(tuned.default, tuned.symbols)}")
    best, default = finite(tuned.held_out["best"]), finite(tuned.held_out["default"])
    if seeds := ", ".join(map(str, tuned.held_out["seeds"])):
        compared = "a run diverged"
        if best and default and tuned.gain is not None:
            means = measure.with_unit(mean(best)), measure.with_unit(mean(default))
            compared = f"{means[0]} against {means[1]}, {measure.points(tuned.gain)}"
            if test := tested(best, default):
                low, high = (measure.number(test.mean + side * test.half, "+") for side in (-1, 1))
                compared += f" (95 % interval {low} to {high})"
        lines.append(f"held-out seeds {seeds}: {compared}")
    return lines


# ------------------------------------------------------------------------------------------------- tables
def parameters(tuned: Tuned) -> Table:
    """Return a table with one row for each parameter. The most important parameter is in the first row."""
    rows: list[tuple[str, ...]] = []
    for path in sorted(tuned.space, key=lambda path: -tuned.importance[path]):
        default, best = (shown(values[path]) if path in values else NONE for values in (tuned.default, tuned.best))
        searched, importance = _searched(tuned.space[path]), f"{tuned.importance[path]:.0%}"
        rows.append((named(path, tuned.symbols), default, best, searched, importance))
    return Table("Parameters", ("parameter", "default", "best", "searched", "importance"), rows).varying()


def _searched(range: Mapping[str, Any]) -> str:
    if range["choices"]:
        return ", ".join(map(shown, range["choices"]))
    kinds = [kind for kind in ("log", "whole") if range[kind]]
    return ", ".join([f"{shown(range['low'])} to {shown(range['high'])}", *kinds])


def held_out(tuned: Tuned) -> Table:
    """Return a table with a row for each held-out seed. If there are several seeds, the last row contains the means."""
    figures, measure = tuned.held_out, tuned.measure
    pairs = zip(figures["seeds"], figures["default"], figures["best"], strict=True)
    rows: list[tuple[str, float | None, float | None]] = [(str(seed), d, b) for seed, d, b in pairs]
    default, best = finite(figures["default"]), finite(figures["best"])
    if len(rows) > 1 and default and best:
        rows.append(("mean", mean(default), mean(best)))

    def cells(d: float | None, b: float | None) -> tuple[str, ...]:
        gain = NONE if d is None or b is None else measure.number(b - d, "+")
        return (*("diverged" if each is None else measure.number(each) for each in (d, b)), gain)

    title = f"On seeds that no trial has used: {tuned.metric}, {measure.unit}".removesuffix(", ")
    return Table(title, ("seed", "default", "best", "gain"), [(name, *cells(d, b)) for name, d, b in rows])


def text(tuned: Tuned, folder: Path) -> str:
    """Format a summary for the terminal."""
    default = "" if tuned.better else " (the default)"
    return "\n".join([f"{headline(tuned)}.", *_lines(tuned), f"settings: {folder / 'params.yaml'}{default}"])


def markdown(tuned: Tuned) -> str:
    """Format a summary as Markdown for the run's page in Kubeflow."""
    lines = [escaped(line) for line in _lines(tuned)]
    return "\n\n".join([f"## {escaped(headline(tuned))}", parameters(tuned).markdown(), *lines])


def page(tuned: Tuned) -> str:
    """Return the HTML page of the study."""
    complete = [(each.number, each.value, each.params) for each in tuned.tried if each.value is not None]
    logarithmic = [path for path, r in tuned.space.items() if r["log"] and r["high"] >= 10 * r["low"]]
    labels = {path: named(path, tuned.symbols) for path in tuned.space}
    drawings = plots.study(complete, tuned.importance, logarithmic, labels, measure=tuned.measure)
    sections = [PageSection(parameters(tuned).title, parameters(tuned), lines=_lines(tuned))]
    if tuned.held_out["seeds"]:
        sections.append(PageSection(held_out(tuned).title, held_out(tuned), folded=True))
    sections.append(PageSection("Trials", drawings=drawings))
    return html_page("study", answer(tuned), sections)


def conclude(config: Config, study: Any, folder: Path, prepared: Path) -> Tuned:
    """Run the best setting and the default on the held-out seeds, and write FILES into `folder`."""
    space, pool = tune_worker.searched(config, prepared)
    trials = sorted(trials_in(study, *DONE), key=lambda trial: trial.number)
    ended = tuple(map(outcome_of, trials))
    complete = [trial for trial, each in zip(trials, ended, strict=True) if each.outcome == "complete"]
    best = _best(config, complete, ended)
    setting = config if is_default(best) else applied(config, best.params)
    equal = same(setting, config)
    of_default = of_best = _held_out(config, config, study, folder, "default", "default")
    if not equal:  # the name contains the trial's number, because a later trial may become the best
        of_best = _held_out(config, setting, study, folder, "best", f"best-t{best.number}")
    held: dict[Literal["seeds", "default", "best"], Figures] = {
        "seeds": [*config.tune.held_out], "default": of_default, "best": of_best,
    }  # fmt: skip
    values = unchanged(config, space, pool)
    default = {path: value for path, value in values.items() if isinstance(value, bool | int | float | str)}
    default_value = next((t.value for t in complete if is_default(t)), None)
    wins = default_value is None or best.value > default_value
    better = not equal and (beats(of_best, of_default) if config.tune.held_out else wins)
    counts, b, d = Counter(each.outcome for each in ended), finite(of_best), finite(of_default)
    tuned = Tuned(
        id=study.study_name,
        metric=config.tune.metric,
        measured=Resolved.of(config).data.task.metric.name,
        trials={name: counts[name] for name in get_args(TrialOutcome)},
        space={path: range.model_dump(mode="json") for path, range in space.items()},
        symbols=symbols(config, space),
        importance=importance(study, complete, space),
        default=default,
        default_value=default_value,
        best=default if is_default(best) else dict(best.params),
        best_trial=best.number,
        best_value=best.value,
        held_out=held,
        gain=mean(x - y for x, y in zip(b, d, strict=True)) if b and d else None,
        better=better,
        tried=ended,
    )
    write_config(public(setting if better else config), folder / "params.yaml")
    FolderStore(folder).put("study.html", page(tuned).encode())
    tuned.write(folder / "tune.json")
    parent = tune_storage.parent(config, study, {})
    if parent is not None:
        metrics = {f"best/{tuned.metric}": tuned.best_value}
        metrics |= {} if tuned.gain is None else {"held_out/gain": tuned.gain}
        log_outcome(parent.client, parent.run_id, metrics, {}, [str(folder / name) for name in FILES])
        scores = {each.number: each.value for each in ended if each.value is not None}
        parent.chart(f"trials/{tuned.metric}", scores)  # the step is the number of the trial
        parent.finish("FINISHED")
    return tuned


def outcome_of(trial: Any) -> EndedTrial:
    """Return the outcome of an Optuna trial."""
    outcome: TrialOutcome = "complete" if trial.state.name == "COMPLETE" else "pruned"
    why: str | None = None
    if INFEASIBLE in trial.user_attrs or DIVERGED in trial.user_attrs:
        outcome = "infeasible" if INFEASIBLE in trial.user_attrs else "diverged"
        why = trial.user_attrs.get(INFEASIBLE) or trial.user_attrs.get(DIVERGED)
    elif over := [name for name, points in trial.constraints.items() if points > 0]:
        why = f"does not fit into the memory of its devices: {', '.join(over)}"
    value = trial.value if outcome == "complete" else None
    return EndedTrial(number=trial.number, outcome=outcome, value=value, params=dict(trial.params), why=why)


def _best(config: Config, complete: Sequence[Any], ended: Sequence[EndedTrial]) -> Any:
    """Return the `complete` trial with the highest value. Trials whose pool does not fit into the devices are excluded.
    Raises Diverged if all trials have diverged, and BadInput if no pool fits."""
    feasible = [t for t in complete if all(v <= 0 for v in t.constraints.values())]
    if feasible:
        return max(feasible, key=lambda t: t.value)
    why = next((f". Trial {each.number}: {each.why}" for each in ended if each.why), "")
    if ended and all(each.outcome == "diverged" for each in ended):
        raise Diverged(f"all {len(ended)} trials have diverged. Widen tune.space, or change the configuration{why}")
    raise BadInput(
        f"none of {len(ended)} trials has a finite {config.tune.metric} and a pool that fits into the devices. Widen "
        f"tune.space{why}"
    )


def beats(best: Figures, default: Figures) -> bool:
    """Return whether the best setting is significantly better than the default on the held-out seeds (Student's
    two-sided paired t test at 5 %). None marks a diverged run. The best setting is not better if one of its runs
    diverged. The best setting is better if only runs of the default diverged."""
    b, d = finite(best), finite(default)
    if b is None or d is None:
        return b is not None
    test = tested(b, d)
    return test is not None and test.mean > 0 and test.p < LEVEL


def _held_out(config: Config, setting: Config, study: Any, folder: Path, name: str, prefix: str) -> Figures:
    """Return a list with the metric of `setting` for each held-out seed. An element is None if the run diverges. Folder
    names begin with `prefix`."""
    values: Figures = []
    for seed in config.tune.held_out:
        out = folder / "held-out" / f"{prefix}-s{seed}"
        run = tune_worker.resolved(setting, seed, out)
        try:
            if not (out / "history.json").exists():
                tune_worker.prepare(run, folder, out)
            tags = tune_storage.tags(study, f"held-out-{name}-s{seed}", held_out=name)
            values.append(tune_worker.rounds(run, out, tags))
        except (Diverged, NothingMerged) as error:
            log.warning("the %s setting diverged on the held-out seed %d: %s", name, seed, error)
            values.append(None)
    return values
