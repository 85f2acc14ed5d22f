"""The outcome of a study: as a file, as text for a terminal, as Markdown, and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flexfleet.experiments.comparison_report import escaped
from flexfleet.experiments.ranking import tested
from flexfleet.experiments.tune_trials import DIVERGED, INFEASIBLE
from flexfleet.files.artifacts import Artifact
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, render
from flexfleet.reports.report import NONE

Trials = Sequence[tuple[int, float, Mapping[str, Any]]]
"""The complete trials: number, value, parameters."""


Figures = list[int | float | None]
"""A figure for each held-out seed; None: the run diverged."""
Outcome = Literal["complete", "pruned", "infeasible", "diverged"]


class Tried(BaseModel):
    """A trial that is done."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int
    outcome: Outcome
    value: float | None
    """Null unless it is complete."""
    params: dict[str, Any]
    why: str | None = None
    """Why the trial cannot be the best: it is infeasible, has diverged, or some devices cannot hold its models."""


class Tuned(Artifact):
    """tune.json."""

    id: str
    metric: Literal["avg", "full"]
    measured: str = "accuracy"
    """The task's metric; a trial's value is its mean over the levels, or the largest model's."""
    trials: dict[str, int]
    """How many by outcome."""
    space: dict[str, dict[str, Any]]
    symbols: dict[str, str] = Field(default={})
    """By dotted name, the symbol of a parameter in the algorithm's paper."""
    importance: dict[str, float]
    """How much each parameter mattered: shares that add up to 1, or 0 if there are too few trials."""
    default: dict[str, Any]
    """The configuration's own values of the parameters, where they are numbers, texts or switches."""
    default_value: float | None
    """The value of the trial that runs the configuration unchanged; null if that trial is not complete."""
    best: dict[str, Any]
    best_trial: int
    best_value: float
    held_out: dict[Literal["seeds", "default", "best"], Figures]
    """Figures of the unchanged configuration and of the best one, seed by seed; null: the run diverged."""
    gain: float | None
    """Mean of best - default over the held-out seeds; null without them, and if a run diverged."""
    better: bool
    """Whether the best setting is better than the default, beyond the noise of the held-out seeds (`conclude.beats`);
    without held-out seeds, whether its trial has the higher value. params.yaml has the best values only then."""
    tried: tuple[Tried, ...]
    """All trials that are done."""

    @property
    def measure(self) -> Measure:
        return Measure(self.measured)


# ------------------------------------------------------------------------------------------------------- a trial
def why_none(trial: Any) -> str | None:
    """Why one of the study's trials has no value; None where it has one or is pruned."""
    why: str | None = trial.user_attrs.get(INFEASIBLE) or trial.user_attrs.get(DIVERGED)
    return why


def outcome_of(trial: Any) -> Outcome:
    from optuna.trial import TrialState

    if trial.state == TrialState.COMPLETE:
        return "complete"
    if why_none(trial) is None:
        return "pruned"
    return "infeasible" if INFEASIBLE in trial.user_attrs else "diverged"


def tried(trial: Any) -> Tried:
    why, outcome = why_none(trial), outcome_of(trial)
    if why is None and (over := [name for name, points in trial.constraints.items() if points > 0]):
        why = f"larger than its devices hold: {', '.join(over)}"
    value = trial.value if outcome == "complete" else None
    return Tried(number=trial.number, outcome=outcome, value=value, params=dict(trial.params), why=why)


def finite(figures: Figures) -> list[float] | None:
    """The figures if no run diverged, else None."""
    return None if None in figures else [each for each in figures if each is not None]


# -------------------------------------------------------------------------------------------------------- words
def headline(tuned: Tuned) -> str:
    """What the best setting gains over the default, and the setting if it is better."""
    return f"{gained(tuned)}: {said(tuned.best, tuned.symbols)}" if tuned.better else gained(tuned)


def gained(tuned: Tuned) -> str:
    if not tuned.better:
        found = "Nothing better than the default was found"
        if tuned.gain is None or tuned.gain <= 0:
            return found
        return f"{found}: {points(tuned, tuned.gain)} on the held-out seeds may be noise; add seeds to tune.held_out"
    if tuned.gain is not None:
        return f"{points(tuned, tuned.gain)} over the default"
    if tuned.held_out["seeds"]:
        return "The best setting trains on all held-out seeds, and the default diverges"
    figure = f"{tuned.metric} {tuned.measure.with_unit(tuned.best_value)}"
    if tuned.default_value is not None:
        figure += f" against {tuned.measure.with_unit(tuned.default_value)} of the default"
    return f"{figure}, not compared on held-out seeds"


def points(tuned: Tuned, gain: float) -> str:
    """`+2.50 points` of an accuracy, `+0.0250` of any other metric."""
    return tuned.measure.said(gain, "+") + (" points" if tuned.measure.unit else "")


def told(tuned: Tuned, folder: Path) -> str:
    """A summary for the terminal."""
    same = "" if tuned.better else " (the default)"
    return "\n".join([headline(tuned), *_lines(tuned), f"settings: {folder / 'params.yaml'}{same}"])


def _lines(tuned: Tuned) -> list[str]:
    t, measure = tuned.trials, tuned.measure
    best = said(tuned.best, tuned.symbols)
    lines = [
        f"{t['complete']} trials complete, {t['pruned']} pruned, {t['infeasible']} infeasible, "
        f"{t['diverged']} diverged",
        f"best, trial {tuned.best_trial}: {tuned.metric} {measure.with_unit(tuned.best_value)} with {best}",
    ]
    if tuned.default_value is not None:
        lines.append(
            f"default: {tuned.measure.with_unit(tuned.default_value)} with {said(tuned.default, tuned.symbols)}"
        )
    if tuned.held_out["seeds"]:
        seeds = ", ".join(map(str, tuned.held_out["seeds"]))
        lines.append(f"held-out seeds {seeds}: {_compared(tuned)}")
    return lines


def _compared(tuned: Tuned) -> str:
    """The best setting against the default on the held-out seeds, with the 95 % interval of the gain."""
    measure = tuned.measure
    best, default = (finite(tuned.held_out[of]) for of in ("best", "default"))
    if best is None or default is None or tuned.gain is None:
        diverged = [name for name, of in (("the best setting", best), ("the default", default)) if of is None]
        return f"{' and '.join(diverged)} diverged"
    against = f"{measure.with_unit(mean(best))} against {measure.with_unit(mean(default))}, {points(tuned, tuned.gain)}"
    if tuned.best == tuned.default:
        return against
    if (test := tested(best, default)) is None:
        return f"{against} (no interval: {'one seed' if len(best) == 1 else 'all gains are equal'})"
    low, high = (measure.said(test.mean + side * test.half, "+") for side in (-1, 1))
    return f"{against} (95 % interval {low} to {high})"


def markdown(tuned: Tuned, patch: str) -> str:
    """`patch`: the best values alone, as YAML."""
    rule = ("---", *("--:" for _ in PARAMETERS[1:]))
    rows = [f"| {' | '.join(map(escaped, row))} |" for row in (PARAMETERS, *parameters(tuned))]
    table = "\n".join([rows[0], f"| {' | '.join(rule)} |", *rows[1:]])
    lines = [escaped(line) for line in _lines(tuned)]
    changed = [f"```yaml\n{patch}```\n"] if tuned.better else []
    return "\n\n".join([f"## {escaped(headline(tuned))}", table, *lines, *changed])


PARAMETERS = ("parameter", "default", "best", "searched", "importance")


def parameters(tuned: Tuned) -> list[tuple[str, ...]]:
    """A row for each parameter, the one that mattered most first."""
    rows: list[tuple[str, ...]] = []
    for path in sorted(tuned.space, key=lambda path: -tuned.importance[path]):
        default, best = (shown(values[path]) if path in values else NONE for values in (tuned.default, tuned.best))
        rows.append(
            (called(path, tuned.symbols), default, best, _searched(tuned.space[path]), f"{tuned.importance[path]:.0%}")
        )
    return rows


def _searched(range: Mapping[str, Any]) -> str:
    if range["choices"]:
        return ", ".join(map(shown, range["choices"]))
    kinds = [kind for kind in ("log", "whole") if range[kind]]
    return ", ".join([f"{shown(range['low'])} to {shown(range['high'])}", *kinds])


def held_out(tuned: Tuned) -> list[tuple[str, ...]]:
    """Seed, default, best and the gain; if there are several seeds, their means in the last row."""
    h, m = tuned.held_out, tuned.measure
    rows = [(str(s), d, b) for s, d, b in zip(h["seeds"], h["default"], h["best"], strict=True)]
    default, best = finite(h["default"]), finite(h["best"])
    if len(rows) > 1 and default and best:
        rows.append(("mean", mean(default), mean(best)))

    def cells(d: float | None, b: float | None) -> tuple[str, ...]:
        gain = NONE if d is None or b is None else m.said(b - d, "+")
        return (*("diverged" if each is None else m.said(each) for each in (d, b)), gain)

    return [(name, *cells(d, b)) for name, d, b in rows]


def said(values: Mapping[str, Any], symbols: Mapping[str, str]) -> str:
    return ", ".join(f"{called(path, symbols)} {shown(value)}" for path, value in values.items())


def called(path: str, symbols: Mapping[str, str]) -> str:
    """Return a parameter's name for people: without its section if it is the algorithm's, and with its symbol."""
    name = path.removeprefix("algorithm.")
    return f"{symbols[path]} ({name})" if path in symbols else name


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------------- page
def importance(study: Any, complete: Sequence[Any], space: Mapping[str, Any]) -> dict[str, float]:
    """The importance of each parameter; 0 for all if there are fewer than four trials, or all have the same value."""
    import optuna

    complete = [t for t in complete if all(p in t.params for p in space)]  # the default may lie outside of the space
    varied = {p for p in space if len({repr(t.params.get(p)) for t in complete}) > 1}
    shares = dict.fromkeys(space, 0.0)
    if len(complete) > 3 and varied and len({t.value for t in complete}) > 1:
        shares |= optuna.importance.get_param_importances(study, params=sorted(varied))
    return {path: float(share) for path, share in shares.items()}


def page(tuned: Tuned, trials: Trials) -> str:
    """One HTML page that loads nothing from elsewhere; on a narrow screen it has one column."""
    wide = [path for path, r in tuned.space.items() if r["log"] and r["high"] >= 10 * r["low"]]
    shares, labels = tuned.importance, {path: called(path, tuned.symbols) for path in tuned.space}
    return render(
        "flexfleet.experiments",
        "study.html",
        tuned=tuned,
        headline=gained(tuned),
        setting=said(tuned.best, tuned.symbols) if tuned.better else "",
        lines=_lines(tuned),
        head=PARAMETERS,
        parameters=parameters(tuned),
        held_out=held_out(tuned),
        drawings=[Drawing(each) for each in plots.study(trials, shares, wide, labels, measure=tuned.measure)],
    )
