"""Measure a coordinator's memory, files and time with many clients, updates or rounds.

The case `updates` merges 100, 500 and 2,000 updates of a 10 MB model in one round, from memory or from the store, and
reports the peak memory relative to the peak with 100 updates. Aggregation by median is measured with at most 1,000
updates, because it copies all updates to a file (10 GB). The case `clients` trains tiny models on 1,000 of 10,000
clients per round. The case `rounds` commits 10,000 rounds, and reports the number and size of files. It also compares
the time of a round in the last tenth of the run with the time in the first tenth.

The benchmark takes about 15 minutes and needs 25 GB of disk space. The cases run in separate processes, because peak
memory is measured per process.

Usage:
    python -m benchmarks.limits [--json]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.workloads import count
from fl_engine.aggregation.rules import Median
from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.training import Training
from fl_engine.backends import InProcess
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.contracts import Algorithm
from fl_engine.core.system import resident_peak
from fl_engine.core.types import ClientResult, ClientUpdate, Pool, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.storage.store import FolderStore
from fl_engine.testing.tiny import TRAINING, Memory, TinyNet, start_of, tiny_data, tiny_fleet, tiny_partition, tiny_site
from fl_engine.training.numerics import Numerics

Way = Literal["memory", "store"]
TEN_MB = TinyNet(hidden=1540)


class Echo:
    """Backend whose clients do not train. Each client returns the received weights with a small change."""

    durable = False

    def __init__(self, site: Site) -> None:
        self._site = site

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        for assignment in plan.assignments:
            free = devices.observe(self._site.fleet[assignment.client], self._site.seed, assignment.round)
            metrics = {"loss": 1.0, "steps": 1.0, "macs": 1.0, "seconds": 0.0, "free": free}
            moved = {name: tensor + 1e-3 * (assignment.client % 7 + 1) for name, tensor in assignment.payload.items()}
            yield ClientUpdate(assignment.round, assignment.client, assignment.spec, moved, 1, metrics)


def site_of(algorithm: Algorithm, family: TinyNet, clients: int) -> Site:
    """Return a site with `clients` clients, for a backend that does not read data."""
    small = tiny_site(algorithm, family, fleet=tiny_fleet(clients, sigma=(0.0,)), sizes=(1,) * clients)
    return replace(small, numerics=Numerics("batched", 64))


def federate(site: Site, algorithm: Algorithm, backend: Any, ledger: Ledger, **terms: Any) -> Memory:
    tracker = Memory()
    settings = RoundsConfig(**({"stop": 1, "evaluate_every": 10**6, "commit_every": 1} | terms))
    rounds.federate(Run(algorithm, site, settings), start_of(algorithm, site), backend, ledger, tracker)
    return tracker


def of_updates(count: int, way: Way, robust: bool, folder: str) -> dict[str, float]:
    """Measure a round that merges `count` updates of 10 MB each. Return the seconds of the round, and the growth of the
    peak memory in MB."""
    prepare_process(("cpu",))
    training = replace(TRAINING, fraction=1.0)
    algorithm = FedAvg(training, eligible="all", **({"aggregation": Median()} if robust else {}))
    site = site_of(algorithm, TEN_MB, count)
    before, started = resident_peak(), time.monotonic()
    ledger = Ledger(FolderStore(folder), rules=site.rules)
    federate(site, algorithm, Echo(site), ledger, keep_updates=way == "store")
    return {"mb": (resident_peak() - before) / 1e6, "seconds": time.monotonic() - started}


def of_clients(clients: int, per_round: int, stop: int, folder: str) -> dict[str, float]:
    """Measure rounds of a large fleet with training. Return the seconds per round and the peak memory in MB."""
    prepare_process(("cpu",))
    algorithm = FlexFL(replace(TRAINING, fraction=per_round / clients))
    fleet = tiny_fleet(clients)
    data = tiny_data(clients=clients)
    partition = tiny_partition(data, (8,) * clients)
    pool: Pool = tiny_site(algorithm).pool
    site = Site(TinyNet(), pool, fleet, data, partition, 3, Numerics("batched", 64))
    tracker = federate(site, algorithm, InProcess(site), Ledger(FolderStore(folder)), stop=stop)
    trained = [row["clients_trained"] for row in tracker.rows.values()]
    assert trained == [per_round] * stop, trained
    seconds = sorted(row["seconds_round"] for row in tracker.rows.values())
    return {"seconds": seconds[len(seconds) // 2], "mb": resident_peak() / 1e6}


def of_rounds(stop: int, folder: str) -> dict[str, float]:
    """Measure `stop` rounds of four clients that do not train.

    Returns:
        `files`: Largest number of files in the store.
        `mb`: Size on disk at the end, in MB.
        `seconds`: Seconds per round in the last tenth of the rounds.
        `pace`: Ratio of `seconds` to the seconds per round in the first tenth of the rounds.
        `peak_growth_mb`: Growth of the peak memory after the first tenth of the rounds, in MB.
    """
    prepare_process(("cpu",))
    algorithm = FlexFL(Training(fraction=0.2, epochs=1, batch_size=4, lr=0.01))
    site = tiny_site(algorithm)
    store = FolderStore(folder)
    ledger = Ledger(store)
    tenth, most, peaks, paces = stop // 10, 0, [], []
    for part in range(1, 11):
        started = time.monotonic()
        federate(site, algorithm, Echo(site), ledger, stop=part * tenth)
        paces.append((time.monotonic() - started) / tenth)
        peaks.append(resident_peak() / 1e6)
        most = max(most, len(store.list("")))
    assert [row.round for row in ledger.checkpoints.rows()] == list(range(10 * tenth))
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    return {
        "files": most,
        "mb": size / 1e6,
        "seconds": paces[-1],
        "pace": paces[-1] / paces[0],
        "peak_growth_mb": peaks[-1] - peaks[0],
    }


def alone(case: Callable[..., dict[str, float]], *args: Any) -> dict[str, float]:
    """Run a case in a separate process with a temporary folder."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="flexfleet-limits-") as folder, spawn.Pool(1) as pool:
        return pool.apply(case, (*args, folder))


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.limits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--updates", type=count, nargs="+", default=[100, 500, 2000], help="numbers of updates to merge by mean"
    )
    p.add_argument("--median-updates", type=count, nargs="+", default=[100, 500, 1000])
    p.add_argument("--rounds", type=count, default=10_000)
    p.add_argument("--json", action="store_true", help="print exactly one JSON object on stdout")
    args = p.parse_args(argv)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"updates": {}}
    for robust in (False, True):
        counts = args.median_updates if robust else args.updates
        for way in ("memory", "store"):
            name, cases = f"{'median' if robust else 'mean'}, {way}", {}
            for number in counts:
                cases[number] = alone(of_updates, number, way, robust)
                ratio = cases[number]["mb"] / cases[counts[0]]["mb"]
                cost = f"{cases[number]['mb']:.0f} MB ({ratio:.2f}), {cases[number]['seconds']:.0f} s"
                print(f"{name}: {number} updates of 10 MB: {cost}", file=sys.stderr)
            found["updates"][name] = cases
    found["clients"] = alone(of_clients, 10_000, 1000, 5)
    cost = f"{found['clients']['seconds']:.2f} s a round, {found['clients']['mb']:.0f} MB"
    print(f"10,000 clients, 1,000 per round: {cost}", file=sys.stderr)
    found["rounds"] = alone(of_rounds, args.rounds)
    r = found["rounds"]
    print(
        f"{args.rounds} rounds: {r['files']:.0f} files at most, {r['mb']:.1f} MB, pace {r['pace']:.2f} of the first, "
        f"peak grew by {r['peak_growth_mb']:.0f} MB",
        file=sys.stderr,
    )
    if args.json:
        print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
