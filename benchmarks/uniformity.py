"""Simulate how uniformly and how fast the clients of a round finish, with and without multi-branch networks and Oort.

Clients do not train. The simulation uses flexfleet's selectors, Tier Clustering Algorithm, device trace, simulated
clock and sizes of MB-ResNet34. The loss of a client, which Oort's utility requires, is synthetic. The initial loss is
random and is multiplied by 0.9 each time the client participates.

As in the paper's section 5, 100 of 2,800 clients are selected in each of 1,000 rounds. The paper is "Enhancing
Communication Efficiency and Training Time Uniformity in Federated Learning through Multi-Branch Networks and the Oort
Algorithm" (Algorithms, MDPI, January 2024). The paper reports a uniformity of 532 without branches and 313 with
branches, but neither the unit nor the method of client selection. A client trains 20 steps of 30 samples (as in Oort's
code), or one epoch if it has fewer samples. Speeds, bandwidths and online times are assumed (`DEVICES`).

Usage:
    python -m benchmarks.uniformity [--json]      (five minutes of one core)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.workloads import count
from fl_engine.algorithms.fedavg import FedAvg
from fl_engine.algorithms.multibranch import MultiBranch, in_tiers
from fl_engine.core import seeds
from fl_engine.core.contracts import Selector
from fl_engine.core.costs import FORWARDS_PER_STEP
from fl_engine.core.types import FULL, Assignment, ClientUpdate, Device, Pool, RoundContext
from fl_engine.fleet import trace as traces
from fl_engine.fleet.lognormal import LogNormal
from fl_engine.fleet.trace import Trace
from fl_engine.models.resnet import ResNet34
from fl_engine.rounds.timing import uniformity
from fl_engine.selection import Oort, Uniform
from fl_engine.testing.tiny import tiny_pool

CLIENTS, ASKED, ROUNDS, SEED = 2800, 100, 1000, 0
MOST_SAMPLES = 20 * 30
DEVICES = LogNormal(speed=10.0, bandwidth=10.0)
"""The medians are 10^10 multiply-adds per second, 10 Mbit/s, an hour online and an hour offline."""
FADES = 0.9
CORRELATIONS = (0.0, 0.5, 0.9)
MUS = (0.0, 0.5, 1.0, 2.0, 1e6)
PRINTED = (532, 313)
OORT = Oort(model="largest", share_limit=None)


@dataclass(frozen=True)
class Row:
    """Results of one variant. The first four values are means over the rounds, in simulated seconds."""

    uniformity: float
    compute: float
    communication: float
    round_s: float
    dropped: float
    """Mean number of clients per round that went offline before they finished."""
    samples: tuple[float, ...]
    """Total number of samples that clients processed until the end of each round."""
    clock: tuple[float, ...]
    """Simulated seconds at the end of each round."""

    def until(self, samples: float) -> float:
        """Return the simulated seconds until all clients together have processed `samples` samples."""
        return self.clock[int(np.searchsorted(self.samples, samples))]


@dataclass(frozen=True)
class World:
    """Data that all variants share: devices, their trace, and the sample counts and initial losses of clients."""

    fleet: tuple[Device, ...]
    trace: Trace
    samples: tuple[int, ...]
    draws: tuple[int, ...]
    losses: np.ndarray


def world(devices: LogNormal, clients: int = CLIENTS, seed: int = SEED) -> World:
    rng = seeds.rng(seed, "uniformity")
    samples = tuple(int(n) for n in np.clip(rng.lognormal(np.log(200), 0.8, clients), 10, 5000))
    fleet = tuple(Device(c, "all", 1000.0, 0.0) for c in range(clients))
    draws = tuple(min(n, MOST_SAMPLES) for n in samples)
    return World(fleet, devices.trace(fleet, samples, seed), samples, draws, rng.lognormal(0.0, 0.5, clients))


def correlated(r: float) -> LogNormal:
    """Return a fleet in which fast devices have better connections and more samples, and are online more often. `r` is
    the correlation of these properties."""
    return replace(DEVICES, speed_bandwidth=r, speed_data=r, speed_online=r, data_online=r)


@lru_cache(maxsize=1)
def pools() -> tuple[Pool, Pool]:
    family, branches = ResNet34((3, 32, 32), 10), MultiBranch()
    return tiny_pool(FedAvg(), family), tiny_pool(branches, branches.network(family))


def simulated(
    where: World, selection: Selector, pool: Pool, mu: float | None, rounds: int = ROUNDS, asked: int = ASKED
) -> Row:
    """Simulate the rounds of one variant. `mu` is the parameter of the Tier Clustering Algorithm. If `mu` is None, all
    clients get the largest model."""
    tables, clock, trained = selection.init(where.fleet, pool), 0.0, 0.0
    taken = np.zeros(len(where.fleet), dtype=int)
    seen: dict[str, list[float]] = {name: [] for name in ("uniformity", "compute", "communication", "round_s")}
    samples, clocks, dropped = list[float](), list[float](), 0
    for round in range(rounds):
        while not where.trace.now(clock).online.any():
            clock = where.trace.arrives(clock)
        here = traces.online(where.fleet, where.trace.now(clock))
        context = RoundContext(round, SEED, where.fleet, here, pool, clock, samples=where.samples, draws=where.draws)
        picks = selection.pick(tables, context, asked, seeds.rng(SEED, "select", round))
        took = []
        for client, level in picks if mu is None else in_tiers(picks, context, mu):
            model = pool[level]
            macs = FORWARDS_PER_STEP * model.macs * where.draws[client]
            found = traces.took(where.trace, client, clock, model.bytes, macs, model.bytes_up)
            if found is None:
                dropped += 1
                continue
            took.append(found)
            loss = float(where.losses[client] * FADES ** taken[client])
            taken[client] += 1
            trained += where.draws[client]
            assignment = Assignment(round, client, FULL, {}, 0, level)
            update = ClientUpdate(
                round, client, FULL, {}, where.samples[client], {"rms_loss": loss}, level, found.total
            )
            tables = selection.learn(tables, assignment, update, found.total)
        length = max((t.total for t in took), default=0.0)
        clock = clock + length if took else where.trace.arrives(clock)
        if took:
            seen["uniformity"].append(uniformity([t.total for t in took]))
            seen["compute"].append(uniformity([t.compute for t in took]))
            seen["communication"].append(uniformity([t.communication for t in took]))
            seen["round_s"].append(length)
        samples.append(trained)
        clocks.append(clock)
    means = {name: fmean(values) for name, values in seen.items()}
    return Row(**means, dropped=dropped / rounds, samples=tuple(samples), clock=tuple(clocks))


def four(where: World, rounds: int) -> dict[str, Row]:
    whole, branches = pools()
    rows: dict[str, tuple[Selector, Pool, float | None]] = {
        "random": (Uniform(model="largest"), whole, None),
        "mb_random": (Uniform(model="largest"), branches, 1.0),
        "oort": (OORT, whole, None),
        "mb_oort": (OORT, branches, 1.0),
    }
    return {name: simulated(where, *row, rounds=rounds) for name, row in rows.items()}


def summary(rows: Mapping[str, Row]) -> dict[str, Any]:
    """Map each metric to {variant: value}. `seconds_to_samples` is the time until the clients of a variant have
    processed half as many samples as the slowest variant processes in total.
    """
    half = min(row.samples[-1] for row in rows.values()) / 2
    figures = ("uniformity", "compute", "communication", "round_s", "dropped")
    found: dict[str, Any] = {f: {name: getattr(row, f) for name, row in rows.items()} for f in figures}
    found["seconds_to_samples"] = {name: row.until(half) for name, row in rows.items()}
    u = found["uniformity"]
    found["ratio"] = {"oort": u["mb_oort"] / u["oort"], "random": u["mb_random"] / u["random"]}
    return found


def measured(rounds: int, correlations: Sequence[float] = CORRELATIONS, mus: Sequence[float] = MUS) -> dict[str, Any]:
    by_correlation = {r: summary(four(world(correlated(r)), rounds)) for r in correlations}
    _, branches = pools()
    where = world(correlated(correlations[0]))
    by_mu = {mu: simulated(where, OORT, branches, mu, rounds).uniformity for mu in mus}
    return {
        **by_correlation[correlations[0]],
        "printed": dict(zip(("without", "with", "ratio"), (*PRINTED, PRINTED[1] / PRINTED[0]), strict=True)),
        "correlation": {f"{r:g}": found for r, found in by_correlation.items()},
        "mu": {("only P" if mu >= 1e6 else f"{mu:g}"): value for mu, value in by_mu.items()},
    }


def as_markdown(found: Mapping[str, Any]) -> str:
    """Format the metrics as Markdown tables."""
    names = ("random", "mb_random", "oort", "mb_oort")
    head = ["| correlation | | " + " | ".join(names) + " | mb_random / random | mb_oort / oort |"]
    head.append("| ---: | --- |" + " ---: |" * 6)
    labels = {
        "uniformity": "uniformity, s", "compute": "of computing, s", "communication": "of communication, s",
        "round_s": "a round, s", "dropped": "dropped out of 100", "seconds_to_samples": "to the same samples, h",
    }  # fmt: skip
    for r, rows in found["correlation"].items():
        for figure, label in labels.items():
            scale = 3600 if figure == "seconds_to_samples" else 1
            values = [rows[figure][name] / scale for name in names]
            ratios = [values[1] / values[0], values[3] / values[2]] if values[0] and values[2] else [float("nan")] * 2
            head.append(f"| {r} | {label} | " + " | ".join(f"{v:.1f}" for v in values)
                        + " | " + " | ".join(f"{v:.2f}" for v in ratios) + " |")  # fmt: skip
    head += ["", "| mu | " + " | ".join(found["mu"]) + " |", "| --- |" + " ---: |" * len(found["mu"])]
    head.append("| uniformity of mb_oort, s | " + " | ".join(f"{v:.1f}" for v in found["mu"].values()) + " |")
    p = found["printed"]
    head += ["", f"printed: {p['without']} without branches, {p['with']} with: {p['ratio']:.2f}"]
    return "\n".join(head)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    p.add_argument("--rounds", type=count, default=ROUNDS, help=f"rounds of each row (default: {ROUNDS})")
    args = p.parse_args()
    found = measured(args.rounds)
    print(json.dumps(found) if args.json else as_markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
