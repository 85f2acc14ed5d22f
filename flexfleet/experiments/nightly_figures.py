"""The figures of a night's finished runs: what is compared with those before."""

from __future__ import annotations

import datetime
import logging
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fl_engine.aggregation import privacy
from fl_engine.backends import InProcess
from fl_engine.core.samples import outputs_of
from fl_engine.core.slicing import runnable
from fl_engine.exchange.client import Site, Work, accept
from fl_engine.rounds import loop
from fl_engine.rounds.ledger import ledger_in
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from flexfleet.config import Config, codecs
from flexfleet.experiments import comparison_curves
from flexfleet.experiments.comparison_file import MB
from flexfleet.experiments.nightly_run import Night
from flexfleet.experiments.nightly_suite import NightFigures, OfLabel
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.site import initial_state, site_of, trace_of
from flexfleet.reports.report import FinishedRun, load
from flexfleet.tracking import record as track
from flexfleet.tracking.trackers import Several

PROCESSES, TASKS = "processes of their own", "tasks of a graph"
BACKEND = "backend"
"""Where clients lived, in `Figures.machine`: the memory that is measured is the coordinator's, which clients of other
processes are no part of."""
MEMORY = ("peak_mb", "peak_mb_rounds")
"""Peak memory of the whole process, which is reported, and above what the process held before its first round, which
is judged: so the memory that importing torch takes cannot hide a leak."""

Folders = Mapping[tuple[str, str], Path]
"""Finished runs' folders by case and run id."""

log = logging.getLogger("flexfleet")


def measure(night: Night, folders: Folders, turns: int, runs_in: str = PROCESSES) -> NightFigures:
    """`runs_in`: where the runs were made. A task of a graph has more in memory than a separate process."""
    labels = {}
    for case, entries in night.runs.items():
        for label in dict.fromkeys(entry.label for entry in entries):
            own = [entry for entry in entries if entry.label == label]
            first = folders[case, own[0].name]
            log.info("pace of %s/%s, %d turns", case, label, turns)
            runs = [load(folders[case, entry.name]) for entry in own]
            values = {**_values(runs, night.suite.cases[case].to), "pace": tuple(pace(own[0].config, first, turns))}
            labels[f"{case}/{label}"] = OfLabel(
                task=night.tasks[f"{case}/{label}"],
                values=values,
                curve=_curve(runs),
                mlflow_runs=tuple(run.file.mlflow_run_id for run in runs if run.file.mlflow_run_id),
                metric=runs[0].evaluation.metric,
            )
    return NightFigures(
        suite=night.name,
        id=night.id,
        when=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=track.commit(),
        machine=_machine(night, runs_in),
        seeds=night.seeds,
        labels=labels,
    )


def _machine(night: Night, runs_in: str) -> dict[str, str]:
    backends = sorted({entry.config.run.backend for entries in night.runs.values() for entry in entries})
    return {**machine(), "runs in": runs_in, BACKEND: ", ".join(backends)}


def _values(runs: Sequence[FinishedRun], to: float) -> dict[str, tuple[float, ...]]:
    """A run that does not reach the accuracy counts as one round more than the longest had."""
    longest = 1 + max(len(run.rows) for run in runs)
    until = [comparison_curves.first(run.rows, to) for run in runs]
    sent = [comparison_curves.sent(run.rows) for run in runs]
    out = {
        "full": tuple(run.evaluation.full for run in runs),
        "rounds": tuple(float(n + 1 if n >= 0 else longest) for n in until),
        "mb": tuple(
            (sum(each[: n + 1]) if n >= 0 else sum(each) * longest / len(each)) / MB
            for n, each in zip(until, sent, strict=True)
        ),
        **{name: tuple(max(row.metrics[name] for row in run.rows) for run in runs) for name in MEMORY},
    }
    return out if runs[0].single else {"avg": tuple(run.evaluation.avg for run in runs), **out}


def _curve(runs: Sequence[FinishedRun]) -> tuple[tuple[int, float, tuple[float, ...], tuple[float, ...]], ...]:
    avg = [] if runs[0].single else comparison_curves.curve(runs, "avg")
    full = comparison_curves.curve(runs, "full")
    means = {round: tuple(each) for round, _, each in avg}
    return tuple((round, mb, means.get(round, ()), tuple(each)) for round, mb, each in full)


ROUNDS = 1


def pace(config: Config, run: Path, turns: int) -> list[float]:
    """Seconds of ROUNDS rounds divided by seconds of the loop with the same clients and sub-models, one ratio for each
    turn. `run`: folder of a run of this configuration, for its partition and pool."""
    resolved = Resolved.of(config)
    site = site_of(resolved, run / "partition", run / "pool")
    measured = _run(resolved, site)
    ratios = []
    for turn in range(turns + 1):
        ours, by_hand = _rounds(resolved, measured), _by_hand(resolved, measured)
        if turn:  # the first warms up both
            ratios.append(ours / by_hand)
    return ratios


def _run(resolved: Resolved, site: Site) -> Run:
    """The run whose pace is measured. Its noise follows from the seed, which is no secret: nothing of it is kept."""
    config, algorithm = resolved.config, resolved.algorithm
    noise_key = privacy.noise_key(str(config.seed).encode(), "pace") if privacy.is_private(algorithm) else None
    trace, _ = trace_of(config, site)
    terms = config.rounds.model_copy(update={"stop": ROUNDS, "evaluate_every": ROUNDS})
    return Run(
        algorithm,
        site,
        terms,
        config.run.devices,
        noise_key=noise_key,
        codecs=codecs(config),
        trace=trace,
        wait_s=config.fleet.wait_s,
    )


def _rounds(resolved: Resolved, run: Run) -> float:
    config, site, state = resolved.config, run.site, initial_state(resolved, run.site)
    with tempfile.TemporaryDirectory() as folder:
        ledger, backend = ledger_in(FolderStore(Path(folder))), InProcess(site, config.run.devices)
        fresh = replace(run)  # keeps nothing that an earlier turn has computed
        started = time.perf_counter()
        loop.federate(fresh, state, backend, ledger, Several([]))
        return time.perf_counter() - started


def _by_hand(resolved: Resolved, run: Run) -> float:
    config, algorithm, site, state = resolved.config, run.algorithm, run.site, initial_state(resolved, run.site)
    works = [
        work
        for round in range(ROUNDS)
        for order in algorithm.plan(state, run.context(round, run.begins(round, 0.0))).orders
        if isinstance(work := accept(algorithm, order, site), Work)
    ]
    samples = site.data.normalise(site.data.train_x)
    started = time.perf_counter()
    for work in works:
        _train(config, site, work, samples[torch.from_numpy(work.indices)], site.data.train_y[work.indices])
    return time.perf_counter() - started


def _train(config: Config, site: Site, work: Work, x: torch.Tensor, y: torch.Tensor) -> None:
    t = config.training
    network = runnable(site.family, work.task.spec, {k: v.clone() for k, v in work.start.items()}).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=t.lr, momentum=t.momentum, weight_decay=t.weight_decay)
    for _ in range(t.epochs):
        for batch in torch.split(torch.randperm(len(y)), t.batch_size):
            if len(batch) < t.batch_size and t.drop_last:
                continue
            loss = site.data.task.loss(outputs_of(network(x[batch]))[-1], y[batch]).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()


def machine() -> dict[str, str]:
    """What memory and pace depend on: they are not compared with figures of other machines."""
    model = "unknown"
    with (
        open("/proc/cpuinfo", encoding="utf-8")
        if os.path.exists("/proc/cpuinfo")
        else open(os.devnull, encoding="utf-8") as file
    ):
        model = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), model)
    return {
        "cpu": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": str(os.cpu_count()),
        "torch": torch.__version__,
    }
