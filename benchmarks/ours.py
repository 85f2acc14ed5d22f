"""Run flexfleet as a contestant: `rounds.federate` with a ledger, on two devices, without evaluation.

Usage:
    python -m benchmarks.ours W3
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gate import Gate
from benchmarks.networks import family_of
from benchmarks.workloads import MEAN, STD, Workload, chosen, normalised
from fl_engine.algorithms import AdaptiveFL, FedAvg, FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core.contracts import Algorithm, Backend
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, RoundPlan, SubmodelSpec
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site, Work, accept
from fl_engine.fleet import devices
from fl_engine.fleet.devices import Tier
from fl_engine.rounds import loop as rounds
from fl_engine.rounds.ledger import Ledger
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import FolderStore
from fl_engine.tasks import Classification, Regression
from fl_engine.testing.tiny import Memory, tiny_pool
from fl_engine.training import strategy
from fl_engine.training.numerics import Numerics, choose_precision

SEED = 0


def algorithm_of(w: Workload) -> Algorithm:
    training = Training(
        fraction=w.per_round / w.clients, epochs=w.epochs, batch_size=w.batch, lr=w.lr, momentum=w.momentum,
        weight_decay=0.0, lr_decay=1.0, drop_last=False,
    )  # fmt: skip
    if w.algorithm.startswith("flexfl"):
        return FlexFL(training=training, use_apoz=False, kd_weight=0.0 if w.algorithm.endswith("no-kd") else 10.0)
    return AdaptiveFL(training=training) if w.algorithm == "adaptivefl" else FedAvg(training=training)


def site_of(name: str, w: Workload, numerics: Numerics = Numerics()) -> tuple[Algorithm, Site]:  # noqa: B008
    algorithm, family = algorithm_of(w), family_of(name, w)
    x, y = w.data()
    if len(w.shape) == 3:
        samples, moments = torch.from_numpy(x).flatten(0, 1), ((MEAN,) * w.shape[0], (STD,) * w.shape[0])
    else:
        samples, moments = torch.from_numpy(normalised(x)).flatten(0, 1), ()
    targets = torch.from_numpy(y).flatten()
    task = Classification(w.classes) if w.classes else Regression(bins=0)
    data = Data(name, task, samples, targets, samples[:2], targets[:2], *moments)
    parts = tuple(np.arange(c * w.samples, (c + 1) * w.samples) for c in range(w.clients))
    nobody = np.zeros(0, dtype=np.int64)
    labels = y if w.classes else np.zeros(y.shape, dtype=np.int64)
    counts = np.stack([np.bincount(row, minlength=w.classes) for row in labels], axis=1)
    partition = Partition(nobody, nobody, parts, "made up", {}, name, counts)
    mixed = w.algorithm != "fedavg"
    fleet = devices.fleet("4:3:3" if mixed else (Tier("strong", 1.0, 110.0, (0.0,)),), w.clients, SEED)
    pool = tiny_pool(algorithm, family)
    return algorithm, Site(family, pool, fleet, data, partition, SEED, numerics)


def works_of(algorithm: Any, site: Site) -> Iterator[list[Work]]:
    """For each round, yield the training tasks of the clients without executing them. The weights do not change, and
    the results that the selector receives contain only the levels and sample counts of the clients.
    """
    run = Run(algorithm, site, RoundsConfig())
    state = algorithm.init(initial_params(site.family, SEED), site.layout, site.fleet, site.pool, run.server)
    levels = {member.spec: level for level, member in enumerate(site.pool)}
    for round in count():
        plan = algorithm.plan(state, run.context(round, 0.0))
        accepted: list[Work | ClientFailure] = [accept(algorithm, assignment, site) for assignment in plan.assignments]
        yield [each for each in accepted if isinstance(each, Work)]
        tables = state.tables
        for each in accepted:
            result: ClientResult = each if isinstance(each, ClientFailure) else _update(each, levels)
            assignment = plan.assignment_of[result.client]
            tables = algorithm.selector(site.pool).learn(tables, assignment, result, result.elapsed)
        state = replace(state, tables=tables)


def _update(work: Work, levels: dict[SubmodelSpec, int]) -> ClientUpdate:
    assignment, spec = work.assignment, work.task.spec
    return ClientUpdate(assignment.round, assignment.client, spec, {}, len(work.indices), {}, level=levels[spec])


class Gated:
    """Backend that waits for the gate before each round."""

    durable = False

    def __init__(self, inner: Backend, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate

    def run(self, algorithm: Algorithm, plan: RoundPlan) -> Iterator[ClientResult]:
        self._gate.round_begins()
        return self._inner.run(algorithm, plan)


def main(argv: list[str]) -> None:
    gate = Gate()
    name, w, options = chosen(argv)
    threads = tuple(options.devices)
    prepare_process(threads)
    algorithm, site = site_of(name, w)
    precision = choose_precision(options.precision, threads, None)
    numerics = strategy.choose(site.family, site.data.task, w.batch, w.per_round, precision, threads)
    site = replace(site, numerics=numerics)
    print(f"ours: {numerics} on {threads}", file=sys.stderr)
    initial: Any = algorithm.init(
        initial_params(site.family, SEED), site.family.layout(), site.fleet, site.pool, ServerSite(site)
    )
    with tempfile.TemporaryDirectory() as folder:
        rounds.federate(
            Run(algorithm, site, RoundsConfig(stop=10**9, evaluate_every=10**9), threads),
            initial,
            Gated(InProcess(site, threads), gate),
            Ledger(FolderStore(Path(folder)), None),
            Memory(),
        )


if __name__ == "__main__":
    main(sys.argv[1:])
