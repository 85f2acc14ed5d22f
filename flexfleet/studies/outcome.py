"""The outcome of a study: as a file, as text for a terminal, as Markdown, and as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from flexfleet.comparisons.tabulate import escaped
from flexfleet.files.artifacts import Artifact
from flexfleet.files.measure import Measure
from flexfleet.reports import plots
from flexfleet.reports.page import Drawing, render
from flexfleet.reports.report import NONE
from flexfleet.studies.trials import DIVERGED, INFEASIBLE

Trials = Sequence[tuple[int, float, Mapping[str, Any]]]
"""The complete trials: number, value, parameters."""


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
    """How many by outcome; `diverged` is missing in older studies."""
    space: dict[str, dict[str, Any]]
    importance: dict[str, float]
    """How much each parameter mattered: shares that add up to 1, or 0 if there are too few trials."""
    default: dict[str, Any]
    """The configuration's own values of the parameters, where they are numbers, texts or switches."""
    default_value: float | None
    """The value of the trial that has them; null if none has: a value outside the space, or the trial is not
    complete."""
    best: dict[str, Any]
    best_trial: int
    best_value: float
    held_out: dict[Literal["seeds", "default", "best"], list[int | float]]
    """Figures of the unchanged configuration and of the best one, seed by seed."""
    gain: float
    """Mean of best - default over the held-out seeds."""
    tried: tuple[Tried, ...] = ()
    """All trials that are done; empty in older studies."""

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


# -------------------------------------------------------------------------------------------------------- words
def headline(tuned: Tuned) -> str:
    """The best setting, and what it gains over the default."""
    return f"{gained(tuned)}: {said(tuned.best)}"


def gained(tuned: Tuned) -> str:
    if tuned.best == tuned.default:
        return "No trial was better than the default"
    if tuned.held_out["seeds"]:
        if tuned.gain > 0:
            return f"{points(tuned, tuned.gain)} over the default"
        return f"No gain over the default ({tuned.measure.said(tuned.gain, '+')})"
    if tuned.default_value is None:
        return f"{tuned.metric} {tuned.measure.with_unit(tuned.best_value)}"
    return f"{points(tuned, tuned.best_value - tuned.default_value)} over the default, on the trials' own seeds"


def points(tuned: Tuned, gain: float) -> str:
    """`+2.50 points` of an accuracy, `+0.0250` of any other metric."""
    return tuned.measure.said(gain, "+") + (" points" if tuned.measure.unit else "")


def told(tuned: Tuned, folder: Path) -> str:
    """A summary for the terminal."""
    return "\n".join([headline(tuned), *_lines(tuned), f"settings: {folder / 'params.yaml'}"])


def _lines(tuned: Tuned) -> list[str]:
    t, measure = tuned.trials, tuned.measure
    lines = [
        f"{t['complete']} trials complete, {t['pruned']} pruned, {t['infeasible']} infeasible, "
        f"{t.get('diverged', 0)} diverged",
        f"best, trial {tuned.best_trial}: {tuned.metric} {measure.with_unit(tuned.best_value)} with {said(tuned.best)}",
    ]
    if tuned.default_value is not None:
        lines.append(f"default: {tuned.measure.with_unit(tuned.default_value)} with {said(tuned.default)}")
    if tuned.held_out["seeds"]:
        b, d = tuned.held_out["best"], tuned.held_out["default"]
        seeds = ", ".join(str(int(s)) for s in tuned.held_out["seeds"])
        apart = [x - y for x, y in zip(b, d, strict=True)]
        spread = f"+- {measure.said(stdev(apart))}" if len(apart) > 1 else "one seed: no spread"
        against = f"{tuned.measure.with_unit(mean(b))} against {tuned.measure.with_unit(mean(d))}"
        lines.append(f"held-out seeds {seeds}: {against}, {points(tuned, tuned.gain)} ({spread})")
    return lines


def markdown(tuned: Tuned, patch: str) -> str:
    """`patch`: the best values alone, as YAML."""
    rule = ("---", *("--:" for _ in PARAMETERS[1:]))
    rows = [f"| {' | '.join(map(escaped, row))} |" for row in (PARAMETERS, *parameters(tuned))]
    table = "\n".join([rows[0], f"| {' | '.join(rule)} |", *rows[1:]])
    lines = [escaped(line) for line in _lines(tuned)]
    return "\n\n".join([f"## {escaped(headline(tuned))}", table, *lines, f"```yaml\n{patch}```\n"])


PARAMETERS = ("parameter", "default", "best", "searched", "importance")


def parameters(tuned: Tuned) -> list[tuple[str, ...]]:
    """A row for each parameter, the one that mattered most first."""
    rows: list[tuple[str, ...]] = []
    for path in sorted(tuned.space, key=lambda path: -tuned.importance[path]):
        default, best = (shown(values[path]) if path in values else NONE for values in (tuned.default, tuned.best))
        rows.append((short(path), default, best, _searched(tuned.space[path]), f"{tuned.importance[path]:.0%}"))
    return rows


def _searched(range: Mapping[str, Any]) -> str:
    if range["choices"]:
        return ", ".join(map(shown, range["choices"]))
    kinds = [kind for kind in ("log", "whole") if range[kind]]
    return ", ".join([f"{shown(range['low'])} to {shown(range['high'])}", *kinds])


def held_out(tuned: Tuned) -> list[tuple[str, ...]]:
    """Seed, default, best and the gain; if there are several seeds, their means in the last row."""
    h = tuned.held_out
    rows = [(str(int(s)), d, b) for s, d, b in zip(h["seeds"], h["default"], h["best"], strict=True)]
    if len(rows) > 1:
        rows.append(("mean", mean(h["default"]), mean(h["best"])))
    m = tuned.measure
    return [(name, m.said(d), m.said(b), m.said(b - d, "+")) for name, d, b in rows]


def said(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{short(path)} {shown(value)}" for path, value in values.items())


def short(path: str) -> str:
    return path.rpartition("algorithm.")[2]


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --------------------------------------------------------------------------------------------------------- page
def importance(study: Any, complete: Sequence[Any], space: Mapping[str, Any]) -> dict[str, float]:
    """The importance of each parameter; 0 for all if there are fewer than four trials, or all have the same value."""
    import optuna

    varied = {p for p in space if len({repr(t.params.get(p)) for t in complete}) > 1}
    shares = dict.fromkeys(space, 0.0)
    if len(complete) > 3 and varied and len({t.value for t in complete}) > 1:
        shares |= optuna.importance.get_param_importances(study, params=sorted(varied))
    return {path: float(share) for path, share in shares.items()}


def page(tuned: Tuned, trials: Trials) -> str:
    """One HTML page that loads nothing from elsewhere; on a narrow screen it has one column."""
    wide = [path for path, r in tuned.space.items() if r["log"] and r["high"] >= 10 * r["low"]]
    return render(
        "flexfleet.studies",
        "study.html",
        tuned=tuned,
        headline=gained(tuned),
        setting=said(tuned.best),
        lines=_lines(tuned),
        head=PARAMETERS,
        parameters=parameters(tuned),
        held_out=held_out(tuned),
        drawings=[Drawing(drawing) for drawing in plots.study(trials, tuned.importance, wide, measure=tuned.measure)],
    )
