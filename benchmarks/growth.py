"""Measure how the time and the memory of a round grow with the number of clients, in total and per round.

Each point runs in a separate process, because peak memory is measured per process. Except for --model and --methods,
the network is the MLP of workload W3, and all clients after the first 2,000 reuse the samples of these 2,000 clients.
Most times are CPU seconds, because other programs hardly affect CPU time.

Usage:
    `python -m benchmarks.growth --fleet`: Select 100 of 1,000 to 100,000 clients per round, with each selector.
    `python -m benchmarks.growth --round`: Select 100 to 10,000 of 20,000 clients per round.
    `python -m benchmarks.growth --model`: Train models of 100 MB to 1.3 GB on three clients (`benchmarks.large`).
    `python -m benchmarks.growth --methods`: Train a large model with other aggregations, a server optimizer and codecs.
    `python -m benchmarks.growth --report`: Measure `flexfleet report` for a synthetic run of 10,000 rounds.
    `python -m benchmarks.growth --mlflow`: Log 100 to 10,000 rounds, or 1,000 to 100,000 client lines, to MLflow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import large, tracking
from benchmarks.networks import family_of
from benchmarks.workloads import MEAN, STD, WORKLOADS
from fl_engine.algorithms import FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core.contracts import Algorithm
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.system import resident_peak
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
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

ROOT = Path(__file__).parents[1]
ROUNDS, LONG = 6, 10_000
SELECTIONS: Mapping[str, Callable[[Training], Algorithm]] = {
    "uniform": lambda t: FedAvg(training=t),
    "oort": lambda t: FedAvg(training=t, selection=Oort()),
    "flexfl": lambda t: FlexFL(training=t, use_apoz=False, kd_weight=0.0),
}
POINTS: Mapping[str, Sequence[tuple[str, int, int]]] = {
    "fleet": [(name, n, 100) for name in SELECTIONS for n in (1000, 10_000, 30_000, 100_000)],
    "round": [("uniform", 20_000, n) for n in (100, 1000, 3000, 10_000)],
}
"""Map each sweep to a list of points (selector, number of clients, number of clients per round)."""


def site_of(selection: str, clients: int, per_round: int) -> tuple[Algorithm, Site]:
    w = WORKLOADS["W3"]
    family, own = family_of("W3", w), min(clients, 2000)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (own * w.samples, *w.shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, w.classes, (len(x),), generator=generator)
    c = w.shape[0]
    data = Data("made up", Classification(w.classes), x, y, x[:1], y[:1], (MEAN,) * c, (STD,) * c)
    parts = tuple(np.arange(w.samples) + w.samples * (i % own) for i in range(clients))
    nobody, counts = np.zeros(0, dtype=np.int64), np.zeros((w.classes, clients), dtype=np.int64)
    partition = Partition(nobody, nobody, parts, "made up", {}, data.name, counts)
    training = Training(
        fraction=per_round / clients, epochs=1, batch_size=w.batch, lr=w.lr, weight_decay=0.0, drop_last=False
    )
    algorithm = SELECTIONS[selection](training)
    tiers: Any = "4:3:3" if selection == "flexfl" else (Tier("strong", 1.0, 110.0, (0.0,)),)
    fleet = devices.fleet(tiers, clients, 0)
    numerics = strategy.choose(family, data.task, w.batch, per_round, "fp32")
    return algorithm, Site(family, tiny_pool(algorithm, family), fleet, data, partition, 0, numerics)


def point(selection: str, clients: int, per_round: int, stop: int = ROUNDS) -> dict[str, float]:
    """Measure the time and memory of a run of `stop` rounds.

    Returns:
        CPU seconds to create the clients (`fleet`), to run a round (`round`), and to resume and run a round (`resume`).
        Median wall-clock seconds of the phases `plan`, `train` and `merge` of a round.
        Peak memory in MB of 1e6 bytes before the rounds (`mb_before`), after the rounds (`mb_rounds`), and after the
        resumed round (`mb_peak`). `mb_ledger` is the size of the ledger's files.
    """
    prepare_process(("cpu",))
    started = time.process_time()
    algorithm, site = site_of(selection, clients, per_round)
    found = {"fleet": time.process_time() - started, "mb_before": resident_peak() / 1e6}
    initial = algorithm.init(initial_params(site.family, 0), site.layout, site.fleet, site.pool, ServerSite(site))
    with tempfile.TemporaryDirectory() as folder:

        def until(stop: int) -> tuple[float, Ledger]:
            started, ledger = time.process_time(), Ledger(FolderStore(Path(folder)))
            run = Run(algorithm, site, RoundsConfig(stop=stop, evaluate_every=10**9))
            rounds.federate(run, initial, InProcess(site), ledger, Memory())
            return time.process_time() - started, ledger

        seconds, ledger = until(stop)
        found["mb_rounds"] = resident_peak() / 1e6
        rows = [row.metrics for row in ledger.checkpoints.rows(lines=False)]
        for phase in ("plan", "train", "merge"):
            found[phase] = float(np.median([row[f"seconds_{phase}"] for row in rows]))
        found |= {"round": seconds / stop, "resume": until(stop + 1)[0], "mb_peak": resident_peak() / 1e6}
        found["mb_ledger"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()) / 1e6
    return found


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line that minimizes the squared relative errors, and return the line's value at zero and its slope."""
    slope, base = np.polyfit(x, y, 1, w=1 / np.array(y))
    return float(base), float(slope)


def sweep(what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name, clients, per_round in POINTS[what]:
        command = [sys.executable, "-m", "benchmarks.growth", "--point", name, str(clients), str(per_round)]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, check=True
        )
        found.append({"selection": name, "clients": clients, "per_round": per_round, **json.loads(done.stdout)})
        show = {k: round(v, 4) for k, v in found[-1].items() if isinstance(v, float)}
        print(f"{name:8} {per_round:6} of {clients:7}: {show}", flush=True)
    return found


FITTED = (("round", "ms a round", 1e3), ("resume", "ms to resume", 1e3), ("mb_peak", "MB", 1.0))


def fits(what: str, found: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each selector, describe how the time of a round, the time to resume and the peak memory grow with the number
    of clients."""
    key, lines = "clients" if what == "fleet" else "per_round", []
    for name in dict.fromkeys(row["selection"] for row in found):
        rows = [row for row in found if row["selection"] == name]
        x = [row[key] for row in rows]
        parts = [f"{name}: by clients of the {what}"]
        for each, unit, scale in FITTED:
            base, slope = line(x, [scale * row[each] for row in rows])
            parts.append(f"{base:.1f} + {1000 * slope:.2f} {unit} per 1000")
        lines.append(", ".join(parts))
    return lines


# ------------------------------------------------------------------------------------------------- large models
MODELS = (100, 200, 400, 800, 1300)


def sweep_models(sizes: Sequence[float] = MODELS, clients: int = 3) -> list[str]:
    """Measure models of all `sizes`. Return three lines that describe how memory grows with the model's size: for the
    coordinator of worker processes, for a worker, and for a run in one process.
    """
    found: dict[str, list[dict[str, float]]] = {"workers": [], "process": []}
    for way, rows in found.items():
        for size in sizes:
            rows.append(_model_point(size, clients, way))
            print(f"{way:8} {size:6} MB: { {k: round(v, 2) for k, v in rows[-1].items()} }", flush=True)
    lines = []
    for who, way, name in (
        ("coordinator", "workers", "mb_peak"),
        ("a worker", "workers", "mb_worker"),
        ("one process", "process", "mb_peak"),
    ):
        base, slope = line([row["mb_model"] for row in found[way]], [row[name] for row in found[way]])
        lines.append(f"{who}: {base:.0f} MB + {slope:.2f} models")
    return lines


def print_methods(size: float, clients: int = 3) -> None:
    """Measure each method in `large.METHODS` with two worker processes, and print a line for each method.

    The first columns contain the peak memory of each stage, the written bytes and the peak memory of a worker, in
    multiples of the model's size. The last column contains the coordinator's CPU seconds per round.
    """
    stages = ("assignments", "train", "updates", "merge", "evaluate", "commit", "written")
    print(" " * 8, *(f"{head:>8}" for head in (*stages, "worker", "cpu s")))
    for method in large.METHODS:
        found = _model_point(size, clients, "workers", method)
        worker = (found["mb_worker"] - found["mb_before"]) / found["mb_model"]
        row = (*(found[stage] for stage in stages), worker, found["cpu_s"])
        print(f"{method:8}", *(f"{x:8.2f}" for x in row), flush=True)


def _model_point(size: float, clients: int, way: str, method: str = "mean") -> dict[str, float]:
    argv = [sys.executable, "-m", "benchmarks.growth", "--model-point", str(size), str(clients), way, method]
    found: dict[str, float] = json.loads(subprocess.run(argv, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    return found


# ------------------------------------------------------------------------------------------------- the report
def long_run(short: Path, out: Path, count: int = LONG) -> Path:
    """Create a finished run of `count` rounds in `out`. The new rounds repeat the rounds of the run `short`, with
    randomly changed metrics."""
    rng = random.Random(0)
    out.mkdir(parents=True)
    for path in short.rglob("*.json"):
        if "rounds" not in path.parts and path.name != "manifest.json":
            (out / path.relative_to(short)).parent.mkdir(parents=True, exist_ok=True)
            (out / path.relative_to(short)).write_bytes(path.read_bytes())
    history = json.loads((out / "history.json").read_text("utf-8"))
    known, made = history["rounds"], []
    for i in range(count):
        row = known[i % len(known)]
        metrics = {k: v * rng.uniform(0.8, 1.0) if isinstance(v, float) else v for k, v in row["metrics"].items()}
        counts = {k: v for k, v in row["metrics"].items() if k.startswith(("clients_", "bytes_"))}
        made.append({**row, "round": i, "metrics": metrics | counts})
    (out / "history.json").write_text(json.dumps({**history, "rounds": made}, indent=1), encoding="utf-8")
    evaluation = json.loads((out / "evaluation.json").read_text("utf-8"))
    (out / "evaluation.json").write_text(json.dumps({**evaluation, "rounds": count}), encoding="utf-8")
    return out


SHORT = ("tracking.mlflow=null", "rounds.stop=3", "pretrain.epochs=1", "model.width=0.5")


def _short(folder: str) -> Path:
    """Run three rounds on digits and return the folder of the run."""
    _flexfleet(folder, "run", "-q", "--run-id", "short", *(word for text in SHORT for word in ("--set", text)))
    return Path(folder) / "runs" / "short"


def report_of_a_long_run() -> dict[str, float]:
    """Measure `flexfleet report` for a short and a long run.

    Return the wall-clock and CPU seconds of both reports, and the size of the long report in MB.
    """
    with tempfile.TemporaryDirectory() as folder:
        long_run(_short(folder), Path(folder) / "runs" / "long")
        found = {}
        for name in ("short", "long"):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            _flexfleet(folder, "report", f"runs/{name}", "--out", f"{name}.html")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found[f"{name}_s"] = time.perf_counter() - started
            found[f"{name}_cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found["mb"] = (Path(folder) / "long.html").stat().st_size / 1e6
    return found


# ------------------------------------------------------------------------------------------------- MLflow
LOGGED, LINES = (100, 1000, LONG), (1000, 10_000, 100_000)


def print_mlflow(rounds: Sequence[int] = LOGGED, lines: Sequence[int] = LINES) -> None:
    """Print a line for each measurement of `benchmarks.tracking`. The logged metrics are from a real round."""
    with tempfile.TemporaryDirectory() as folder:
        row = json.loads((_short(folder) / "history.json").read_text("utf-8"))["rounds"][-1]
    metrics, client = row["metrics"], row["clients"][0]
    print(f"a round has {len(metrics)} figures, a client's line {len(client)}")
    with tracking.places() as places:
        for name, uri in places.items():
            for found in (*tracking.of_rounds(uri, metrics, rounds), *tracking.of_clients(uri, client, lines)):
                print(f"{name:8}", {key: round(value, 3) for key, value in found.items()}, flush=True)


def _flexfleet(folder: str, *argv: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "flexfleet.cli.main", *argv],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--fleet", action="store_true", help="clients of the fleet")
    what.add_argument("--round", action="store_true", help="clients of a round")
    what.add_argument("--model", nargs="*", type=float, metavar="MB", help=f"model sizes (default: {MODELS})")
    what.add_argument(
        "--methods",
        nargs="?",
        type=float,
        const=MODELS[-1],
        metavar="MB",
        help="model size (default: %(const)s)",
    )
    what.add_argument("--report", action="store_true", help="the report of 10,000 rounds")
    what.add_argument("--mlflow", action="store_true", help="rounds and clients that are logged to MLflow")
    what.add_argument("--point", nargs=3, metavar=("SELECTION", "CLIENTS", "PER_ROUND"), help="one point, as JSON")
    what.add_argument("--model-point", nargs=4, metavar=("MB", "CLIENTS", "WAY", "METHOD"), help="one point, as JSON")
    args = p.parse_args(argv)
    if args.model_point:
        size, clients, way, method = args.model_point
        print(json.dumps(large.point(float(size), int(clients), way, method=method)))
    elif args.point:
        print(json.dumps(point(args.point[0], int(args.point[1]), int(args.point[2]))))
    elif args.model is not None:
        print("\n".join(sweep_models(args.model or MODELS)))
    elif args.methods is not None:
        print_methods(args.methods)
    elif args.report:
        print({name: round(value, 2) for name, value in report_of_a_long_run().items()})
    elif args.mlflow:
        print_mlflow()
    else:
        kind = "fleet" if args.fleet else "round"
        print("\n".join(fits(kind, sweep(kind))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
