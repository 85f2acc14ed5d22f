"""Define `flexfleet.compare`, which runs several algorithms with several seeds, and the result of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fl_engine.core.errors import ConfigError, did_you_mean, nearest
from fl_engine.core.text import path_of
from fl_engine.training.isolation import isolated
from flexfleet.api.arguments import check_reach, entries_of, plain
from flexfleet.api.calls import api_call, find_folder, shown, table
from flexfleet.api.results import Result
from flexfleet.api.running import Common
from flexfleet.config.comparison_runs import accuracies_of, run_name, seeds_of
from flexfleet.config.run_names import dated
from flexfleet.experiments import comparison_report
from flexfleet.experiments.compare import run_comparison
from flexfleet.experiments.comparison_file import ComparisonFile as ComparisonFile
from flexfleet.experiments.comparison_file import OneRun, figure_of
from flexfleet.experiments.executor import one_by_one
from flexfleet.experiments.ranking import TITLES, holm, tested
from flexfleet.reports.answer import p_value

if TYPE_CHECKING:
    from pandas import DataFrame
    from typing_extensions import Unpack

NUMBERS = tuple(name for name, field in OneRun.model_fields.items() if field.annotation in (float, float | None))
FIGURES = tuple(dict.fromkeys((*TITLES, *NUMBERS)))
"""Names of the metrics that `paired` can compare."""


@api_call
def compare(
    algorithms: Any,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    over: Mapping[str, Sequence[Any]] | None = None,
    to: Sequence[float] = (),
    jobs: int = 1,
    id: str | None = None,
    resume: bool = False,
    progress: bool = True,
    **common: Unpack[Common],
) -> Comparison:
    """Run several algorithms with several seeds on the same data and network. `flexfleet compare` writes bit-identical
    models and the same files.

    Args:
        algorithms: The variants to compare; a variant is an algorithm with its settings. A list of names, classes or
            objects, or a mapping from labels to names, classes, objects or settings: {"flexfl": "flexfl", "skewed":
            {"algorithm": "flexfl", "partition.alpha": 0.1}}.
        seeds: Seeds for the runs of each variant.
        over: Map dotted names to lists of values. Each variant is run with every combination of these values. For
            example, {"training.lr": [0.01, 0.1]} runs each variant with both learning rates.
        to: Target accuracies between 0 and 1. The comparison reports the cost to reach each accuracy.
        jobs: Number of parallel runs. With 1, runs are executed in this process and can use classes from a notebook.
        id: Name of the comparison's folder in the store; None for a name with the current time.
        resume: True to resume the comparison with this `id`.
        progress: As in `flexfleet.run`.
        common: Arguments of `flexfleet.run` for all runs (dataset, model, rounds, options, config, store_uri, ...).

    Returns:
        The comparison.

    Raises:
        ConfigError: An argument is wrong. Nothing was trained.
        RunsFailed: Some runs failed. The error is raised after all other runs have ended. With jobs=1, an error in your
            own code ends the comparison at once.

    Examples:
        >>> flexfleet.compare(["flexfl", "heterofl"], seeds=(0, 1, 2), rounds=20).table
    """
    if resume and id is None:
        raise ConfigError.at("id must be the name of the comparison to resume, because resume=True")
    for name, values in (("seeds", seeds), ("to", to)):
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise ConfigError.at(f"{name} must be a list of numbers, got {values!r}")
    reach = accuracies_of(to)
    name = dated("compare") if id is None else id
    runs = entries_of(algorithms, seeds_of(plain(each, "seeds") for each in seeds), over or {}, name, common)
    for entry in runs:
        check_reach(entry.config, jobs)
    with isolated(), shown(progress):
        run_comparison(runs, name, to=reach, at_once=jobs, resume=resume, execute=one_by_one if jobs == 1 else None)
    return Comparison(Path(runs[0].config.run.store))


class Comparison:
    """A finished comparison.

    Attributes:
        id: Name of the comparison.
        folder: Folder of the comparison.
        labels: Labels of the compared variants.
        seeds: Seeds of the runs of each variant.
        table: Table with the mean and the sample standard deviation over the seeds for each variant.
        runs: Map (label, seed) to the `Result` of the run.
        report: Path of the HTML page with tables and curves.

    Examples:
        >>> comparison = flexfleet.compare(["flexfl", "heterofl"], rounds=20)
        >>> comparison.paired("flexfl", "heterofl")
    """

    def __init__(self, folder: str | Path) -> None:
        """Open a comparison. Raises ConfigError if the folder does not contain a finished comparison."""
        self.folder = path_of(folder).absolute()  # a notebook may change the working directory later
        if not (self.folder / "comparison.json").is_file():
            raise ConfigError(
                f"{self.folder} has no comparison.json, so it is not a finished comparison. Continue a "
                "stopped comparison with compare(..., id=..., resume=True)"
            )
        self._file = ComparisonFile.read(self.folder / "comparison.json")
        self.id, self.labels, self.seeds = self._file.id, self._file.labels, self._file.seeds
        self.report = self.folder / "comparison.html"

    def __repr__(self) -> str:
        labels, seeds = ", ".join(self.labels), ", ".join(map(str, self.seeds))
        return f"<flexfleet.Comparison {self.id}: {labels}; seeds {seeds}>"

    def __str__(self) -> str:
        return comparison_report.text(self._file)

    @property
    def table(self) -> DataFrame:
        figures, rows = comparison_report.figures(self._file), []
        for label, found in self._file.results.items():
            about = {"label": label, "algorithm": found.algorithm, **found.varied, **found.at}
            rows.append({**about, "seeds": len(self.seeds), **figures[label]})
        return table(rows)

    @cached_property
    def runs(self) -> dict[tuple[str, int], Result]:
        pairs = [(label, seed) for label in self.labels for seed in self.seeds]
        return {(label, seed): Result(self.folder / run_name(label, seed)) for label, seed in pairs}

    def paired(self, a: str, b: str, metric: str = "avg") -> Paired:
        """Compare two variants with a paired t test, in which each pair of runs has the same seed.

        Args:
            a: Label of the first variant.
            b: Label of the second variant.
            metric: Name of the metric: avg, full, best_avg, mb_up, seconds, ...

        Raises:
            ConfigError: The metric or one of the labels does not exist.

        Examples:
            >>> comparison.paired("flexfl", "heterofl", "full").p
        """
        if metric not in FIGURES:
            raise ConfigError(
                f"there is no metric {metric!r}{did_you_mean(metric, FIGURES)}. Choose one of {', '.join(FIGURES)}",
                path="metric",
            )
        values = {label: [figure_of(run, metric) for run in found.runs] for label, found in self._file.results.items()}
        return paired(values, self.seeds, a, b, metric)


def load_comparison(comparison: str | Path | Comparison) -> Comparison:
    """Open a finished comparison.

    Args:
        comparison: Folder of the comparison, or the name of this folder in `runs`.

    Returns:
        The comparison.

    Raises:
        ConfigError: The folder does not contain a finished comparison.

    Examples:
        >>> flexfleet.load_comparison("runs/compare-a").table
    """
    return Comparison(find_folder(comparison, "comparison.json"))


@dataclass(frozen=True)
class Paired:
    """Differences between two variants of a comparison in one metric. There is one difference a - b for each seed. The
    two runs with the same seed use the same data and partition, unless the variants' settings for these differ.

    Examples:
        >>> print(comparison.paired("flexfl", "heterofl"))
    """

    a: str
    b: str
    metric: str
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    """Differences in the unit of the metric. Accuracies are between 0 and 1, so 0.01 is one percentage point."""
    mean: float
    interval: tuple[float, float] | None
    """95 % confidence interval of the mean (Student's t). None if there is one seed or all differences are equal."""
    p: float | None
    """Two-sided p-value of the paired t test, which assumes normally distributed differences. None if `interval` is
    None."""
    p_holm: float | None
    """Value of `p`, adjusted by Holm's method for all pairs of variants. None if `interval` is None."""
    pairs: int
    """Number of pairs in which both variants have this metric."""

    def __str__(self) -> str:
        each = ", ".join(f"{value:+.4f}" for value in self.differences)
        text = f"{self.metric} of {self.a} - {self.b}: mean {self.mean:+.4f}"
        if self.interval is not None:
            text += f", 95 % interval [{self.interval[0]:+.4f}, {self.interval[1]:+.4f}]"
        if self.p is not None and self.p_holm is not None:
            text += f", {p_value(self.p)} (paired t)"
            text += f", {p_value(self.p_holm)} after Holm over {self.pairs} pairs" if self.pairs > 1 else ""
        text += f"; seeds {', '.join(map(str, self.seeds))}: {each}"
        return text if self.p is not None else f"{text}\nNo test: it needs two seeds with different differences."

    __repr__ = __str__


def paired(
    values: Mapping[str, Sequence[float | None]], seeds: Sequence[int], a: str, b: str, metric: str = "avg"
) -> Paired:
    """Compare two variants. `values` maps each label to a list with one value for each seed. A value is None if the run
    does not have the metric. Raises ConfigError if a label is unknown or its variant lacks the metric."""
    for label in (a, b):
        if label not in values:
            raise ConfigError(f"there is no variant {label!r} in this comparison{nearest(label, list(values))}")
        if None in values[label]:
            raise ConfigError(f"{label} has no {metric}. Choose another metric, such as metric='full'")
    if a == b:
        raise ConfigError(f"{a!r} cannot be compared with itself. Choose two different variants")
    known = {label: [v for v in found if v is not None] for label, found in values.items() if None not in found}
    tests = {pair: tested(known[pair[0]], known[pair[1]]) for pair in combinations(known, 2)}
    # A pair without a test gets p = 1.
    adjusted = dict(zip(tests, holm([1.0 if found is None else found.p for found in tests.values()]), strict=True))
    differences = tuple(x - y for x, y in zip(known[a], known[b], strict=True))
    mean, pair = fmean(differences), (a, b) if (a, b) in tests else (b, a)
    test = tests[pair]
    return Paired(
        a=a,
        b=b,
        metric=metric,
        seeds=tuple(seeds),
        differences=differences,
        mean=mean,
        interval=None if test is None else (mean - test.half, mean + test.half),
        p=None if test is None else test.p,
        p_holm=None if test is None else adjusted[pair],
        pairs=len(tests),
    )
