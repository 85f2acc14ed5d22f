"""Measure the time of FlexFL's adaptive pruning on a device (AdaPrune) and of local training (FlexFL, Table IX).

For each dispatched model, the benchmark assumes that the client has too little free memory and trains the next smaller
model of the pool, as in the paper. The smallest model is never pruned.

Pruning chooses the model that fits into the free memory, and copies its weights from the received weights. Training is
measured with and without self-distillation from all smaller models. Batches have 50 random images of 32 x 32 pixels in
10 classes. The benchmark trains `--batches` batches and scales the time to the paper's round of 50 batches (500
samples, 5 epochs). The pool uses an APoZ of 0.5 for all layers, so that the models have the paper's target sizes.

All times are CPU seconds of one thread, because other programs hardly affect CPU time. Each time is the median of
`--repeats` measurements.

Usage:
    `python -m benchmarks.adaprune`: Measure VGG16, ResNet34 and MobileNetV2 (takes many minutes).
    `python -m benchmarks.adaprune --only vgg16 --repeats 1`: Measure only VGG16, without repetitions.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks import pools
from benchmarks.workloads import count
from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import Assignment, ClientFailure, Params
from fl_engine.exchange.client import Site, Work, accept, train

PUBLISHED = {
    ("vgg16", "M3"): (1.45, 108.59, 64.17),
    ("vgg16", "M2"): (1.45, 73.92, 52.88),
    ("vgg16", "M1"): (0, 46.06, 45.77),
}
"""Seconds in Table IX for pruning, for training with self-distillation, and for training without it.

M1, M2 and M3 have 25, 50 and 100 % of the parameters."""
BATCH, BATCHES = 50, 50
"""Number of samples in a batch, and number of batches in a round (500 samples, 5 epochs)."""


@dataclass(frozen=True)
class Times:
    """CPU seconds of one client in a round."""

    sent: str
    trained: str
    pruning: float
    training: float
    """Training with self-distillation."""
    alone: float
    """Training without self-distillation."""

    @property
    def share(self) -> float:
        """Pruning time in % of the total time for pruning and training."""
        return 100 * self.pruning / (self.pruning + self.training)


def measured(family: ModelFamily, batches: int, repeats: int) -> list[Times]:
    algorithm = FlexFL(training=Training(fraction=1.0, epochs=1, batch_size=BATCH))
    alone = replace(algorithm, kd_weight=0.0)
    site = pools.site_of(family, algorithm, batches * BATCH)
    whole = initial_params(family, 0)
    rows = []
    for sent in reversed(range(len(site.pool))):
        if site.pool[sent].dispatched:
            trained = max(0, sent - 1)
            free = math.nextafter(100 * site.pool[trained].share, math.inf)
            assignment = _assignment(site, whole, sent)
            here = replace(site, free=free)
            pruning = _median(repeats, partial(_pruned, algorithm, assignment, here))
            training, without = (_median(repeats, _training(each, assignment, here)) for each in (algorithm, alone))
            whole_round, names = BATCHES / batches, (site.pool[sent].name, site.pool[trained].name)
            rows.append(Times(*names, pruning, whole_round * training, whole_round * without))
    return rows


def _assignment(site: Site, whole: Params, sent: int) -> Assignment:
    """Return a client's assignment with a copy of the weights."""
    spec = site.pool[sent].spec
    payload = {name: tensor.clone() for name, tensor in take(whole, site.layout, spec).items()}
    return Assignment(0, 0, spec, payload, 0, sent)


def _pruned(algorithm: FlexFL, assignment: Assignment, site: Site) -> Params:
    """Return the pruned weights as copies, so that the memory of the received weights can be freed."""
    start = _accepted(algorithm, assignment, site).start
    return {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in start.items()}


def _accepted(algorithm: FlexFL, assignment: Assignment, site: Site) -> Work:
    work = accept(algorithm, assignment, site)
    assert not isinstance(work, ClientFailure), work
    return work


def _training(algorithm: FlexFL, assignment: Assignment, site: Site) -> Callable[[], object]:
    work = _accepted(algorithm, assignment, site)

    def run() -> object:
        (result,) = train([work], site)
        assert not isinstance(result, ClientFailure), result
        return result

    return run


def _median(repeats: int, run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def line(name: str, row: Times) -> str:
    ours = f"{row.pruning:.3f} | {row.training:.1f} | {row.alone:.1f} | {row.share:.2f} %"
    theirs = " | ".join(["-"] * 4)
    if (published := PUBLISHED.get((name, row.sent))) is not None:
        pruning, training, alone = published
        theirs = f"{pruning:.2f} | {training:.2f} | {alone:.2f} | {100 * pruning / (pruning + training):.1f} %"
    return f"| {name} | {row.sent} | {row.trained} | {ours} | {theirs} |"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="measure only networks with this in their name")
    p.add_argument("--batches", type=count, default=2, help="batches to train (default: 2)")
    p.add_argument("--repeats", type=count, default=3, help="measurements of each time (default: 3)")
    p.add_argument("--json", action="store_true", help="print one JSON object instead: the rows by network")
    args = p.parse_args()
    torch.set_num_threads(1)
    found = {}
    if not args.json:
        ours = ("AdaPrune, s", "training, s", "without KD, s", "AdaPrune's share")
        head = ("network", "sent", "trained", *ours, "Table IX AdaPrune", "training", "without KD", "share")
        print(f"| {' | '.join(head)} |", f"| --- | --- | --- |{' ---: |' * (len(head) - 3)}", sep="\n", flush=True)
    for name, family in pools.FAMILIES.items():
        if args.only in name:
            found[name] = measured(family, args.batches, args.repeats)
            if not args.json:
                print(*(line(name, row) for row in found[name]), sep="\n", flush=True)
    if args.json:
        print(json.dumps({name: [{**vars(row), "share": row.share} for row in rows] for name, rows in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
