"""Compute a comparison's figures from finished run folders.

Runs may differ only in their algorithm and in the parameters that the comparison varies.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_engine.algorithms import CONTRACT
from fl_engine.core.errors import ConfigError
from fl_engine.fleet.uniformity import NAMES
from fl_engine.rounds import phases
from fl_engine.training.numerics import differing
from flexfleet.config import moves
from flexfleet.config.comparison_runs import run_name
from flexfleet.experiments.comparison_curves import Runs, default_targets, reached, simulated
from flexfleet.experiments.comparison_file import (
    BY_OWNER,
    LOCAL,
    MB,
    ComparisonFile,
    Highest,
    LabelScore,
    LocalSpread,
    OneRun,
    Spread,
    Summary,
    by_seed,
    cases_of,
    spread,
)
from flexfleet.experiments.ranking import firsts
from flexfleet.files.measure import SHARES, highest
from flexfleet.pipeline import share
from flexfleet.reports.report import COMPARED, NONE, FinishedRun, load, plain

SPREADS = (*BY_OWNER, "devices", *LOCAL, "mb_down", "mb_up", "waste", "seconds", "seconds_simulated", *NAMES)
"""Figures of OneRun that Summary has as a Spread of the same name."""


def read(labels: Sequence[str], seeds: Sequence[int], folders: Mapping[str, Path], varied: Sequence[str] = ()) -> Runs:
    """Load the finished runs.

    Args:
        folders: The run folders by run id.
        varied: Parameters in which labels may differ.

    Raises: as `report.load`; ConfigError for runs that cannot be compared.
    """
    runs = {label: [load(folders[run_name(label, seed)]) for seed in seeds] for label in labels}
    for i, seed in enumerate(seeds):
        of_seed = {label: of_label[i] for label, of_label in runs.items()}
        wrong = [run.file.run_id for run in of_seed.values() if run.config.get("seed") != seed]
        if wrong:
            raise ConfigError(f"these runs do not have the seed {seed} of their names: {', '.join(wrong)}")
        if lines := unequal(of_seed, varied) or other_partitions(of_seed) + other_data(of_seed):
            known = ", ".join(("the algorithm", *own(varied)))
            raise ConfigError(f"the runs of seed {seed} differ in more than {known}: {'; '.join(lines)}")
    for label, of_label in runs.items():
        of_seeds = dict(zip(map("seed {}".format, seeds), of_label, strict=True))
        if lines := unequal(of_seeds, algorithm=False) or other_code(of_seeds) + other_data(of_seeds):
            raise ConfigError(f"the runs of {label} differ in more than the seed: {'; '.join(lines)}")
    return runs


def own(varied: Sequence[str]) -> list[str]:
    """Return the parameters that labels vary, without the algorithm's own."""
    return [key for key in varied if not key.startswith("algorithm.")]


def summarise(
    id: str,
    seeds: Sequence[int],
    runs: Runs,
    to: Sequence[float] = (),
    varied: Sequence[str] = (),
    at: Mapping[str, Mapping[str, Any]] | None = None,
) -> ComparisonFile:
    """Compute the figures.

    Args:
        to: Accuracies to reach; empty: `default_targets`.
        varied: Parameters in which labels differ.
        at: The labels' values of the factors.
    """
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
    return ComparisonFile(
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


def local_work(runs: Runs) -> dict[str, str]:
    """Map labels to what their algorithms declare of their clients' work (`local_work`), if that is not the work that
    the section `training` describes."""
    out = {}
    for label, of_label in runs.items():
        with suppress(ConfigError):  # the user's own algorithm may be gone
            kind = CONTRACT.kind(str(of_label[0].config.get("algorithm.name")))
            if told := getattr(kind, "local_work", None):
                out[label] = str(told)
    return out


def _summary(
    seeds: Sequence[int],
    runs: Sequence[FinishedRun],
    targets: Sequence[float],
    varied: Sequence[str],
    at: Mapping[str, Any],
) -> Summary:
    each = [_one(seed, run) for seed, run in zip(seeds, runs, strict=True)]
    rows = [run.rows for run in runs]
    figures: dict[str, Any] = {name: spread([getattr(one, name) for one in each]) for name in SPREADS}
    prefix = "algorithm."
    settings = {k.removeprefix(prefix): v for k, v in runs[0].config.items() if k.startswith(prefix)}
    return Summary(
        algorithm=runs[0].pool.algorithm,
        settings={k: v for k, v in settings.items() if k != "name"},
        varied={key: runs[0].config.get(key) for key in varied},
        at=dict(at),
        levels=tuple(statistics.fmean(sizes) for sizes in zip(*map(_sizes, runs), strict=True)),
        last=_score([(len(run.rows), one.avg, one.full) for run, one in zip(runs, each, strict=True)]),
        best=_score([(one.best["round"], one.best["avg"], one.best["full"]) for one in each]),
        **figures,
        local=_local(each),
        phases=_phases(each),
        reached=tuple(reached(seeds, rows, target) for target in targets),
        reached_avg=()
        if any(run.single for run in runs)
        else tuple(reached(seeds, rows, target, "avg") for target in targets),
        highest=tuple(_highest(runs)),
        runs=tuple(each),
    )


def _one(seed: int, run: FinishedRun) -> OneRun:
    local, metrics = run.evaluation.local, [row.metrics for row in run.rows]
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
        **phases.means(metrics, NAMES),
        phases=phases.means(metrics, phases.NAMES),
        model_sha256=run.history.model_sha256,
        mlflow_run_id=run.file.mlflow_run_id,
    )


def _by_owner(run: FinishedRun) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for metric, levels in run.evaluation.by_owner.items():
        owner = metric.removeprefix("accuracy_")
        found[f"avg_{owner}"] = None if run.single else statistics.fmean(levels.values())
        found[f"full_{owner}"] = levels[run.pool.levels[-1].name]
    return found


def _score(values: Sequence[tuple[float | None, float | None, float | None]]) -> LabelScore:
    """`values`: round, avg and full of each run."""
    rounds, avg, full = zip(*values, strict=True)
    return LabelScore(round=_known(rounds), avg=spread(avg), full=_known(full))


def _local(runs: Sequence[OneRun]) -> dict[str, LocalSpread]:
    levels = [name for name in runs[0].local if all(name in one.local for one in runs)]
    return {
        name: LocalSpread(
            **{part: _known([getattr(one.local[name], part) for one in runs]) for part in ("mean", "sd", "clients")}
        )
        for name in levels
    }


def _phases(runs: Sequence[OneRun]) -> dict[str, Spread]:
    found = {name: spread([one.phases.get(name) for one in runs]) for name in phases.NAMES}
    return {name: each for name, each in found.items() if each is not None}


def _highest(runs: Sequence[FinishedRun]) -> Iterator[Highest]:
    rounds = [[row.metrics for row in run.rows] for run in runs]
    avg = [{} if run.single else highest(each, "avg") for run, each in zip(runs, rounds, strict=True)]
    full = [highest(each, "full") for each in rounds]
    for until in SHARES:
        yield Highest(
            share=until,
            avg=spread([of_run.get(until) for of_run in avg]),
            full=spread([of_run[until] for of_run in full]),
        )


def _sizes(run: FinishedRun) -> list[float]:
    return [100 * level.share for level in run.pool.levels if level.reported]


def _known(values: Sequence[float | None]) -> Spread:
    found = spread(values)
    assert found is not None, "every run has this figure"
    return found


def is_shared(key: str) -> bool:
    """Return whether all runs of a comparison must have the same value of this parameter."""
    return key != "seed" and moves(key) in COMPARED


def unequal(runs: Mapping[str, FinishedRun], varied: Sequence[str] = (), *, algorithm: bool = True) -> list[str]:
    """Return a line for each parameter in which runs differ but must not. They may differ in the `varied` parameters,
    the algorithm's (if `algorithm` is true), the seed, and parameters that change only the last bits."""
    shared = (key for run in runs.values() for key in run.config if is_shared(key) and key not in varied)
    keys = dict.fromkeys(key for key in shared if not (algorithm and key.startswith("algorithm")))
    lines = []
    for key in keys:
        values = {name: plain(run.config.get(key)) for name, run in runs.items()}
        if len(set(values.values())) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} ({name})" for name, value in values.items()))
    return lines


def other_partitions(runs: Mapping[str, FinishedRun]) -> list[str]:
    """Return a line for each group of runs with equal partition settings and different partitions."""
    settings = {name: sorted(share.settings(run.config).items()) for name, run in runs.items()}
    return _apart("the partition itself", {name: run.file.partition_sha256 for name, run in runs.items()}, settings)


def other_data(runs: Mapping[str, FinishedRun]) -> list[str]:
    """Return a line for each group of runs with equal settings of the data and different data."""

    def settings(run: FinishedRun) -> list[Any]:
        of_run = run.config
        own = {key: of_run[key] for key in sorted(of_run) if key.startswith("dataset.") and is_shared(key)}
        is_cut = own.get("dataset.train_samples") or own.get("dataset.test_samples")
        # A seed draws the samples of a cut, and images are padded to what the network takes.
        by = ("model.name", *(("seed", "partition.seed") if is_cut else ()))
        return [own, *(of_run.get(key) for key in by)]

    digests = {name: run.partition.data_sha256 for name, run in runs.items()}
    return _apart("the data", digests, {name: settings(run) for name, run in runs.items()})


def other_code(runs: Mapping[str, FinishedRun]) -> list[str]:
    """Return a line for each piece of the user's own code that differs between runs."""
    lines = _apart("the code of run.code", {name: run.file.code_sha256 or NONE for name, run in runs.items()})
    for source in dict.fromkeys(source for run in runs.values() for source in run.file.sources):
        known = {name: run.file.sources for name, run in runs.items()}
        lines += _apart(f"the source of {source}", {name: of[source] for name, of in known.items() if source in of})
    return lines


def _apart(what: str, digests: Mapping[str, str], settings: Mapping[str, object] | None = None) -> list[str]:
    """Return a line for each group of runs with equal settings and different digests."""
    groups: dict[str, dict[str, str]] = {}
    for name, digest in digests.items():
        groups.setdefault(repr((settings or {}).get(name)), {})[name] = digest[:12]
    return [
        f"{what} (sha256): " + ", ".join(f"{digest} ({name})" for name, digest in group.items())
        for group in groups.values()
        if len(set(group.values())) > 1
    ]
