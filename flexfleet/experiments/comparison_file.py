"""Define the format of comparison.json, which contains all results of a comparison.

avg is the mean of the main metric (such as accuracy or R2) over the reported levels. full is the metric of the
largest model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from pydantic import Field

from fl_engine.core.fields import LeavesOut
from fl_engine.core.records import Strict
from fl_engine.training.evaluation import OWNERS
from flexfleet.experiments.ranking import TITLES, First, RankedCase, firsts
from flexfleet.files.artifacts import Artifact, LocalScore
from flexfleet.reports.finished_run import plain

MB = 1e6
CASE = ("dataset.", "partition.", "noise.", "model.name")
"""Prefixes of the parameters that define the case (data and network) of a variant. Each case has its own ranking."""
FACTORS = (*CASE, "model.", "fleet.")
"""Prefixes of factors (`flexfleet compare --over`) that define cases. Width and fleet define cases only if they are
factors, because papers use another width or fleet for some baselines."""


class Spread(Strict):
    """Mean and sample standard deviation over the seeds. The standard deviation is null if there is only one seed."""

    mean: float
    std: float | None


class LabelScore(Strict):
    """Mean scores of a variant after one round, such as the last round."""

    round: Spread
    """Number of the round, counted from 1."""
    avg: Spread
    full: Spread


class Reached(Strict):
    """Cost of all rounds up to the first evaluated round in which full (or avg) is at least `accuracy`.

    Each value is a mean over the runs that reach the accuracy; null if no run reaches the accuracy. `mb_down` counts
    data sent to the clients, and `mb_up` counts data received from the clients.
    """

    accuracy: float
    seeds: tuple[int, ...]
    """Seeds of the runs that reach the accuracy."""
    rounds: Spread | None
    mb: Spread | None
    mb_down: Spread | None = None
    mb_up: Spread | None = None
    seconds: Spread | None
    seconds_simulated: Spread | None
    joules: Spread | None = None


class Highest(Strict):
    """Highest avg and full in the first `share` percent of the rounds. A field is null if a run lacks the value."""

    share: int
    avg: Spread | None
    full: Spread | None


T = TypeVar("T")


class Figures(Strict, Generic[T]):
    """Metrics of one run, or the mean and standard deviation of each metric over the seeds.

    Accuracies are measured after the last round. A metric is null if it was not measured in every run. 1 MB is 1e6
    bytes. `waste` is the fraction of the sent weights that clients did not return. `seconds` is wall-clock time and
    therefore depends on the load of the machine. `seconds_simulated` is the time on the simulated clock.
    """

    avg_device_classes: T | None = None
    """Accuracy on test samples of the devices' classes. The fields `*_server_classes` contain the accuracy on test
    samples of the server's classes. The four fields are null unless `partition.server_classes` is set."""
    full_device_classes: T | None = None
    avg_server_classes: T | None = None
    full_server_classes: T | None = None
    devices: T | None = None
    """Score of each device's own sub-model, averaged over the devices. Null if the pool has only one level."""
    local_avg: T | None = None
    """Mean local accuracy of the levels; null if the task has no classes."""
    local_full: T | None = None
    clients_mean: T | None = None
    """Main metric on each client's held-out samples, averaged over the clients. The next three fields are the 10th
    percentile, the worst value and the standard deviation over the clients. The four fields are null unless
    `evaluate.on` is `clients`."""
    clients_p10: T | None = None
    clients_worst: T | None = None
    clients_spread: T | None = None
    mb_down: T
    mb_up: T
    waste: T
    clients_failed: T | None = None
    """Number of failed updates of all rounds."""
    seconds: T
    seconds_simulated: T | None
    joules: T | None = None
    """Energy of the clients on the simulated clock; null if the tiers have no `watts`."""
    uniformity: T | None = None
    """This field and the next five are timing metrics (`fl_engine.rounds.timing`), averaged over the rounds. A field is
    null if the metric was not measured."""
    uniformity_answered: T | None = None
    uniformity_compute: T | None = None
    uniformity_communication: T | None = None
    uniformity_real: T | None = None
    time_variance: T | None = None


class OneRun(Figures[float]):
    """Results of one run."""

    seed: int
    run_id: str
    avg: float
    full: float
    rounds: int = 0
    levels: dict[str, dict[str, float]] = Field(default={})
    """Map each level to a mapping from metric names to values."""
    local: dict[str, LocalScore] = Field(default={})
    """Map each level to its local accuracy. Empty if the task does not have classes."""
    best: dict[str, float]
    """Values of `round`, `avg` and `full` in the evaluated round with the highest avg. Rounds are counted from 1."""
    phases: dict[str, float] = Field(default={})
    """Further timing metrics (`timing.NAMES`), averaged over the rounds."""
    model_sha256: str
    mlflow_run_id: str | None


class LocalSpread(Strict):
    """Local accuracy of a level. Mean and standard deviation (`sd`) over the clients are averaged over the seeds."""

    mean: Spread
    sd: Spread
    clients: Spread


class Summary(Figures[Spread]):
    """Results of all runs of one variant."""

    algorithm: str
    settings: dict[str, Any]
    """Values of the algorithm's hyper-parameters that the user has set."""
    varied: dict[str, Any] = Field(default={})
    """Map the parameters in `ComparisonFile.varied` to the values of this variant."""
    at: dict[str, Any] = Field(default={})
    """Map factors (`flexfleet compare --over`) to the values of this variant."""
    kept_by_clients: tuple[str, ...] = ()
    """Model parameters that differ between clients. In the evaluated model, they have their initial values."""
    levels: tuple[float, ...]
    """Sizes of the reported models in percent of the full model, as means over the seeds."""
    last: LabelScore
    best: LabelScore
    """Scores in the round with the highest avg on the test data, as reported in the FlexFL paper."""
    local: dict[str, LocalSpread] = Field(default={})
    """Map each level to its local accuracy (FedRolex, Tables 3.3 and 3.4)."""
    phases: dict[str, Spread] = Field(default={})
    """Timing metrics that were measured in all runs, averaged over the seeds."""
    reached: tuple[Reached, ...]
    reached_avg: tuple[Reached, ...]
    """Cost until avg reaches each target accuracy. The field `reached` contains the same values for full."""
    highest: tuple[Highest, ...] = ()
    runs: tuple[OneRun, ...]


class Central(Strict, LeavesOut):
    """Results of the reference, which is the same network trained on all samples (`flexfleet central`)."""

    left_out = ("further",)
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """Map dotted names of the parameters in the section `central` to values."""
    full: Spread
    """Main metric after the last epoch."""
    best: Spread
    best_epoch: Spread
    highest: tuple[Highest, ...]
    """Highest metric values in the first 50, 80 and 100 percent of the epochs."""
    seconds: Spread
    further: dict[str, Spread] = Field(default={})
    """Map each further metric of the task to its value after the last epoch."""


class ComparisonFile(Artifact, LeavesOut):
    """Contents of comparison.json, which `flexfleet compare --json` also prints."""

    left_out = ("cases", "called")
    id: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    """Number of rounds of the longest run. The simulated clock can end other runs earlier."""
    metric: str = "accuracy"
    """Main metric of the task, from which avg and full are computed."""
    settings: dict[str, Any]
    """Map the dotted names of settings that are the same in all runs to the settings' values."""
    called: dict[str, str] = Field(default={})
    """Map internal names of data sets to display names, for data sets that were passed as Python objects."""
    varied: tuple[str, ...] = ()
    """Dotted names of the parameters that differ between variants. Parameters of the algorithm are excluded."""
    differences: dict[str, dict[str, Any]] = Field(default={})
    """Options that differ between variants, as {dotted name: {label: value}}. The algorithm's name is excluded."""
    results: dict[str, Summary]
    """Map the label of each variant to its results."""
    first: dict[str, First] | None = None
    """Map each metric in `ranking.TITLES` to the ranking of the variants by this metric. Null if there are fewer than
    three seeds, or if there are several cases."""
    cases: tuple[RankedCase, ...] = ()
    """Cases, each with the ranking of its variants. Empty if all variants belong to one case."""
    central: Central | None = None
    notes: tuple[str, ...] = ()
    mlflow_run_id: str | None = None


def cases_of(results: Mapping[str, Summary]) -> tuple[RankedCase, ...]:
    """Return the cases from `by_case` with rankings of their variants. Empty if there are too few seeds."""
    found = [(case, firsts(by_seed({label: results[label] for label in case.labels}))) for case in by_case(results)]
    return tuple(case.model_copy(update={"first": first}) for case, first in found if first is not None)


def by_case(results: Mapping[str, Summary]) -> list[RankedCase]:
    """Group the variants into cases without ranking them. The list is empty if all variants belong to one case. It is
    also empty if each case has only one variant, because such a comparison compares the cases."""
    groups: dict[str, list[str]] = {}
    settings = {
        label: {key: value for key, value in r.varied.items() if key.startswith(CASE)}
        | {key: value for key, value in r.at.items() if key.startswith(FACTORS)}
        for label, r in results.items()
    }
    for label in results:
        groups.setdefault(plain(settings[label]), []).append(label)
    if len(groups) in (1, len(results)):
        return []
    return [RankedCase(settings=settings[labels[0]], labels=tuple(labels), first={}) for labels in groups.values()]


def by_seed(results: Mapping[str, Summary]) -> dict[str, dict[str, list[float | None]]]:
    """Return {metric: {label: list of one value for each seed}}, as `ranking.firsts` expects."""
    return {
        figure: {label: [figure_of(run, figure) for run in r.runs] for label, r in results.items()} for figure in TITLES
    }


def figure_of(run: OneRun, figure: str) -> float | None:
    """Return the value of the metric `figure` (a name in MLflow). None if the run does not have the metric."""
    return run.best[figure.removeprefix("best_")] if figure.startswith("best_") else getattr(run, figure)


def further(c: ComparisonFile) -> dict[str, dict[str, Spread]]:
    """Return {metric: {label: value of the full model after the last round}} for all metrics except the main metric."""
    levels = [level for r in c.results.values() for one in r.runs for level in one.levels.values()]
    names = dict.fromkeys(name for level in levels for name in level if name not in (c.metric, *OWNERS))
    found = {name: {label: further_of(r, name) for label, r in c.results.items()} for name in names}
    known = {name: {label: one for label, one in each.items() if one is not None} for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def further_of(r: Summary, metric: str) -> Spread | None:
    """Return mean and standard deviation over the seeds of the full model's `metric` after the last round."""
    return spread([list(one.levels.values())[-1].get(metric) for one in r.runs])


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return the mean and the sample standard deviation. None if a value is missing or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return Spread(mean=statistics.fmean(known), std=statistics.stdev(known) if len(known) > 1 else None)


def known_spread(values: Sequence[float | None]) -> Spread:
    """Return the mean and the sample standard deviation of a metric that was measured in every run."""
    found = spread(values)
    assert found is not None, "every run has this metric"
    return found
