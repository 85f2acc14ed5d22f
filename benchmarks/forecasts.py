"""Count how often the real figures of a run lie in the interval of its forecast.

The small suites of the papers run with few samples, narrow networks and made-up data, and all algorithms run on digits.
Each run is forecast twice: by `flexfleet forecast`, and when the run starts (forecast.json). A hit is a real value
between the bounds of the interval. Real time is the CPU time of this process.

With `--recorded`, forecast the runs of docs/evidence/results.json instead, which have up to 3,000 rounds on real data.
With `--memory`, compare the peak memory of each level with the memory of a process that trains the level's largest
client in the first run of each recorded comparison.

Usage:
    `nice python -m benchmarks.forecasts`: Measure all suites (about five minutes on one core).
    `python -m benchmarks.forecasts --only flexfl --rows 9`: Measure all rows of the suites of one paper.
    `python -m benchmarks.forecasts --recorded`: Forecast the recorded runs (about 15 minutes on one core). The data
        sets must be in FLEXFLEET_DATA.
    `python -m benchmarks.forecasts --memory`: Measure memory (about ten minutes on one core).
"""

from __future__ import annotations

# ruff: noqa: E402 - the clock must be replaced before modules store it
import argparse
import json
import logging
import os
import shlex
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

time.monotonic = time.perf_counter = time.process_time  # real time depends on other programs

from fl_engine.algorithms import ALGORITHMS
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import FlexfleetError
from fl_engine.core.system import resident_peak, restart_peak
from fl_engine.core.types import ClientUpdate, RoundPlan
from fl_engine.datasets import DATASETS
from fl_engine.exchange.client import Site
from fl_engine.training import memory
from flexfleet.cli import many_runs
from flexfleet.cli.main import parser
from flexfleet.config import Config, load_config
from flexfleet.config.comparison_runs import PlannedRun
from flexfleet.experiments import published_suites
from flexfleet.files.artifacts import Forecast, History
from flexfleet.pipeline import partition as partitions
from flexfleet.pipeline.check import first_round
from flexfleet.pipeline.federate import federate
from flexfleet.pipeline.forecast import forecast
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import partition
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import pretrain
from tests.flexfleet.test_small_twins import FILES, SMALL, smaller
from tests.harness.processes import QUICK

ROUNDS = 12
PROBE_S = 0.3
RESULTS = Path("docs/evidence/results.json")
RECORDED = ("mb_down", "mb_up", "seconds_simulated")
Results = dict[str, tuple[Forecast, dict[str, float]]]
"""Maps the time of a forecast (`command` or `start`) to the forecast and the real figures."""
SETS = {"rounds.stop": ROUNDS, "rounds.evaluate_every": 4, "tracking.mlflow": None, "partition.seed": None}


def configs(only: str, most: int, root: Path) -> Iterator[tuple[str, str, Config]]:
    """Yield (suite, row, configuration) for some rows of each suite."""
    read = partial(load_config, None)
    for name in SMALL:
        if not name.startswith(only):
            continue
        suite = published_suites.load(name)
        given, _ = published_suites.entries_of(suite, None, "0", {}, read, "id")
        for data in {entry.config.dataset.name for entry in given} & set(FILES):
            if not DATASETS[data].load.__module__.startswith("tests"):
                load = FILES[data](root)
                DATASETS[data] = replace(DATASETS[data], load=load, files=())
        sets: dict[str, Any] = {f"{e.label}:{path}": v for e in given for path, v in smaller(e.config).items()}
        entries, _ = published_suites.entries_of(suite, None, "0", sets | SETS, read, "id")
        for entry in entries[:: -(-len(entries) // most)]:
            yield name, entry.label, entry.config
    for name in ALGORITHMS if "digits".startswith(only) else ():
        yield "digits", name, load_config(None, [*QUICK, f"algorithm.name={name}", f"rounds.stop={ROUNDS}"])


def measured(config: Config) -> Results:
    """Run a configuration. Return the forecasts and the real figures."""
    resolved = Resolved.of(config)
    found = forecast(resolved, PROBE_S)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        partition(resolved, out / "partition")
        pretrain(resolved, out / "partition", out / "pretrain")
        model_pool(resolved, out / "pretrain", out / "pool")
        federate(resolved, out / "partition", out / "pool", out, run_id="a")
        own = Forecast.read(out / "forecast.json")
        real = {name: figure["real"] for name, figure in own.figures.items()}
        real["seconds"] = History.read(out / "history.json").seconds
    return {"command": (found, real), "start": (own, real)}


class Planned(Exception):
    """Raised instead of executing a comparison."""


def stop(planned: list[PlannedRun], runs: list[PlannedRun], *_: Any, **__: Any) -> None:
    planned.extend(runs)
    raise Planned


def recorded(only: str) -> Iterator[tuple[str, str, Config, dict[str, float]]]:
    """Yield (comparison, label, configuration, real figures) for the first seed of each recorded run."""
    for name, entry in json.loads(RESULTS.read_text("utf-8")).items():
        planned: list[PlannedRun] = []
        with patch.object(many_runs, "run_comparison", partial(stop, planned)), suppress(Planned):
            many_runs.compare(parser().parse_args(shlex.split(entry["command"])[1:]))
        for run in planned:
            found = entry["comparison"]["results"].get(run.label, {"runs": []})["runs"]
            real = next((each for each in found if each["seed"] == run.seed == planned[0].seed), None)
            # Runs that diverged ended early.
            whole = real is not None and real.get("rounds", run.config.rounds.stop) == run.config.rounds.stop
            if real is not None and whole and name.startswith(only):
                on_cpu = run.config.run.model_copy(update={"devices": ("cpu",)})
                config = run.config.model_copy(update={"run": on_cpu})
                yield name, run.label, config, {figure: real[figure] for figure in RECORDED}


def peak_of(site: Site, algorithm: Algorithm, plan: RoundPlan) -> float:
    """Return the memory that a plan's training adds to this process, in MB."""
    prepare_process(("cpu",))
    before, _ = restart_peak()
    (result,) = InProcess(site).run(algorithm, plan)
    assert isinstance(result, ClientUpdate), result
    return (resident_peak() - before) / 1e6


def peaks(config: Config, _: Any) -> Results:
    """Forecast the peak memory of each level, and train the largest client that receives the level."""
    own = Resolved.of(config)
    training = replace(own.algorithm.training, epochs=1)  # type: ignore[attr-defined]
    resolved = Resolved(config, replace(own.algorithm, training=training))  # type: ignore[type-var]
    found = {level["name"]: level["peak"] for level in forecast(resolved, PROBE_S, seconds=0.0).levels}
    run, start, _plan = first_round(resolved, partitions.cut(resolved))
    run = replace(run, site=replace(run.site, numerics=partitions.numerics_of(resolved)))
    largest: dict[str, tuple[int, RoundPlan]] = {}
    for number in range(20):
        plan = run.algorithm.plan(start, run.context(number, run.begins(number, 0.0)))
        for assignment in plan.assignments:
            samples = len(run.site.partition.clients[assignment.client])
            if samples > largest.get(name := run.site.pool[assignment.level].name, (0, plan))[0]:
                largest[name] = samples, replace(plan, assignments=(assignment,))
    from benchmarks.forecasts import peak_of as work  # a function of __main__ cannot be sent to a process

    real = {
        name: memory.in_child_process("training", work, run.site, run.algorithm, plan)
        for name, (_, plan) in largest.items()
    }
    return {"command": (Forecast(figures={name: found[name] for name in real}), real)}


def cases(args: argparse.Namespace, root: Path) -> Iterator[tuple[str, str, Callable[[], Results]]]:
    if args.memory:
        for name, some in groupby(recorded(args.only), key=itemgetter(0)):
            yield name, *next(((label, partial(peaks, config, real)) for _, label, config, real in some))
    elif args.recorded:
        for name, label, config, real in recorded(args.only):
            yield name, label, partial(lambda c, r: {"command": (forecast(Resolved.of(c)), r)}, config, real)
    else:
        os.environ["FLEXFLEET_DATA"] = str(root)
        for name, label, config in configs(args.only, args.rows, root):
            yield name, label, partial(measured, config)


def main() -> None:
    command = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    command.add_argument("--recorded", action="store_true", help="forecast the recorded runs")
    command.add_argument("--memory", action="store_true", help="measure the memory of the recorded runs' levels")
    command.add_argument("--only", default="", metavar="PREFIX", help="beginning of the suites' names")
    command.add_argument("--rows", type=int, default=1, metavar="N", help="maximum number of rows per suite")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    args = command.parse_args()
    logging.getLogger("flexfleet").setLevel(logging.ERROR)
    if not args.memory:  # Probe in this process, because starting a process for each level takes longer than the probe.
        memory.in_child_process = lambda what, work, *arguments: work(*arguments)
    hits: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    rows, began = [], time.process_time()
    with tempfile.TemporaryDirectory() as root:
        for suite, label, measure in cases(args, Path(root)):
            try:
                found = measure()
            except FlexfleetError as error:
                print(f"{suite} {label}: {error}")
                continue
            for when, (forecasts, real) in found.items():
                for name, figure in forecasts.figures.items():
                    if real.get(name) is None:
                        continue
                    hit = figure["low"] * (1 - 1e-9) <= real[name] <= figure["high"] * (1 + 1e-9)
                    kind = "peak of a level" if args.memory else name
                    hits[suite.partition("/")[0], when, kind].append(hit)
                    hits["all", when, kind].append(hit)
                    rows.append(
                        {"suite": suite, "row": label, "when": when, "figure": name, **figure, "real": real[name]}
                    )
                    if not hit:
                        shown = ", ".join(f"{figure[key]:.4g}" for key in ("value", "low", "high"))
                        print(f"miss: {suite} {label} {when} {name}: {shown}; real {real[name]:.4g}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows), "utf-8")
    names = list(dict.fromkeys(name for _, _, name in hits))
    width = 2 + max(len(suite) for suite in ("suites", *(suite for suite, _, _ in hits)))
    print(f"{'suites':{width}}{'forecast':10}" + "".join(f"{name:>19}" for name in names))
    for suite, when in dict.fromkeys((suite, when) for suite, when, _ in sorted(hits)):
        cells = [hits.get((suite, when, name), []) for name in names]
        print(
            f"{suite:{width}}{when:10}"
            + "".join(f"{sum(cell)} of {len(cell)}".rjust(19) if cell else " " * 19 for cell in cells)
        )
    print(f"{time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
