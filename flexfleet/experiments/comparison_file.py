"""comparison.json, the file with all figures of a comparison.

avg is the mean of the deciding metric (accuracy, R2) over the reported levels, full is its value for the largest model;
an algorithm of one level has no avg. Every figure is a mean over the seeds with the sample standard deviation (n - 1);
with one seed there is no deviation.
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
"""Figures of a run and of a label, where the server owns classes (`partition.server_classes`)."""
LOCAL = ("local_avg", "local_full")
"""Figures of a run and of a label, where the task has classes."""
CASE = ("dataset.", "partition.", "noise.", "model.name")
"""Runs that differ in one of these parameters belong to different cases: which label is first in one case says nothing
about another."""
FACTORS = (*CASE, "model.", "fleet.")
"""Parameters that make different cases if they are a factor. (A single row may have a width or a fleet of its own, as
papers' baselines have.)"""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Part):
    """The mean over the seeds, and the sample standard deviation if there are two or more."""

    mean: float
    std: float | None


class LabelScore(_Part):
    """The metric after one round of each run; avg is null for an algorithm that reports one level."""

    round: Spread
    """Counted from 1."""
    avg: Spread | None
    full: Spread


class Reached(_Part):
    """The first evaluated round in which the full model, or avg, has that accuracy, and the MB and seconds spent until
    its end, as means over the seeds that reach it. Null if no seed reaches it."""

    accuracy: float
    seeds: tuple[int, ...]
    """The seeds that reach it."""
    rounds: Spread | None
    mb: Spread | None
    """MB sent down and up."""
    mb_down: Spread | None = None
    """MB sent to the clients, and below it MB that came back; null in comparisons of older versions."""
    mb_up: Spread | None = None
    seconds: Spread | None
    seconds_simulated: Spread | None


class Highest(_Part):
    """The highest values within the first `share` % of the rounds (`measure.highest`); null if no run has one."""

    share: int
    avg: Spread | None
    full: Spread | None


class OneRun(_Part):
    seed: int
    run_id: str
    avg: float | None
    """This and the next: after the last round."""
    full: float
    rounds: int | None = None
    """The number of the last round, from 1; null in comparisons of older versions."""
    levels: dict[str, dict[str, float]] = {}
    """Each level's metrics after the last round, by their names; empty in comparisons of older versions."""
    avg_device_classes: float | None = None
    """This and the next three: the accuracy after the last round on the classes of the devices, and on those that the
    server alone owns; null where it owns none."""
    full_device_classes: float | None = None
    avg_server_classes: float | None = None
    full_server_classes: float | None = None
    devices: float | None = None
    """After the last round, the mean over the devices of what their own sub-model scores; null with one level."""
    local: dict[str, LocalScore] = {}
    """Each level's local accuracy after the last round: the mean and the standard deviation over the clients; empty
    where the task has no classes, and in older runs."""
    local_avg: float | None = None
    """The mean of the levels' local accuracies; null with one level."""
    local_full: float | None = None
    """The largest model's."""
    best: dict[str, float | None]
    """The round with the best avg, of those that were evaluated: its number from 1 as `round`, and `avg` and `full`,
    both of this round."""
    mb_down: float
    mb_up: float
    waste: float
    seconds: float
    seconds_simulated: float | None
    uniformity: float | None = None
    """This and the next five: means over the rounds (`fl_engine.fleet.uniformity`); null in older runs."""
    uniformity_answered: float | None = None
    uniformity_compute: float | None = None
    uniformity_communication: float | None = None
    uniformity_real: float | None = None
    time_variance: float | None = None
    phases: dict[str, float] = {}
    """Means over the rounds (`fl_engine.rounds.phases`); empty in older runs."""
    model_sha256: str
    mlflow_run_id: str | None


class LocalSpread(_Part):
    """A level's local accuracy: over the seeds, the `mean` over the clients, the standard deviation `sd` over the
    clients, and how many `clients` these are."""

    mean: Spread
    sd: Spread
    clients: Spread


class Summary(_Part):
    """All runs of one label. 1 MB is 1e6 bytes; waste is the share of the weights sent to clients that did not
    come back."""

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
    """The scores after the last round."""
    avg_device_classes: Spread | None = None
    """This and the next three: as `last`, on the classes of the devices, and on those that the server alone owns; null
    where it owns none."""
    full_device_classes: Spread | None = None
    avg_server_classes: Spread | None = None
    full_server_classes: Spread | None = None
    devices: Spread | None = None
    """As `last`, the mean over the devices of what their own sub-model scores; null with one level."""
    local: dict[str, LocalSpread] = {}
    """As `last`, each level's local accuracy (FedRolex, Tables 3.3 and 3.4); empty if a run has none."""
    local_avg: Spread | None = None
    """This and the next: as `avg` and `full` of `last`, of the local accuracies."""
    local_full: Spread | None = None
    best: LabelScore
    """The scores of the round with the best avg: avg and full both of this round, as FlexFL prints them. The round is
    chosen on test data, by each run for itself."""
    mb_down: Spread
    mb_up: Spread
    waste: Spread
    seconds: Spread
    """Measured seconds, also if other work ran on the machine."""
    seconds_simulated: Spread | None
    """Seconds on the fleet's devices; null if the simulated clock was not used."""
    uniformity: Spread | None = None
    """How evenly the clients of a round finish on the simulated clock, in seconds, the mean over the rounds; null if a
    run does not say it, as those of older versions. This and the next five: `fl_engine.fleet.uniformity`."""
    uniformity_answered: Spread | None = None
    uniformity_compute: Spread | None = None
    uniformity_communication: Spread | None = None
    uniformity_real: Spread | None = None
    """Null also where clients train side by side."""
    time_variance: Spread | None = None
    """In seconds squared."""
    phases: dict[str, Spread] = {}
    """What each phase of a round takes in seconds, on the server and on the simulated clock, and its bits down and up:
    means over the rounds, by the names of `fl_engine.rounds.phases`. What not every run says is left out."""
    reached: tuple[Reached, ...]
    reached_avg: tuple[Reached, ...] = ()
    """As `reached`, with avg in place of the full model; empty for an algorithm that reports one level."""
    highest: tuple[Highest, ...] = ()
    runs: tuple[OneRun, ...]


class Central(_Part, LeavesOut):
    """The reference: the same network, trained on all samples (`flexfleet central`), over the seeds given."""

    left_out = ("further",)
    seeds: tuple[int, ...]
    settings: dict[str, Any]
    """The parameters of `central`, by dotted names."""
    full: Spread
    """The metric after the last epoch."""
    best: Spread
    best_epoch: Spread
    highest: tuple[Highest, ...]
    """The highest values until given shares of the epochs."""
    seconds: Spread
    further: dict[str, Spread] = {}
    """The task's other metrics after the last epoch, by name; left out where it has none."""


class ComparisonFile(Artifact, LeavesOut):
    """comparison.json, and what `flexfleet compare --json` prints."""

    left_out = ("cases", "called")
    id: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    """The most that a run has: all have as many, unless the simulated clock ended some before."""
    metric: str = "accuracy"
    """The deciding metric; avg and full are its values."""
    settings: dict[str, Any]
    """What all runs have in common, by dotted names."""
    called: dict[str, str] = Field(default={})
    """By `dataset.name`, what a person calls data that were given in Python; else left out."""
    varied: tuple[str, ...] = ()
    """Parameters in which labels differ, without the algorithm's own, by dotted names."""
    differences: dict[str, dict[str, Any]] = Field(default={})
    """Where the rows differ, beside the algorithm (`comparisons.differences`): by an option's dotted name, its value in
    each label that has it."""
    results: dict[str, Summary]
    """The summary of each label."""
    first: dict[str, First] | None = None
    """Who is first, by the figures `avg`, `full`, `best_avg`, `best_full`, `local_avg` and `local_full`, as far as two
    labels have them; null with fewer than three seeds (no label is called first), with `cases`, and in older
    comparisons."""
    cases: tuple[RankedCase, ...] = ()
    """`first` of the labels with the same data, partition, noise and network, where labels differ in these and some do
    not; else left out, and with fewer than three seeds."""
    central: Central | None = None
    notes: tuple[str, ...] = ()
    mlflow_run_id: str | None = None


def cases_of(results: Mapping[str, Summary]) -> tuple[RankedCase, ...]:
    """Who is first in each case (`by_case`); empty with too few seeds."""
    found = [(case, firsts(by_seed({label: results[label] for label in case.labels}))) for case in by_case(results)]
    return tuple(case.model_copy(update={"first": first}) for case, first in found if first is not None)


def by_case(results: Mapping[str, Summary]) -> list[RankedCase]:
    """The labels of each case, `first` left empty; no case where all labels are of one, and where each is one of its
    own, so that the cases are what is compared."""
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
    """What `first.firsts` takes: of each figure and label, a value for each seed."""
    return {
        figure: {label: [figure_of(run, figure) for run in r.runs] for label, r in results.items()} for figure in TITLES
    }


def figure_of(run: OneRun, figure: str) -> float | None:
    """A figure of a run, by its name in MLflow; None where the run does not have it, or where it is not finite."""
    found = run.best[figure.removeprefix("best_")] if figure.startswith("best_") else getattr(run, figure)
    return None if found is None or not math.isfinite(found) else float(found)


def further(c: ComparisonFile) -> dict[str, dict[str, Spread]]:
    """By metric of the task beside the one that decides, and by label: the full model's value after the last round.
    Labels without it are left out."""
    found: dict[str, dict[str, Spread]] = {}
    for label, r in c.results.items():
        of_runs = [list(one.levels.values())[-1] if one.levels else {} for one in r.runs]
        for name in dict.fromkeys(name for each in of_runs for name in each if name not in (c.metric, *OWNERS)):
            if (each := spread([of_run.get(name) for of_run in of_runs])) is not None:
                found.setdefault(name, {})[label] = each
    return found


def spread(values: Sequence[float | None]) -> Spread | None:
    """The mean and deviation of the values; None if a run has no value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return Spread(mean=statistics.fmean(known), std=statistics.stdev(known) if len(known) > 1 else None)
