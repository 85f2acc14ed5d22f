"""`flexfleet.compare`: several algorithms and seeds from Python, and what a comparison's folder gives."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, did_you_mean
from fl_engine.core.text import path_of
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import check_reach, plain
from flexfleet.api.calls import shown, told
from flexfleet.api.comparison_arguments import entries_of
from flexfleet.api.paired import Paired, paired
from flexfleet.api.results import Result, in_store
from flexfleet.api.tables import table, to_html
from flexfleet.config.comparison_runs import checked_accuracies, checked_seeds, run_name
from flexfleet.config.run_names import dated
from flexfleet.experiments import comparison_report, comparison_tables
from flexfleet.experiments.compare import run_comparison as compare_all
from flexfleet.experiments.comparison_file import ComparisonFile as ComparisonFile
from flexfleet.experiments.comparison_file import OneRun, figure_of
from flexfleet.experiments.executor import one_by_one
from flexfleet.experiments.ranking import TITLES

FIGURES = tuple(name for name, field in OneRun.model_fields.items() if field.annotation in (float, float | None))
FIGURES += tuple(name for name in TITLES if name not in FIGURES)
"""The figures that a comparison has of each run: one number each."""


def compare(
    algorithms: Any,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    over: Mapping[str, Sequence[Any]] | None = None,
    to: Sequence[float] = (),
    jobs: int = 1,
    id: str | None = None,
    resume: bool = False,
    progress: bool | None = None,
    **common: Any,
) -> Comparison:
    """Run several algorithms on the same data and network with several seeds, as `flexfleet compare` does, with the
    same folders and the same bits.

    Args:
        algorithms: A list of names, classes or objects with their options; or, by label, one of these or a mapping:
            {"flexfl": "flexfl", "skewed": {"algorithm": "flexfl", "partition.alpha": 0.1}}.
        over: Factors of the table: {"training.lr": [0.01, 0.1]} makes every label with each of these values.
        to: Accuracies to reach, as shares.
        jobs: Runs side by side. With 1 they run in this process, so that they may use what a notebook defines.
        id: Name of the comparison's folder in the store (default: the time).
        resume: Resume the comparison of this id.
        common: The keywords of `flexfleet.run` (dataset, model, rounds, options, config, store_uri, ...), the same for
            all runs unless a label sets them itself.

    Raises:
        ConfigError: Something is wrong, before anything trains.
        RunsFailed: Runs failed with an expected error, after all others ended. With one job an error of your own code
            ends the comparison at once, with a note that names label and seed.

    Example:
        >>> flexfleet.compare(["flexfl", "heterofl"], seeds=(0, 1, 2), rounds=20).table
    """
    __tracebackhide__ = True

    def go() -> Comparison:
        if resume and id is None:
            raise ConfigError("resume=True needs id, the name of the comparison to resume")
        if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
            raise ConfigError(f"jobs is the number of runs side by side, at least 1, got {jobs!r}")
        if isinstance(to, str) or not hasattr(to, "__iter__"):
            raise ConfigError(f"to: a list of accuracies is expected, e.g. (0.8, 0.9), got {to!r}")
        reach = checked_accuracies(to)
        name = dated("compare") if id is None else id
        runs = entries_of(algorithms, _listed(seeds), over or {}, name, common)
        for entry in runs:
            check_reach(entry.config, jobs)
        folder = Path(runs[0].config.run.store)
        with isolated(), shown(progress):
            compare_all(runs, name, to=reach, at_once=jobs, resume=resume, carry_out=one_by_one if jobs == 1 else None)
        return Comparison(folder)

    return told(go)


def _listed(seeds: Any) -> tuple[int, ...]:
    """The seeds as plain whole numbers."""
    if isinstance(seeds, str) or not hasattr(seeds, "__iter__"):
        raise ConfigError(f"seeds: a list of whole numbers is expected, e.g. (0, 1, 2), got {seeds!r}")
    return checked_seeds(plain(seed, "seeds") for seed in seeds)


# ------------------------------------------------------------------------------------------------- what it gives
class Comparison:
    """A finished comparison.

    id, folder        its name and folder
    labels, seeds     what was compared
    table             a line for each label: means over the seeds and their sample standard deviations
    runs              the `Result` of each run, by (label, seed)
    report            the page with tables and curves
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises ConfigError where there is no finished comparison."""
        self.folder = path_of(folder).absolute()  # a notebook may change its folder
        if not (self.folder / "comparison.json").is_file():
            raise ConfigError(
                f"{self.folder} holds no finished comparison: it has no comparison.json. One that was stopped goes on "
                "with compare(..., id=..., resume=True)"
            )

    def __repr__(self) -> str:
        labels, seeds = ", ".join(self.labels), ", ".join(map(str, self.seeds))
        return f"<flexfleet.Comparison {self.id}: {labels}; seeds {seeds}>"

    def __str__(self) -> str:
        """The tables of the terminal."""
        return comparison_report.text(self._file)

    def _repr_html_(self) -> str:
        first = comparison_tables.tables(self._file)[0]
        page = f'<p><a href="{html.escape(str(self.report))}">report</a></p>'
        return f"<p>{html.escape(comparison_report.title(self._file))}</p>{to_html(first.head, first.rows)}{page}"

    @cached_property
    def _file(self) -> ComparisonFile:
        return ComparisonFile.read(self.folder / "comparison.json")

    @property
    def id(self) -> str:
        return self._file.id

    @property
    def labels(self) -> tuple[str, ...]:
        return self._file.labels

    @property
    def seeds(self) -> tuple[int, ...]:
        return self._file.seeds

    @property
    def report(self) -> Path:
        return self.folder / "comparison.html"

    @property
    def table(self) -> Any:
        """`label`, `algorithm`, the parameters that differ, and the figures by their names in MLflow (`avg`,
        `best_avg`, `mb_down`, ...; `_std` is the standard deviation)."""
        figures = comparison_report.metrics(self._file)
        rows = []
        for label, found in self._file.results.items():
            own = {name.removesuffix(f"/{label}"): v for name, v in figures.items() if name.endswith(f"/{label}")}
            told = {"label": label, "algorithm": found.algorithm, **found.varied, **found.at}
            rows.append({**told, "seeds": len(self.seeds), **own})
        return table(rows)

    @cached_property
    def runs(self) -> dict[tuple[str, int], Result]:
        """Raises ConfigError where the runs' folders are not there, as with the figures that a pipeline kept."""
        pairs = [(label, seed) for label in self.labels for seed in self.seeds]
        return {(label, seed): Result(self.folder / run_name(label, seed)) for label, seed in pairs}

    def paired(self, a: str, b: str, metric: str = "avg") -> Paired:
        """Return the differences a - b by seed, their mean and its 95 % interval, and p of the paired t test, adjusted
        by Holm's method for all pairs of labels. `metric`: avg, full, best_avg, devices, mb_up, seconds, ... Raises
        ConfigError for an unknown metric or label."""
        if metric not in FIGURES:
            raise ConfigError(
                f"there is no metric {metric!r}{did_you_mean(metric, FIGURES)}; there are {', '.join(FIGURES)}"
            )
        values = {label: [figure_of(run, metric) for run in found.runs] for label, found in self._file.results.items()}
        return paired(values, self.seeds, a, b, metric)


def load_comparison(comparison: str | Path | Comparison) -> Comparison:
    """The comparison in a folder, or of this id in the folder `runs`. Raises ConfigError where there is none."""
    if isinstance(comparison, Comparison):
        return Comparison(comparison.folder)
    return Comparison(in_store(comparison, "comparison.json"))
