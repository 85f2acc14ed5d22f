"""Measure how the time of a round grows with the number of clients, pool models, parameters or rounds.

The script fits a line to the measured times of a round. A plot shows the time of a round, and the part of this time
that is not spent on training. Each point is a run of `rounds.federate` with a ledger, on one device, without
evaluation. `benchmarks.growth` measures larger fleets, rounds and models.

Usage:
    `python -m benchmarks.scaling --out docs/performance`: Measure all times.
    `python -m benchmarks.scaling --selection`: Measure only Oort's time to select clients and to learn from results.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.networks import BinaryMLP
from benchmarks.workloads import MEAN, STD, WORKLOADS
from fl_engine.algorithms import AdaptiveFL, FedAvg
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, ModelFamily
from fl_engine.core.costs import count_params
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.text import path_of
from fl_engine.core.types import FULL, Assignment, ClientUpdate, Device, PoolModel, RoundContext, Tables
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.models import ResNet18, SmallCNN
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.selection import Oort
from fl_engine.storage.store import FolderStore
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import Memory, tiny_pool
from fl_engine.training import strategy

STRONG = (Tier("strong", 1.0, 110.0, (0.0,)),)


@dataclass(frozen=True)
class Point:
    x: float
    round_s: float
    outside_s: float
    """Mean seconds per round outside training (planning, merging, bookkeeping and commits)."""


def measure(
    algorithm: Algorithm, family: ModelFamily, clients: int, samples: int, stop: int, x: float, tiers: Any = STRONG
) -> Point:
    """Measure a run of `stop` rounds. The median time of a round excludes the first three rounds and the last round."""
    generator = torch.Generator().manual_seed(0)
    n = clients * samples
    images = torch.randint(0, 256, (n, *family.input_shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, family.outputs, (n,), generator=generator)
    c = family.input_shape[0]
    data = Data(
        "made up", Classification(family.outputs), images, labels, images[:1], labels[:1], (MEAN,) * c, (STD,) * c
    )
    parts = tuple(np.arange(i * samples, (i + 1) * samples) for i in range(clients))
    nobody = np.zeros(0, dtype=np.int64)
    counts = np.zeros((family.outputs, clients), dtype=np.int64)
    partition = Partition(nobody, nobody, parts, "made up", {}, data.name, counts)
    fleet = devices.fleet(tiers, clients, 0)
    pool = tiny_pool(algorithm, family)
    training = algorithm.training  # type: ignore[attr-defined]
    per_round = max(1, round(training.fraction * clients))
    numerics = strategy.choose(family, Classification(family.outputs), training.batch_size, per_round, "fp32")
    site = Site(family, pool, fleet, data, partition, 0, numerics)
    initial = algorithm.init(initial_params(family, 0), family.layout(), fleet, pool, ServerSite(site))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(FolderStore(Path(folder)))
        config = RoundsConfig(stop=stop, evaluate_every=10**9)
        started = time.perf_counter()
        rounds.federate(Run(algorithm, site, config), initial, InProcess(site), ledger, Memory())
        seconds = time.perf_counter() - started
        rows = ledger.checkpoints.rows()
    inside = sum(row.metrics["seconds_train"] + row.metrics.get("seconds_evaluate", 0.0) for row in rows)
    return Point(x, statistics.median(row.metrics["seconds_round"] for row in rows[3:-1]), (seconds - inside) / stop)


def training(fraction: float, batch: int = 10) -> Training:
    return Training(fraction=fraction, epochs=1, batch_size=batch, lr=0.05, weight_decay=0.0, drop_last=False)


def clients_per_round() -> list[Point]:
    w, family = WORKLOADS["W3"], BinaryMLP(WORKLOADS["W3"].shape)
    counts = (10, 30, 100, 300, 1000)
    return [measure(FedAvg(training=training(k / 2000)), family, 2000, w.samples, 25, k) for k in counts]


def pool_size() -> list[Point]:
    family = ResNet18((1, 9, 9), 10, width=0.1)
    algorithms = [AdaptiveFL(training=training(0.2), p=p) for p in (1, 2, 3, 4)]
    return [measure(a, family, 100, 40, 20, len(tiny_pool(a, family)), "4:3:3") for a in algorithms]


def model_size() -> list[Point]:
    families = [SmallCNN((1, 8, 8), 10, width=width) for width in (0.5, 1.0, 2.0, 4.0, 8.0)]
    return [measure(FedAvg(training=training(0.1)), f, 100, 40, 15, count_params(f) / 1e6) for f in families]


def number_of_rounds() -> list[Point]:
    """Measure runs of increasing length. The time of a round must not grow with the number of rounds in the ledger."""
    family = BinaryMLP(WORKLOADS["W3"].shape)
    return [measure(FedAvg(training=training(0.1)), family, 100, 40, stop, stop) for stop in (50, 200, 800, 2000)]


def selection(clients: int, asked: int, rounds: int = 7) -> tuple[float, float]:
    """Return two medians of Oort's CPU seconds per round: for picking clients, and for learning from all results. All
    clients except one have participated before.
    """
    rng = np.random.default_rng(0)
    speeds, bandwidths = rng.lognormal(22, 1, clients), rng.lognormal(14, 1, clients)
    pairs = enumerate(zip(speeds, bandwidths, strict=True))
    fleet = tuple(Device(c, "any", 110.0, 0.0, None, float(s), float(b)) for c, (s, b) in pairs)
    pool = (PoolModel("full", FULL, 10**6, 1.0, 10**7, dispatched=True, reported=True),)
    samples = tuple(int(n) for n in rng.integers(10, 500, clients))
    oort, picked, learned = Oort(), list[float](), list[float]()
    results = tuple((0.0, float(c), 100 * float(loss), 9.0) for c, loss in enumerate(rng.random(clients - 1)))
    tables: Tables = {**oort.init(fleet, pool), "results": results}
    for round in range(1, rounds + 1):
        context = RoundContext(round, 0, fleet, fleet, pool, samples=samples, draws=samples)
        started = time.process_time()
        picks = oort.pick(tables, context, asked, seeds.rng(0, "select", round))
        middle = time.process_time()
        for client, level in picks:
            update = ClientUpdate(round, client, FULL, {}, samples[client], {"rms_loss": 1.0})
            tables = oort.learn(tables, Assignment(round, client, FULL, {}, 0, level), update, 9.0)
        picked.append(middle - started)
        learned.append(time.process_time() - middle)
    return statistics.median(picked), statistics.median(learned)


SWEEPS: dict[str, tuple[str, Callable[[], list[Point]]]] = {
    "clients per round": ("MLP 18-64-1, 40 samples each", clients_per_round),
    "models in the pool": ("AdaptiveFL, ResNet18 of a tenth of the width, 20 clients", pool_size),
    "million parameters": ("small CNN from half to eight times its width, 10 clients", model_size),
    "rounds of the run": ("MLP 18-64-1, 10 clients", number_of_rounds),
}


def fit(points: Sequence[Point]) -> tuple[float, float]:
    """Fit a line that minimizes the squared relative errors, and return the seconds at zero and the seconds per
    unit."""
    x, y = np.array([p.x for p in points]), np.array([p.round_s for p in points])
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    return float(base), float(slope)


def draw(found: dict[str, list[Point]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "scaling"})
    figure, axes = pyplot.subplots(1, len(found), figsize=(4 * len(found), 3.2), constrained_layout=True)
    for axis, (name, points) in zip(axes, found.items(), strict=True):
        base, slope = fit(points)
        x = np.linspace(0, max(p.x for p in points), 50)
        axis.plot(x, 1e3 * (base + slope * x), color="0.7", label=f"{1e3 * base:.1f} + {1e3 * slope:.3g} x ms")
        axis.plot([p.x for p in points], [1e3 * p.round_s for p in points], "o", label="a round")
        axis.plot([p.x for p in points], [1e3 * p.outside_s for p in points], "^", label="outside training")
        axis.set(xlabel=name, ylabel="ms", title=SWEEPS[name][0], ylim=(0, None))
        axis.title.set_fontsize(9)
        axis.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=path_of, metavar="DIR", help="folder for scaling.json and scaling.svg")
    what.add_argument("--selection", action="store_true", help="measure only Oort's time with many clients")
    args = p.parse_args(argv)
    if args.selection:
        for clients, asked in ((2800, 100), (100_000, 1000)):
            pick, learn = selection(clients, asked)
            print(f"{asked} of {clients} clients: picking {1e3 * pick:.1f} ms, learning {1e3 * learn:.1f} ms a round")
        return 0
    prepare_process(("cpu",))
    found: dict[str, list[Point]] = {}
    for name, (about, sweep) in SWEEPS.items():
        found[name] = sweep()
        base, slope = fit(found[name])
        print(f"{name} ({about}): {1e3 * base:.2f} ms + {1e3 * slope:.4g} ms each")
        for point in found[name]:
            print(f"  {point.x:10.4g}  {1e3 * point.round_s:10.2f} ms, outside training {1e3 * point.outside_s:.2f} ms")
    args.out.mkdir(parents=True, exist_ok=True)
    values = {name: [vars(point) for point in points] for name, points in found.items()}
    (args.out / "scaling.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    draw(found, args.out / "scaling.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
