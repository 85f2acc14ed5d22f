"""Compute the results of a comparison, including the simulated time and the cost to reach target accuracies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from fl_engine.core.errors import ConfigError
from fl_engine.data.local_data import LOCAL
from fl_engine.rounds import timing
from fl_engine.storage.checkpoints import Row
from fl_engine.training.numerics import differing
from flexfleet.config import comparison_runs, flatten
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments.comparison_file import (
    MB,
    Central,
    ComparisonFile,
    Figures,
    Highest,
    LabelScore,
    LocalSpread,
    OneRun,
    Reached,
    Summary,
    by_seed,
    cases_of,
    known_spread,
    spread,
)
from flexfleet.experiments.ranking import firsts
from flexfleet.files.artifacts import RunFile, RunResult
from flexfleet.files.measure import SHARES, highest
from flexfleet.files.run_folder import check_manifest
from flexfleet.pipeline.central import CentralFile
from flexfleet.pipeline.pretrain import shared_settings
from flexfleet.reports import plots
from flexfleet.reports.finished_run import FinishedRun, is_compared, load

STEPS = 20
"""Default target accuracies are multiples of 1 / STEPS."""
MOST_TARGETS = 4
"""Maximum number of default target accuracies."""
COMMON = ("dataset.", "model.")
"""Prefixes of parameters that must have the same values in the central training and in the compared runs."""
Runs = Mapping[str, Sequence[FinishedRun]]
"""Map the label of each variant to its runs, in the order of the seeds."""


# ------------------------------------------------------------------------------------------------ reading the runs
def read(entries: Sequence[PlannedRun], folders: Mapping[str, Path]) -> Runs:
    """Load the finished runs. `folders` maps run IDs to run folders. Raises the errors of `load`, and ConfigError if
    runs with the same settings have different partitions or data."""
    runs: dict[str, list[FinishedRun]] = {}
    first: dict[str, RunFile] = {}
    for entry in entries:
        run = load(folders[entry.name])
        runs.setdefault(entry.label, []).append(run)
        known = first.setdefault(repr(sorted(shared_settings(run.config).items())), run.file)
        if run.file.partition_sha256 != known.partition_sha256:
            raise ConfigError(
                f"{known.run_id} and {entry.name} must have the same partition, got the sha256 "
                f"{known.partition_sha256[:12]} and {run.file.partition_sha256[:12]}. Choose another --id",
                code="config.not_comparable",
            )
    return runs


# ------------------------------------------------------------------------------------------------ the figures
def summarise(id: str, entries: Sequence[PlannedRun], runs: Runs, to: Sequence[float] = ()) -> ComparisonFile:
    """Compute the results of a comparison. `to` are target accuracies; if empty, `default_targets` are used."""
    all_runs = [run for of_label in runs.values() for run in of_label]
    first, targets, at = all_runs[0], tuple(to) or default_targets(runs), {entry.label: entry.at for entry in entries}
    varied = tuple(key for key in comparison_runs.varied(entries) if not key.startswith("algorithm."))
    notes: list[str] = []
    numerics = [run.file.numerics for run in all_runs]
    if any(differing(numerics[0], each) and differing(each, numerics[0]) for each in numerics):
        notes.append("the runs were computed with different numerics (machine, device or torch): see their run.json")
    results = {label: _summary(of_label, targets, varied, at[label]) for label, of_label in runs.items()}
    cases = cases_of(results)
    return ComparisonFile(
        id=id,
        labels=tuple(runs),
        seeds=tuple(dict.fromkeys(entry.seed for entry in entries)),
        rounds=max(len(run.rows) for run in all_runs),
        metric=first.evaluation.metric,
        settings={
            k: v
            for k, v in first.config.items()
            if is_compared(k) and k not in varied and not k.startswith("algorithm")
        },
        varied=varied,
        results=results,
        first=None if cases else firsts(by_seed(results)),
        cases=cases,
        notes=tuple(notes),
    )


OF_CLIENTS = ("mean", "p10", "worst", "spread")


def _summary(
    runs: Sequence[FinishedRun], targets: Sequence[float], varied: Sequence[str], at: Mapping[str, Any]
) -> Summary:
    each = [_one(run) for run in runs]
    seeds, rows = [one.seed for one in each], [run.rows for run in runs]
    figures: dict[str, Any] = {name: spread([getattr(one, name) for one in each]) for name in Figures.model_fields}
    means = {name: spread([one.phases.get(name) for one in each]) for name in timing.NAMES}
    prefix = "algorithm."
    settings = {k.removeprefix(prefix): v for k, v in runs[0].config.items() if k.startswith(prefix)}
    sizes = [[100 * level.share for level in run.pool.levels if level.reported] for run in runs]
    return Summary(
        algorithm=runs[0].pool.algorithm,
        settings={k: v for k, v in settings.items() if k != "name"},
        varied={key: runs[0].config.get(key) for key in varied},
        at=dict(at),
        kept_by_clients=runs[0].evaluation.kept_by_clients,
        levels=tuple(fmean(level) for level in zip(*sizes, strict=True)),
        last=_score([(one.rounds, one.avg, one.full) for one in each]),
        best=_score([(one.best["round"], one.best["avg"], one.best["full"]) for one in each]),
        **figures,
        local=_local(each),
        phases={name: mean for name, mean in means.items() if mean is not None},
        reached=tuple(reached(seeds, rows, target) for target in targets),
        reached_avg=tuple(reached(seeds, rows, target, "avg") for target in targets),
        highest=_highest(runs),
        runs=tuple(each),
    )


def _one(run: FinishedRun) -> OneRun:
    local, metrics, full_model = run.evaluation.local, [row.metrics for row in run.rows], run.pool.levels[-1].name
    at_clients = run.evaluation.on_clients
    by_owner: dict[str, float | None] = {}
    for metric, levels in run.evaluation.by_owner.items():
        owner = metric.removeprefix("accuracy_")
        by_owner |= {f"avg_{owner}": fmean(levels.values()), f"full_{owner}": levels[full_model]}
    return OneRun(
        seed=run.config["seed"],
        run_id=run.file.run_id,
        avg=run.evaluation.avg,
        full=run.evaluation.full,
        rounds=len(run.rows),
        levels={name: dict(score.metrics) for name, score in run.evaluation.levels.items()},
        **by_owner,
        devices=run.rows[-1].metrics.get(f"{run.evaluation.metric}_devices"),
        local=local,
        local_avg=fmean(each.mean for each in local.values()) if local else None,
        local_full=local[full_model].mean if local else None,
        **{f"clients_{name}": getattr(at_clients.all, name) for name in OF_CLIENTS if at_clients is not None},
        best={"round": run.best.round + 1, "avg": run.best.metrics["avg"], "full": run.best.metrics["full"]},
        mb_down=run.total("bytes_down") / MB,
        mb_up=run.total("bytes_up") / MB,
        waste=run.waste,
        clients_failed=run.total("clients_failed"),
        seconds=run.history.seconds,
        seconds_simulated=simulated(run.rows),
        joules=joules(run.rows),
        **timing.means(metrics, timing.UNIFORMITY),
        phases=timing.means(metrics, timing.NAMES),
        model_sha256=run.history.model_sha256,
        mlflow_run_id=run.file.mlflow_run_id,
    )


def _score(values: Sequence[tuple[float, float, float]]) -> LabelScore:
    """Average the values (round, avg, full) over the runs."""
    rounds, avg, full = zip(*values, strict=True)
    return LabelScore(round=known_spread(rounds), avg=known_spread(avg), full=known_spread(full))


def _local(runs: Sequence[OneRun]) -> dict[str, LocalSpread]:
    return {
        name: LocalSpread(
            **{
                part: known_spread([getattr(one.local[name], part) for one in runs])
                for part in ("mean", "sd", "clients")
            }
        )
        for name in runs[0].local
        if all(name in one.local for one in runs)
    }


def _highest(runs: Sequence[FinishedRun]) -> tuple[Highest, ...]:
    rounds = [[row.metrics for row in run.rows] for run in runs]
    avg, full = ([highest(each, key) for each in rounds] for key in ("avg", "full"))
    return tuple(
        Highest(share=share, avg=spread([each[share] for each in avg]), full=spread([each[share] for each in full]))
        for share in SHARES
    )


# ------------------------------------------------------------------------------------------ targets
def default_targets(runs: Runs) -> tuple[float, ...]:
    """Return the MOST_TARGETS largest multiples of 5 % below the best accuracy that any run's full model reaches."""
    rows = (row for of_label in runs.values() for run in of_label for row in run.rows)
    best = max(row.metrics["full"] for row in rows if "full" in row.metrics)
    return tuple(k / STEPS for k in range(1, STEPS) if k / STEPS < best)[-MOST_TARGETS:]


def reached(seeds: Sequence[int], runs: Sequence[Sequence[Row]], accuracy: float, of: str = "full") -> Reached:
    """Return the cost until `of` (full or avg) reaches the accuracy, averaged over the runs that reach the accuracy.
    `runs` has one run for each seed."""
    pairs = zip(seeds, runs, strict=True)
    until = {seed: rows[: n + 1] for seed, rows in pairs if (n := first(rows, accuracy, of)) >= 0}
    spent = list(until.values())
    down, up, seconds = (
        [sum(row.metrics[name] for row in rows) for rows in spent]
        for name in ("bytes_down", "bytes_up", "seconds_round")
    )
    return Reached(
        accuracy=accuracy,
        seeds=tuple(until),
        rounds=spread([len(rows) for rows in spent]),
        mb=spread([(a + b) / MB for a, b in zip(down, up, strict=True)]),
        mb_down=spread([a / MB for a in down]),
        mb_up=spread([b / MB for b in up]),
        seconds=spread(seconds),
        seconds_simulated=spread([simulated(rows) for rows in spent]),
        joules=spread([joules(rows) for rows in spent]),
    )


def first(rows: Sequence[Row], accuracy: float, of: str = "full") -> int:
    """Return the index of the first round in which `of` (full or avg) is at least `accuracy`; -1 if there is none."""
    return next((row.round for row in rows if of in row.metrics and row.metrics[of] >= accuracy), -1)


def simulated(rows: Sequence[Row]) -> float | None:
    """Return the simulated seconds summed over all rounds. None if a round does not have a simulated time."""
    totals = _clock(rows)
    return totals[-1] if totals else None


def joules(rows: Sequence[Row]) -> float | None:
    """Return the energy of all rounds in joules; None if it is unknown."""
    found = [row.metrics["joules"] for row in rows if "joules" in row.metrics]
    return sum(found) if found else None


def _clock(rows: Sequence[Row]) -> list[float]:
    """Return the simulated time at the end of each round in seconds. The list is empty if a round does not have a
    simulated time. A round without training takes 0 s."""
    found = [row.metrics.get("seconds_simulated", None if row.metrics["clients_trained"] else 0.0) for row in rows]
    known = [seconds for seconds in found if seconds is not None]
    return list(accumulate(known)) if len(known) == len(rows) else []


def clock(runs: Sequence[FinishedRun], key: str) -> list[float]:
    """Return the runs' mean simulated seconds at each point of `plots.curve`; empty if a run has no simulated times."""
    totals, points = [_clock(run.rows) for run in runs], plots.curve([run.rows for run in runs], key)
    return [fmean(total[number - 1] for total in totals) for number, _, _ in points] if all(totals) else []


# ------------------------------------------------------------------------------------------------ the reference
def read_central(folders: Sequence[Path], planned: Sequence[PlannedRun]) -> Central:
    """Read finished central trainings with different seeds, which are the reference for the `planned` runs.

    Raises:
        ConfigError: A training uses another data set or network than the runs, or the trainings differ in a parameter
            other than the seed.
        IntegrityError: A training is not finished.
    """
    settings = flatten(planned[0].config)
    if apart := [key for key in comparison_runs.varied(planned) if key.startswith(COMMON)]:
        raise ConfigError(f"--central requires the same data and network in all runs, but {', '.join(apart)} differ")
    if settings.get("partition.rule") == LOCAL:
        raise ConfigError(
            "--central cannot be used with partition.rule=local, because the server cannot access the training samples"
        )
    for folder in folders:
        if not (folder / "central.json").is_file():
            raise ConfigError(f"{folder} is not the folder of a central training run: it has no central.json")
        check_manifest(folder)
    files = [CentralFile.read(folder / "central.json") for folder in folders]
    results = [RunResult.read(folder / "result.json") for folder in folders]
    for folder, file in zip(folders, files, strict=True):
        wanted = {key: settings.get(key) for key in file.config if key.startswith(COMMON)}
        wanted |= {key: value for key, value in files[0].config.items() if key.startswith("central.")}
        changed = [f"{k}: {v!r}, got {file.config.get(k)!r}" for k, v in wanted.items() if file.config.get(k) != v]
        if changed:
            raise ConfigError(
                f"{folder} cannot be compared with these runs: expected {', '.join(changed[:4])}",
                code="config.not_comparable",
            )
    seeds = tuple(int(file.config["seed"]) for file in files)
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--central must list training runs with distinct seeds, got {', '.join(map(str, seeds))}")
    best = [result.metrics["best"] for result in results]
    highest = [result.metrics["highest"] for result in results]
    others = [result.metrics.get("further", {}) for result in results]
    further = {name: spread([each.get(name, {}).get("full") for each in others]) for name in others[0]}
    return Central(
        seeds=seeds,
        settings={key: value for key, value in files[0].config.items() if key.startswith("central.")},
        full=known_spread([result.metrics["full"] for result in results]),
        best=known_spread([each["full"] for each in best]),
        best_epoch=known_spread([each["round"] for each in best]),
        highest=tuple(
            Highest(share=int(share), avg=None, full=spread([each[share]["full"] for each in highest]))
            for share in highest[0]
        ),
        seconds=known_spread([result.seconds for result in results]),
        further={name: each for name, each in further.items() if each is not None},
    )
