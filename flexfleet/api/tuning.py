"""`flexfleet.tune`: a search for hyper-parameters from Python, and what a study's folder gives."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, EnvironmentFailure
from fl_engine.core.text import path_of
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import Arguments, check_reach, plain
from flexfleet.api.calls import shown, told
from flexfleet.api.results import in_store
from flexfleet.api.tables import table, to_html
from flexfleet.config import Config, parse_schema
from flexfleet.config.form_fields import SHORT
from flexfleet.config.overrides import check_once, on_top
from flexfleet.config.read import read_file
from flexfleet.config.run_names import dated
from flexfleet.config.run_names import plain as plain_name
from flexfleet.experiments import tune_report
from flexfleet.experiments.tune import tune as tune_all
from flexfleet.experiments.tune_report import Tuned
from flexfleet.experiments.tune_space import configured
from flexfleet.files.terminal import missing

BOUNDS = 2


def tune(
    algorithm: Any = None,
    *,
    space: Mapping[str, Any] | None = None,
    trials: int | None = None,
    metric: str | None = None,
    seeds: Sequence[int] | None = None,
    held_out: Sequence[int] | None = None,
    jobs: int | None = None,
    id: str | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **common: Any,
) -> Study:
    """Search hyper-parameters, then compare the best setting with the default on seeds that no trial has used, as
    `flexfleet tune` does, with the same folder and the same bits.

    The first trial is the default, unchanged. A trial that diverges or merges no update cannot win.

    Args:
        algorithm: As in `flexfleet.run`.
        space: By dotted name: (low, high), both included; a list of choices; or a mapping, {"low": 0.01, "high": 1,
            "log": True}. Between two whole numbers only whole numbers are drawn, unless the parameter is now a
            fraction. None: the space that the algorithm declares.
        trials: How many in all (default: 30).
        metric: avg (the default) or full, of the last round, the mean over `seeds`.
        seeds: Seeds of each trial's runs (default: 0).
        held_out: Seeds of the comparison in the end (default: 100, 101, 102).
        jobs: Workers side by side. With 1, the default, the trials run in this process, so that they may use what a
            notebook defines.
        id: Name of the study's folder in the store (default: the time).
        resume: Resume the study of this id.
        common: The keywords of `flexfleet.run` (dataset, model, rounds, options, config, store_uri, ...); `seed` is
            that of the search.

    Raises:
        ConfigError: The search is impossible.
        EnvironmentFailure: Optuna is not installed.

    Example:
        >>> study = flexfleet.tune("fedprox", space={"algorithm.mu": (0.001, 1.0)}, trials=20)
    """
    given = {"trials": trials, "metric": metric, "seeds": seeds, "held_out": held_out, "workers": jobs}
    keywords = {**common, "algorithm": algorithm}
    __tracebackhide__ = True

    def go() -> Study:
        if resume and id is None:
            raise ConfigError("resume=True needs id, the name of the study to resume")
        if find_spec("optuna") is None:
            raise EnvironmentFailure(missing("optuna"))
        config = study_of(space, given, keywords)
        check_reach(config, config.tune.workers)
        name = dated("tune") if id is None else plain_name(id, "a study's id")
        folder = Path(config.run.store) / name
        with isolated(), shown(progress):
            tune_all(config, name, resume=resume)
        return Study(folder)

    return told(go)


def study_of(space: Mapping[str, Any] | None, given: Mapping[str, Any], keywords: Mapping[str, Any]) -> Config:
    """Return the configuration of a study; `given`: parameters of its section `tune`. Raises ConfigError."""
    if space is not None and not isinstance(space, Mapping):
        raise ConfigError(f"space: a mapping is expected, {{'training.lr': (0.01, 0.5)}}, got {space!r}")
    rest = {name: value for name, value in keywords.items() if name not in ("config", "options")}
    arguments = Arguments(keywords.get("config"), keywords.get("options"), rest)
    config = arguments.load(arguments.overrides)[0]
    own = {f"tune.{n}": plain(list(v) if isinstance(v, range) else v, n) for n, v in given.items() if v is not None}
    if space is not None:
        check_once((f"space[{path!r}]", {SHORT.get(path, path): None}) for path in space)
        ranges = {SHORT.get(path, path): value for path, value in space.items()}
        own["tune.space"] = {path: _range(config, path, value) for path, value in ranges.items()}
    check_once([("options", arguments.overrides), ("a keyword", own)])
    return arguments.load(on_top(arguments.overrides, own))[0]


def _range(config: Config, path: str, value: Any) -> dict[str, Any]:
    """Return a range as the configuration has it."""
    if isinstance(value, Mapping):
        return {str(key): plain(each, f"space[{path!r}]") for key, each in value.items()}
    if isinstance(value, tuple):
        ends = plain(value, f"space[{path!r}]")
        if len(ends) != BOUNDS or any(isinstance(end, bool) or not isinstance(end, int | float) for end in ends):
            raise ConfigError(f"space[{path!r}]: (low, high) or a [list] of choices is expected, got {value!r}")
        whole = all(isinstance(end, int) for end in ends) and not isinstance(configured(config, path), float)
        return {"low": ends[0], "high": ends[1], "whole": whole}
    if isinstance(value, str) or not hasattr(value, "__iter__"):
        raise ConfigError(f"space[{path!r}]: (low, high) or a [list] of choices is expected, got {value!r}")
    return {"choices": [plain(each, f"space[{path!r}]") for each in value]}


# ------------------------------------------------------------------------------------------------ what it gives
class Study:
    """A finished search.

    id, folder        its name and folder
    best, default     setting of the best trial and the configuration's own, by dotted names
    best_value        metric of the best trial
    better            whether the best setting is better than the default, beyond the noise of the held-out seeds
                      (paired t test at 5 %); without held-out seeds, whether its trial has the higher metric
    gain              mean of best - default over the held-out seeds; None without them, or if one diverged
    table             best against default, a line for each held-out seed
    trials            a line for each trial
    importance        how much each parameter mattered: shares that add up to 1, or 0 with too few trials
    config            whole configuration for `flexfleet.run(config=...)`, with the best setting if it is better
    report            the page
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where there is no finished study."""
        self.folder = path_of(folder).absolute()  # a notebook may change its folder
        if not (self.folder / "tune.json").is_file():
            raise ConfigError(
                f"{self.folder} holds no finished study: it has no tune.json. One that was stopped goes on with "
                "tune(..., id=..., resume=True)"
            )

    def __repr__(self) -> str:
        return f"<flexfleet.Study {self.id}: {tune_report.headline(self._tuned)}>"

    def __str__(self) -> str:
        """The summary of the terminal."""
        return tune_report.told(self._tuned, self.folder)

    def _repr_html_(self) -> str:
        page = f'<p><a href="{html.escape(str(self.report))}">report</a></p>'
        lines = to_html(("seed", "default", "best", "gain"), tune_report.held_out(self._tuned))
        return f"<p>{html.escape(tune_report.headline(self._tuned))}</p>{lines}{page}"

    @cached_property
    def _tuned(self) -> Tuned:
        return Tuned.read(self.folder / "tune.json")

    @property
    def id(self) -> str:
        return self._tuned.id

    @property
    def best(self) -> dict[str, Any]:
        return dict(self._tuned.best)

    @property
    def default(self) -> dict[str, Any]:
        return dict(self._tuned.default)

    @property
    def best_value(self) -> float:
        return self._tuned.best_value

    @property
    def gain(self) -> float | None:
        return self._tuned.gain

    @property
    def better(self) -> bool:
        return self._tuned.better

    @property
    def importance(self) -> dict[str, float]:
        return dict(self._tuned.importance)

    @property
    def report(self) -> Path:
        return self.folder / "study.html"

    @property
    def config(self) -> dict[str, Any]:
        return parse_schema(read_file(self.folder / "params.yaml")).model_dump(mode="json")

    @property
    def table(self) -> Any:
        held = self._tuned.held_out
        pairs = zip(held["seeds"], held["default"], held["best"], strict=True)
        return table(
            [
                {"seed": seed, "default": d, "best": b, "gain": None if b is None or d is None else b - d}
                for seed, d, b in pairs
            ]
        )

    @property
    def trials(self) -> Any:
        """`number`, `outcome` (complete, pruned, infeasible, diverged), `value`, the parameters by dotted name, and
        `why` a trial cannot be the best."""
        return table(
            [
                {"number": t.number, "outcome": t.outcome, "value": t.value, **t.params, "why": t.why}
                for t in self._tuned.tried
            ]
        )


def load_study(study: str | Path | Study) -> Study:
    """The study in a folder, or of this id in the folder `runs`. Raises ConfigError where there is none."""
    return Study(study.folder if isinstance(study, Study) else in_store(study, "tune.json"))
