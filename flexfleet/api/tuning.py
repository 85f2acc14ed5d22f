"""Search for hyper-parameters from Python: `flexfleet.tune` returns a `Study`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError
from fl_engine.core.text import path_of
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import Arguments, by_dotted_name, check_reach, plain
from flexfleet.api.calls import api_call, find_folder, shown, table
from flexfleet.api.running import Common
from flexfleet.config import Config, parse_schema
from flexfleet.config.dotted import check_once, on_top
from flexfleet.config.read import read_file
from flexfleet.config.run_names import check_name, dated
from flexfleet.experiments import tune_report
from flexfleet.experiments.tune import tune as run_study
from flexfleet.experiments.tune_report import Tuned
from flexfleet.experiments.tune_space import configured

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Unpack


@api_call
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
    progress: bool = True,
    seed: int | None = None,
    **common: Unpack[Common],
) -> Study:
    """Search for hyper-parameters, and compare the best setting with the default setting on held-out seeds.

    `flexfleet tune` creates the same folder and bit-identical models. The first trial is the default setting.

    Args:
        algorithm: As in `flexfleet.run`.
        space: Map dotted names to (low, high), to a list of choices, or to {"low": 0.01, "high": 1, "log": True}. Both
            bounds are included. Integer bounds define a range of integers, unless the configured value is a float. None
            for the search space that the algorithm declares.
        trials: Number of trials (default: 30).
        metric: Metric of the last round, averaged over `seeds`: avg (the default) or full.
        seeds: Seeds for the runs of each trial (default: 0).
        held_out: Seeds for the final comparison (default: 100, 101, 102).
        jobs: Number of parallel workers. With 1 (the default), trials are executed in this process and can use classes
            from a notebook.
        id: Name of the study's folder in the store; None for a name with the current time.
        resume: True to resume the study with this `id`.
        progress: As in `flexfleet.run`.
        seed: Seed of the search.
        common: Arguments of `flexfleet.run` (dataset, model, rounds, options, config, store_uri, ...).

    Returns:
        The study.

    Raises:
        ConfigError: An argument is invalid.
        EnvironmentFailure: Optuna is not installed.

    Examples:
        >>> study = flexfleet.tune("fedprox", space={"algorithm.mu": (0.001, 1.0)}, trials=20)
    """
    if resume and id is None:
        raise ConfigError.at("id must be the name of the study to resume, because resume=True")
    given = {"trials": trials, "metric": metric, "seeds": seeds, "held_out": held_out, "workers": jobs}
    config = study_of(space, given, {**common, "algorithm": algorithm, "seed": seed})
    check_reach(config, config.tune.workers)
    name = dated("tune") if id is None else check_name(id, "a study's id")
    with isolated(), shown(progress):
        run_study(config, name, resume=resume)
    return Study(Path(config.run.store) / name)


def study_of(space: Mapping[str, Any] | None, given: Mapping[str, Any], keywords: Mapping[str, Any]) -> Config:
    """Return the configuration of a study. `given` contains parameters of the section `tune`. Raises ConfigError."""
    arguments = Arguments(keywords)
    config = arguments.load(arguments.overrides)[0]
    own = {f"tune.{name}": plain(value, name) for name, value in given.items() if value is not None}
    if space is not None:
        ranges = by_dotted_name(space, "space")
        own["tune.space"] = {path: _range(config, path, value) for path, value in ranges.items()}
    check_once([("options", arguments.overrides), ("a keyword", own)])
    return arguments.load(on_top(arguments.overrides, own))[0]


def _range(config: Config, path: str, value: Any) -> dict[str, Any]:
    what = f"space[{path!r}]"
    if isinstance(value, Mapping):
        return plain(value, what)  # type: ignore[no-any-return]
    if isinstance(value, list):
        return {"choices": plain(value, what)}
    if not isinstance(value, tuple) or len(value) != 2:
        raise ConfigError(f"{what} must be (low, high) or a [list] of choices, got {value!r}", path=path)
    low, high = plain(value, what)
    whole = isinstance(low, int) and isinstance(high, int) and not isinstance(configured(config, path), float)
    return {"low": low, "high": high, "whole": whole}


class Study:
    """Result of a finished hyper-parameter search.

    Attributes:
        id: Name of the study.
        folder: Folder of the study.
        best: Parameters of the best trial, by dotted name.
        default: Parameters of the default setting, by dotted name.
        best_value: Metric of the best trial.
        better: True if the best setting is significantly better than the default on the held-out seeds (paired t test
            at 5 %). Without held-out seeds, True if the best trial has a higher metric than the default.
        gain: Mean difference best - default over the held-out seeds. None without held-out seeds or if a run diverged.
        table: Table with the columns default, best and gain (best - default), and a row for each held-out seed.
        trials: Table with outcome (complete, pruned, infeasible, diverged), value and parameters of each trial.
        importance: Map each parameter to the fraction of the metric's variance that it explains; 0 with too few trials.
        config: Configuration for `flexfleet.run(config=...)`. It is the best setting if `better` is True, else the
            default.
        report: Path of the HTML page.

    Examples:
        >>> study = flexfleet.tune("heterofl", space={"training.lr": (0.01, 0.5)})
        >>> flexfleet.run(config=study.config)
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a study. Raises ConfigError if the folder does not contain a finished study."""
        self.folder = path_of(folder).absolute()  # a notebook may change the working directory later
        if not (self.folder / "tune.json").is_file():
            raise ConfigError(
                f"{self.folder} is not a finished study, because it has no tune.json. Continue a stopped study with "
                "tune(..., id=..., resume=True)"
            )
        self._tuned = tuned = Tuned.read(self.folder / "tune.json")
        self.id, self.report = tuned.id, self.folder / "study.html"
        self.best, self.default, self.importance = dict(tuned.best), dict(tuned.default), dict(tuned.importance)
        self.best_value, self.better, self.gain = tuned.best_value, tuned.better, tuned.gain

    def __repr__(self) -> str:
        return f"<flexfleet.Study {self.id}: {tune_report.headline(self._tuned)}>"

    def __str__(self) -> str:
        return tune_report.text(self._tuned, self.folder)

    @property
    def config(self) -> dict[str, Any]:
        return parse_schema(read_file(self.folder / "params.yaml")).model_dump(mode="json")

    @property
    def table(self) -> DataFrame:
        held = self._tuned.held_out
        rows = [
            {"seed": seed, "default": d, "best": b, "gain": None if b is None or d is None else b - d}
            for seed, d, b in zip(held["seeds"], held["default"], held["best"], strict=True)
        ]
        return table(rows)

    @property
    def trials(self) -> DataFrame:
        rows = [
            {"number": t.number, "outcome": t.outcome, "value": t.value, **t.params, "why": t.why}
            for t in self._tuned.tried
        ]
        return table(rows)


def load_study(study: str | Path | Study) -> Study:
    """Open a finished study.

    Args:
        study: Folder of the study, or the name of this folder in `runs`.

    Returns:
        The study.

    Raises:
        ConfigError: The folder does not contain a finished study.

    Examples:
        >>> flexfleet.load_study("runs/tune-a").best
    """
    return Study(find_folder(study, "tune.json"))
