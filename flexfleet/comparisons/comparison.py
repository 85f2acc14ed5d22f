"""The figures of a comparison, read from finished run folders; nothing is measured again.

avg is the mean of the deciding metric (accuracy, R2) over the reported levels, full is its value for the largest model;
an algorithm of one level has no avg. Every figure is a mean over the seeds with the sample standard deviation (n - 1);
with one seed there is no deviation. Runs may differ only in their algorithm and in the parameters that the comparison
varies; other runs are refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from fl_engine.algorithms import CONTRACT
from fl_engine.core.errors import ConfigError
from fl_engine.fleet.uniformity import NAMES, of_a_run
from fl_engine.rounds import phases
from fl_engine.storage.checkpoints import Row
from fl_engine.training.evaluation import OWNERS
from fl_engine.training.numerics import differing
from flexfleet.comparisons.alike import is_shared, other_code, other_data, other_partitions, unequal
from flexfleet.comparisons.first import TITLES, Case, First, firsts
from flexfleet.config.entries import run_name
from flexfleet.files.artifacts import Artifact, LocalScore
from flexfleet.files.measure import SHARES, highest
from flexfleet.reports.report import Run, load, plain

MB = 1e6
STEPS = 20
"""Without given accuracies to reach, they are multiples of 1/20,"""
MOST_TARGETS = 4
"""and at most this many."""
BY_OWNER = ("avg_device_classes", "full_device_classes", "avg_server_classes", "full_server_classes")
"""Figures of a run and of a label, where the server owns classes (`partition.server_classes`)."""
LOCAL = ("local_avg", "local_full")
"""Figures of a run and of a label, where the task has classes."""
CASE = ("dataset.", "partition.", "noise.", "model.name")
"""Parameters that make another case: who is first in one says nothing of another."""
FACTORS = (*CASE, "model.", "fleet.")
"""Those that do so where they are a factor: a row alone may have a width or a fleet of its own, as papers' baselines
have."""
Runs = Mapping[str, Sequence[Run]]
"""The runs of each label, in the order of the seeds."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Spread(_Part):
    """The mean over the seeds, and the sample standard deviation if there are two or more."""

    mean: float
    std: float | None


class Score(_Part):
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
    last: Score
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
    best: Score
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


class Central(_Part):
    """The reference: the same network, trained on all samples (`flexfleet central`), over the seeds given."""

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

    @model_serializer(mode="wrap")
    def _as_ever(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if name != "further" or value}


class Comparison(Artifact):
    """comparison.json, and what `flexfleet compare --json` prints."""

    id: str
    labels: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    """The most that a run has: all have as many, unless the simulated clock ended some before."""
    metric: str = "accuracy"
    """The deciding metric; avg and full are its values."""
    settings: dict[str, Any]
    """What all runs have in common, by dotted names."""
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
    cases: tuple[Case, ...] = ()
    """`first` of the labels with the same data, partition, noise and network, where labels differ in these and some do
    not; else left out, and with fewer than three seeds."""
    central: Central | None = None
    notes: tuple[str, ...] = ()
    mlflow_run_id: str | None = None

    @model_serializer(mode="wrap")
    def _as_ever(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Comparisons without cases keep the keys that they had before there were any."""
        fields: dict[str, Any] = handler(self)
        return {name: value for name, value in fields.items() if name != "cases" or value}


# ------------------------------------------------------------------------------------------------ reading
def read(labels: Sequence[str], seeds: Sequence[int], folders: Mapping[str, Path], varied: Sequence[str] = ()) -> Runs:
    """Loads the runs; `folders` by run id, `varied`: parameters in which labels are to differ. Raises as `report.load`
    does, and ConfigError for runs that cannot be compared."""
    runs = {label: [load(folders[run_name(label, seed)]) for seed in seeds] for label in labels}
    for i, seed in enumerate(seeds):
        of_seed = {label: of_label[i] for label, of_label in runs.items()}
        wrong = [run.file.run_id for run in of_seed.values() if run.config.get("seed") != seed]
        if wrong:
            raise ConfigError(f"these runs are not of seed {seed}, though their names say so: {', '.join(wrong)}")
        if lines := unequal(of_seed, varied) or other_partitions(of_seed) + other_data(of_seed):
            known = ", ".join(("the algorithm", *own(varied)))
            raise ConfigError(f"the runs of seed {seed} differ in more than {known}: {'; '.join(lines)}")
    for label, of_label in runs.items():
        of_seeds = dict(zip(map("seed {}".format, seeds), of_label, strict=True))
        if lines := unequal(of_seeds, algorithm=False) or other_code(of_seeds) + other_data(of_seeds):
            raise ConfigError(f"the runs of {label} differ in more than the seed: {'; '.join(lines)}")
    return runs


def own(varied: Sequence[str]) -> list[str]:
    """The parameters that labels vary, without the algorithm's own."""
    return [key for key in varied if not key.startswith("algorithm.")]


def summarise(
    id: str,
    seeds: Sequence[int],
    runs: Runs,
    to: Sequence[float] = (),
    varied: Sequence[str] = (),
    at: Mapping[str, Mapping[str, Any]] | None = None,
) -> Comparison:
    """Computes the figures. `to`: accuracies to reach, default `default_targets`; `varied`: parameters in which labels
    are to differ; `at`: the labels' values of the factors."""
    any_run = next(iter(runs.values()))[0]
    targets = tuple(to) or default_targets(runs)
    numerics = [run.file.numerics for of_label in runs.values() for run in of_label]
    notes = []
    if any(differing(numerics[0], each) and differing(each, numerics[0]) for each in numerics):
        notes.append("the runs were computed with different numerics (machine, device or torch): see their run.json")
    notes += [f"{label}: {work}, others as the section training says" for label, work in local_work(runs).items()]
    results = {
        label: _summary(seeds, of_label, targets, own(varied), (at or {}).get(label, {}))
        for label, of_label in runs.items()
    }
    cases = cases_of(results)
    return Comparison(
        id=id,
        labels=tuple(runs),
        seeds=tuple(seeds),
        rounds=max(len(run.rows) for of_label in runs.values() for run in of_label),
        metric=any_run.evaluation.metric,
        settings={
            k: v
            for k, v in any_run.config.items()
            if is_shared(k) and k not in varied and not k.startswith("algorithm")
        },
        varied=tuple(own(varied)),
        results=results,
        first=None if cases else firsts(by_seed(results)),
        cases=cases,
        notes=tuple(notes),
    )


def cases_of(results: Mapping[str, Summary]) -> tuple[Case, ...]:
    """Who is first in each case (`by_case`); empty with too few seeds."""
    found = [(case, firsts(by_seed({label: results[label] for label in case.labels}))) for case in by_case(results)]
    return tuple(case.model_copy(update={"first": first}) for case, first in found if first is not None)


def by_case(results: Mapping[str, Summary]) -> list[Case]:
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
    return [Case(settings=settings[labels[0]], labels=tuple(labels), first={}) for labels in groups.values()]


def by_seed(results: Mapping[str, Summary]) -> dict[str, dict[str, list[float | None]]]:
    """What `first.firsts` takes: of each figure and label, a value for each seed."""
    return {
        figure: {label: [figure_of(run, figure) for run in r.runs] for label, r in results.items()} for figure in TITLES
    }


def figure_of(run: OneRun, figure: str) -> float | None:
    """A figure of a run, by its name in MLflow; None where the run does not have it, or where it is not finite."""
    found = run.best[figure.removeprefix("best_")] if figure.startswith("best_") else getattr(run, figure)
    return None if found is None or not math.isfinite(found) else float(found)


def local_work(runs: Runs) -> dict[str, str]:
    """By label, what its algorithm declares of its clients' work (`local_work`), where that is not what the section
    `training` says."""
    out = {}
    for label, of_label in runs.items():
        with suppress(ConfigError):  # an algorithm of one's own that is not here any more
            kind = CONTRACT.kind(str(of_label[0].config.get("algorithm.name")))
            if told := getattr(kind, "local_work", None):
                out[label] = str(told)
    return out


def _summary(
    seeds: Sequence[int],
    runs: Sequence[Run],
    targets: Sequence[float],
    varied: Sequence[str],
    at: Mapping[str, Any],
) -> Summary:
    each = [_one(seed, run) for seed, run in zip(seeds, runs, strict=True)]
    best = [one.best for one in each]
    prefix = "algorithm."
    settings = {k.removeprefix(prefix): v for k, v in runs[0].config.items() if k.startswith(prefix)}
    return Summary(
        algorithm=runs[0].pool.algorithm,
        settings={k: v for k, v in settings.items() if k != "name"},
        varied={key: runs[0].settings.get(key) for key in varied},
        at=dict(at),
        levels=tuple(statistics.fmean(sizes) for sizes in zip(*map(_sizes, runs), strict=True)),
        last=Score(
            round=_sure([len(run.rows) for run in runs]),
            avg=spread([one.avg for one in each]),
            full=_sure([one.full for one in each]),
        ),
        best=Score(
            round=_sure([run.best.round + 1 for run in runs]),
            avg=spread([b["avg"] for b in best]),
            full=_sure([run.best.metrics["full"] for run in runs]),
        ),
        **{name: spread([getattr(one, name) for one in each]) for name in (*BY_OWNER, "devices", *LOCAL)},
        local=_local(each),
        mb_down=_sure([one.mb_down for one in each]),
        mb_up=_sure([one.mb_up for one in each]),
        waste=_sure([one.waste for one in each]),
        seconds=_sure([one.seconds for one in each]),
        seconds_simulated=spread([one.seconds_simulated for one in each]),
        **{name: spread([getattr(one, name) for one in each]) for name in NAMES},
        phases=_phases(each),
        reached=tuple(reached(seeds, [run.rows for run in runs], target) for target in targets),
        reached_avg=()
        if any(run.single for run in runs)
        else tuple(reached(seeds, [run.rows for run in runs], target, "avg") for target in targets),
        highest=tuple(_highest(runs)),
        runs=tuple(each),
    )


def _one(seed: int, run: Run) -> OneRun:
    local = run.evaluation.local
    return OneRun(
        seed=seed,
        run_id=run.file.run_id,
        avg=None if run.single else run.evaluation.avg,
        full=run.evaluation.full,
        rounds=len(run.rows),
        levels={name: dict(score.metrics) for name, score in run.evaluation.levels.items()},
        **_by_owner(run),
        devices=run.rows[-1].metrics.get(f"{run.evaluation.metric}_devices"),
        local=local,
        local_avg=None if run.single or not local else statistics.fmean(each.mean for each in local.values()),
        local_full=local[run.pool.levels[-1].name].mean if local else None,
        best={
            "round": run.best.round + 1,
            "avg": None if run.single else run.best.metrics["avg"],
            "full": run.best.metrics["full"],
        },
        mb_down=run.bytes_down / MB,
        mb_up=run.bytes_up / MB,
        waste=run.waste,
        seconds=run.history.seconds,
        seconds_simulated=simulated(run.rows),
        **of_a_run([row.metrics for row in run.rows]),
        phases=phases.of_a_run([row.metrics for row in run.rows]),
        model_sha256=run.history.model_sha256,
        mlflow_run_id=run.file.mlflow_run_id,
    )


def _by_owner(run: Run) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for metric, levels in run.evaluation.by_owner.items():
        owner = metric.removeprefix("accuracy_")
        found[f"avg_{owner}"] = None if run.single else statistics.fmean(levels.values())
        found[f"full_{owner}"] = levels[run.pool.levels[-1].name]
    return found


def _local(runs: Sequence[OneRun]) -> dict[str, LocalSpread]:
    levels = [name for name in runs[0].local if all(name in one.local for one in runs)]
    return {
        name: LocalSpread(
            mean=_sure([one.local[name].mean for one in runs]),
            sd=_sure([one.local[name].sd for one in runs]),
            clients=_sure([one.local[name].clients for one in runs]),
        )
        for name in levels
    }


def _phases(runs: Sequence[OneRun]) -> dict[str, Spread]:
    found = {name: spread([one.phases.get(name) for one in runs]) for name in phases.NAMES}
    return {name: each for name, each in found.items() if each is not None}


def _highest(runs: Sequence[Run]) -> Iterator[Highest]:
    rounds = [[row.metrics for row in run.rows] for run in runs]
    avg = [{} if run.single else highest(each, "avg") for run, each in zip(runs, rounds, strict=True)]
    full = [highest(each, "full") for each in rounds]
    for until in SHARES:
        yield Highest(
            share=until,
            avg=spread([of_run.get(until) for of_run in avg]),
            full=spread([of_run[until] for of_run in full]),
        )


def further(c: Comparison) -> dict[str, dict[str, Spread]]:
    """By metric of the task beside the one that decides, and by label: the full model's value after the last round.
    Labels without it are left out."""
    found: dict[str, dict[str, Spread]] = {}
    for label, r in c.results.items():
        of_runs = [list(one.levels.values())[-1] if one.levels else {} for one in r.runs]
        for name in dict.fromkeys(name for each in of_runs for name in each if name not in (c.metric, *OWNERS)):
            if (each := spread([of_run.get(name) for of_run in of_runs])) is not None:
                found.setdefault(name, {})[label] = each
    return found


# ------------------------------------------------------------------------------------- accuracies to reach
def default_targets(runs: Runs) -> tuple[float, ...]:
    """The highest multiples of 5 % that the full model of at least one run exceeds."""
    scored = [row.metrics["full"] for of_label in runs.values() for run in of_label for row in _scored(run.rows)]
    return tuple(k / STEPS for k in range(1, STEPS) if k / STEPS < max(scored))[-MOST_TARGETS:]


def reached(seeds: Sequence[int], runs: Sequence[Sequence[Row]], accuracy: float, of: str = "full") -> Reached:
    """Means over the runs (one for each seed) in which `of`, full or avg, reaches the accuracy."""
    pairs = zip(seeds, runs, strict=True)
    until = {seed: rows[: n + 1] for seed, rows in pairs if (n := first(rows, accuracy, of)) >= 0}
    spent = list(until.values())
    return Reached(
        accuracy=accuracy,
        seeds=tuple(until),
        rounds=spread([len(rows) for rows in spent]),
        mb=spread([sum(sent(rows)) / MB for rows in spent]),
        mb_down=spread([sum(row.metrics["bytes_down"] for row in rows) / MB for rows in spent]),
        mb_up=spread([sum(row.metrics["bytes_up"] for row in rows) / MB for rows in spent]),
        seconds=spread([sum(row.metrics["seconds_round"] for row in rows) for rows in spent]),
        seconds_simulated=spread([simulated(rows) for rows in spent]),
    )


def first(rows: Sequence[Row], accuracy: float, of: str = "full") -> int:
    """Index of the first evaluated round in which `of`, full or avg, has that accuracy; -1 if there is none."""
    return next((row.round for row in rows if of in row.metrics and row.metrics[of] >= accuracy), -1)


def sent(rows: Sequence[Row]) -> list[float]:
    """Bytes down and up in each round."""
    return [row.metrics["bytes_down"] + row.metrics["bytes_up"] for row in rows]


def simulated(rows: Sequence[Row]) -> float | None:
    """Seconds of the rounds on the fleet's devices; None if a round has no simulated time. A round in which no client
    trained takes no time."""
    totals = _clock(rows)
    return None if len(totals) < len(rows) else totals[-1] if totals else 0.0


def _clock(rows: Sequence[Row]) -> list[float]:
    """The simulated seconds until the end of each round, up to the first that has no simulated time."""
    totals, total = [], 0.0
    for row in rows:
        seconds = row.metrics.get("seconds_simulated", None if row.metrics["clients_trained"] else 0.0)
        if seconds is None:
            break
        total += seconds
        totals.append(total)
    return totals


# -------------------------------------------------------------------------------------------- over the seeds
def _sizes(run: Run) -> list[float]:
    return [100 * level.share for level in run.pool.levels if level.reported]


def spread(values: Sequence[float | None]) -> Spread | None:
    """The mean and deviation of the values; None if a run has no value."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known or len(known) < len(values):
        return None
    return Spread(mean=statistics.fmean(known), std=statistics.stdev(known) if len(known) > 1 else None)


def _sure(values: Sequence[float]) -> Spread:
    known = spread(values)
    assert known is not None, "a comparison has at least one seed"
    return known


def _scored(rows: Sequence[Row]) -> Iterator[Row]:
    return (row for row in rows if "full" in row.metrics)


# ------------------------------------------------------------------------------------------------- curves
def curve(runs: Sequence[Run], key: str) -> list[tuple[int, float, list[float]]]:
    """For every round in which all runs were scored: its number from 1, mean MB sent so far, and each run's
    accuracy. Where the simulated clock ended some runs before others, up to the shortest run's last round."""
    totals = [list(accumulate(sent(run.rows))) for run in runs]
    points = []
    for i, rows in enumerate(zip(*(run.rows for run in runs), strict=False)):
        if all(key in row.metrics for row in rows):
            mb = statistics.fmean(total[i] for total in totals) / MB
            points.append((i + 1, mb, [row.metrics[key] for row in rows]))
    return points


def clock(runs: Sequence[Run], key: str) -> list[float]:
    """Beside each point of `curve`: the mean seconds on the simulated clock so far; empty if a run has no such
    clock."""
    totals = [_clock(run.rows) for run in runs]
    if any(len(total) < len(run.rows) for total, run in zip(totals, runs, strict=True)):
        return []
    return [statistics.fmean(total[number - 1] for total in totals) for number, _, _ in curve(runs, key)]
