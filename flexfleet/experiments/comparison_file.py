"""comparison.json, the file with all figures of a comparison.

avg is the mean of the deciding metric (accuracy, R2) over the reported levels, and full its value for the largest
model. An algorithm of one level has no avg.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fl_engine.core.fields import LeavesOut
from fl_engine.training.evaluation import OWNERS
from flexfleet.experiments.ranking import TITLES, First, RankedCase, firsts
from flexfleet.files.artifacts import Artifact, LocalScore
from flexfleet.reports.report import plain

MB = 1e6
BY_OWNER = ("avg_device_classes", "full_device_classes", "avg_server_classes", "full_server_classes")
"""Figures of a run and of a label if the server owns classes (`partition.server_classes`)."""
LOCAL = ("local_avg", "local_full")
"""Figures of a run and of a label if the task has classes."""
CASE = ("dataset.", "partition.", "noise.", "model.name")
"""Runs that differ in one of these parameters belong to different cases, which are ranked separately."""
FACTORS = (*CASE, "model.", "fleet.")
"""Parameters that make different cases if they are a factor. A single row may have its own width or fleet, as papers'
baselines have."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Part):
    """The mean over the seeds, and the sample standard deviation if there are two or more seeds."""

    mean: float
    std: float | None


class LabelScore(_Part):
    """The metric after one round of each run; avg is null for an algorithm that reports one level."""

    round: Spread
    """Counted from 1."""
    avg: Spread | None
    full: Spread


class Reached(_Part):
    """The first evaluated round in which full, or avg, has that accuracy, and the cost up to the end of that round.

    All figures are means over the seeds that reach the accuracy, and null if no seed does. MB were sent to the clients
    (down) and came back (up).
    """

    accuracy: float
    seeds: tuple[int, ...]
    """The seeds that reach it."""
    rounds: Spread | None
    mb: Spread | None
    mb_down: Spread | None = None
    mb_up: Spread | None = None
    seconds: Spread | None
    seconds_simulated: Spread | None


class Highest(_Part):
    """The highest values within the first `share` % of the rounds (`measure.highest`); null if no run has one."""

    share: int
    avg: Spread | None
    full: Spread | None


class OneRun(_Part):
    """The figures of one run: after the last round, unless their name says otherwise."""

    seed: int
    run_id: str
    avg: float | None
    full: float
    rounds: int = 0
    levels: dict[str, dict[str, float]] = {}
    """Each level's metrics, by their names."""
    avg_device_classes: float | None = None
    """This and the next three: the accuracy on the classes of the devices, and on the classes that the server alone
    owns; null if the server owns none."""
    full_device_classes: float | None = None
    avg_server_classes: float | None = None
    full_server_classes: float | None = None
    devices: float | None = None
    """The mean over the devices of the score of each device's own sub-model; null with one level."""
    local: dict[str, LocalScore] = {}
    """Each level's local accuracy: mean and standard deviation over the clients; empty if the task has no classes."""
    local_avg: float | None = None
    """The mean of the levels' local accuracies; null with one level."""
    local_full: float | None = None
    best: dict[str, float | None]
    """The evaluated round with the best avg: its number from 1 as `round`, and `avg` and `full` of this round."""
    mb_down: float
    mb_up: float
    waste: float
    seconds: float
    seconds_simulated: float | None
    uniformity: float | None = None
    """This and the next five: means over the rounds (`fl_engine.fleet.uniformity`); null if they were not measured."""
    uniformity_answered: float | None = None
    uniformity_compute: float | None = None
    uniformity_communication: float | None = None
    uniformity_real: float | None = None
    time_variance: float | None = None
    phases: dict[str, float] = {}
    """Means over the rounds (`fl_engine.rounds.phases`)."""
    model_sha256: str
    mlflow_run_id: str | None


class LocalSpread(_Part):
    """A level's local accuracy over the seeds: mean and standard deviation `sd` over the clients, and their number."""

    mean: Spread
    sd: Spread
    clients: Spread


class Summary(_Part):
    """All runs of one label. 1 MB is 1e6 bytes; waste is the share of the weights sent to clients that did not come
    back. A figure is null if a run does not have it; figures without a description are those of OneRun."""

    algorithm: str
    settings: dict[str, Any]
    """The algorithm's hyper-parameters that were set."""
    varied: dict[str, Any] = {}
    """The label's values of the parameters in the comparison's `varied`."""
    at: dict[str, Any] = {}
    """The label's values of the factors (`flexfleet compare --over`), by dotted name."""
    levels: tuple[float, ...]
    """Sizes of the reported models in % of the full model, mean over the seeds."""
    last: LabelScore
    best: LabelScore
    """The scores of the round with the best avg, as FlexFL prints them. Each run chooses its round on test data."""
    avg_device_classes: Spread | None = None
    full_device_classes: Spread | None = None
    avg_server_classes: Spread | None = None
    full_server_classes: Spread | None = None
    devices: Spread | None = None
    local: dict[str, LocalSpread] = {}
    """Each level's local accuracy (FedRolex, Tables 3.3 and 3.4)."""
    local_avg: Spread | None = None
    local_full: Spread | None = None
    mb_down: Spread
    mb_up: Spread
    waste: Spread
    seconds: Spread
    """Measured seconds, also if other work ran on the machine."""
    seconds_simulated: Spread | None
    """Seconds on the fleet's devices; null if the simulated clock was not used."""
    uniformity: Spread | None = None
    uniformity_answered: Spread | None = None
    uniformity_compute: Spread | None = None
    uniformity_communication: Spread | None = None
    uniformity_real: Spread | None = None
    time_variance: Spread | None = None
    phases: dict[str, Spread] = {}
    """The phases that every run measured."""
    reached: tuple[Reached, ...]
    reached_avg: tuple[Reached, ...] = ()
    """As `reached`, with avg in place of full; empty for an algorithm that reports one level."""
    highest: tuple[Highest, ...] = ()
    runs: tuple[OneRun, ...]


class Central(_Part, LeavesOut):
    """The reference: the same network, trained on all samples (`flexfleet central`), over its own seeds."""

    left_out = ("further",)
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """The parameters of `central`, by dotted names."""
    full: Spread
    """The metric after the last epoch."""
    best: Spread
    best_epoch: Spread
    highest: tuple[Highest, ...]
    """The highest values within given shares of the epochs."""
    seconds: Spread
    further: dict[str, Spread] = {}
    """The task's other metrics after the last epoch, by name."""


class ComparisonFile(Artifact, LeavesOut):
    """comparison.json, and what `flexfleet compare --json` prints."""

    left_out = ("cases", "called")
    id: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    """The longest run's number of rounds. The simulated clock may end other runs earlier."""
    metric: str = "accuracy"
    """The deciding metric; avg and full are its values."""
    settings: dict[str, Any]
    """What all runs have in common, by dotted names."""
    called: dict[str, str] = Field(default={})
    """Map `dataset.name` to the name for people of data that were given in Python."""
    varied: tuple[str, ...] = ()
    """Parameters in which labels differ, without the algorithm's own, by dotted names."""
    differences: dict[str, dict[str, Any]] = Field(default={})
    """Options in which the rows differ, besides the algorithm (`row_differences`): by dotted name, the value of each
    label that has the option."""
    results: dict[str, Summary]
    """The summary of each label."""
    first: dict[str, First] | None = None
    """Which label is first, by the figures of `ranking.TITLES` that two labels have. Null with fewer than three seeds,
    and with `cases`."""
    cases: tuple[RankedCase, ...] = ()
    """`first` among the labels with the same data, partition, noise and network, if labels differ in these."""
    central: Central | None = None
    notes: tuple[str, ...] = ()
    mlflow_run_id: str | None = None


def cases_of(results: Mapping[str, Summary]) -> tuple[RankedCase, ...]:
    """Return the label that is first in each case (`by_case`); empty with too few seeds."""
    found = [(case, firsts(by_seed({label: results[label] for label in case.labels}))) for case in by_case(results)]
    return tuple(case.model_copy(update={"first": first}) for case, first in found if first is not None)


def by_case(results: Mapping[str, Summary]) -> list[RankedCase]:
    """Group the labels into cases, without `first`. Empty if all labels belong to one case, or each to its own: then
    the cases themselves are compared."""
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
    """Return the argument of `ranking.firsts`: for each figure and label, a value for each seed."""
    return {
        figure: {label: [figure_of(run, figure) for run in r.runs] for label, r in results.items()} for figure in TITLES
    }


def figure_of(run: OneRun, figure: str) -> float | None:
    """Return a run's figure by its name in MLflow; None if the run does not have it, or if it is not finite."""
    found = run.best[figure.removeprefix("best_")] if figure.startswith("best_") else getattr(run, figure)
    return None if found is None or not math.isfinite(found) else float(found)


def further(c: ComparisonFile) -> dict[str, dict[str, Spread]]:
    """Map each of the task's other metrics to the labels that have it: the full model's value after the last round."""
    levels = [level for r in c.results.values() for one in r.runs for level in one.levels.values()]
    names = dict.fromkeys(name for level in levels for name in level if name not in (c.metric, *OWNERS))
    found = {name: {label: further_of(r, name) for label, r in c.results.items()} for name in names}
    known = {name: {label: one for label, one in each.items() if one is not None} for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def further_of(r: Summary, metric: str) -> Spread | None:
    """Return one of the task's other metrics: the full model's value after the last round."""
    return spread([list(one.levels.values())[-1].get(metric) for one in r.runs])


def spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and sample standard deviation; None if a value is missing or not finite."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return Spread(mean=statistics.fmean(known), std=statistics.stdev(known) if len(known) > 1 else None)
