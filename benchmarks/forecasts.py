"""Count how often the real figures of a run lie in the interval of its forecast.

The small suites of the papers run with few samples, narrow networks and made-up data, and all algorithms run on digits.
Each run is forecast twice: by `flexfleet forecast`, and when the run starts (forecast.json). A hit is a real value
between the bounds of the interval. Real time is the CPU time of this process.

Usage:
    `nice python -m benchmarks.forecasts`: Measure all suites (about five minutes on one core).
    `python -m benchmarks.forecasts --only flexfl --rows 9`: Measure all rows of the suites of one paper.
"""

from __future__ import annotations

# ruff: noqa: E402 - the clock must be replaced before modules store it
import argparse
import json
import logging
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

time.monotonic = time.perf_counter = time.process_time  # real time depends on other programs

from fl_engine.algorithms import ALGORITHMS
from fl_engine.core.errors import FlexfleetError
from fl_engine.datasets import DATASETS
from fl_engine.training import memory
from flexfleet.config import Config, load_config
from flexfleet.experiments import published_suites
from flexfleet.files.artifacts import Forecast, History
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


def measured(config: Config) -> dict[str, tuple[Forecast, dict[str, float]]]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="PREFIX", help="beginning of the suites' names")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="maximum number of rows per suite")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    args = parser.parse_args()
    logging.getLogger("flexfleet").setLevel(logging.ERROR)
    # Probe in this process, because starting a process for each level takes longer than the probe.
    memory.in_child_process = lambda what, work, *arguments: work(*arguments)
    hits: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
    rows, began = [], time.process_time()
    with tempfile.TemporaryDirectory() as root:
        os.environ["FLEXFLEET_DATA"] = root
        for suite, label, config in configs(args.only, args.rows, Path(root)):
            try:
                found = measured(config)
            except FlexfleetError as error:
                print(f"{suite} {label}: {error}")
                continue
            for when, (forecasts, real) in found.items():
                for name, figure in forecasts.figures.items():
                    hit = figure["low"] * (1 - 1e-9) <= real[name] <= figure["high"] * (1 + 1e-9)
                    hits[suite.partition("/")[0], when, name].append(hit)
                    hits["all", when, name].append(hit)
                    rows.append(
                        {"suite": suite, "row": label, "when": when, "figure": name, **figure, "real": real[name]}
                    )
                    if not hit:
                        shown = ", ".join(f"{figure[key]:.4g}" for key in ("value", "low", "high"))
                        print(f"miss: {suite} {label} {when} {name}: {shown}; real {real[name]:.4g}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows))
    names = list(dict.fromkeys(name for _, _, name in hits))
    print(f"{'suites':14}{'forecast':10}" + "".join(f"{name:>19}" for name in names))
    for suite, when in dict.fromkeys((suite, when) for suite, when, _ in sorted(hits)):
        cells = [hits.get((suite, when, name), []) for name in names]
        print(
            f"{suite:14}{when:10}"
            + "".join(f"{sum(cell)} of {len(cell)}".rjust(19) if cell else " " * 19 for cell in cells)
        )
    print(f"{time.process_time() - began:.0f} s of CPU time")


if __name__ == "__main__":
    main()
