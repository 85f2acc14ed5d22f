"""Seconds of FlexFL's adaptive pruning on a device (AdaPrune) beside those of local training: FlexFL's Table IX.

    python -m benchmarks.adaprune                                   VGG16, ResNet34 and MobileNetV2 (many minutes)
    python -m benchmarks.adaprune --only vgg16 --repeats 1          those with this in their name, measured once

For each dispatched model it measures a client that has too little free for it and trains the next smaller model of the
pool, as in the paper's table; the smallest is never cut. Pruning: choosing the model by what is free, and copying its
weights out of those received. Training: batches of 50 images of 32 x 32 in 10 classes (noise), forward, backward and
step, with self-distillation from all smaller models and without. Training's seconds are for a round as in the paper:
500 samples, 5 epochs, so 50 batches, from those of `--batches`. The pool is that of APoZ .5 everywhere, whose sizes are
the paper's targets.

CPU seconds of one thread, so that other programs on the machine count little; medians of `--repeats`.
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
from fl_engine.core.types import ClientFailure, Params, WorkOrder
from fl_engine.exchange.client import Site, Work, accept, train

PUBLISHED = {
    ("vgg16", "M3"): (1.45, 108.59, 64.17),
    ("vgg16", "M2"): (1.45, 73.92, 52.88),
    ("vgg16", "M1"): (0, 46.06, 45.77),
}
"""Table IX: seconds of pruning, and of training with and without self-distillation. M1, M2 and M3 have 25, 50 and 100 %
of the parameters."""
BATCH, BATCHES = 50, 50
"""Samples of a batch, and batches of a round: 500 samples, 5 epochs."""


@dataclass(frozen=True)
class Times:
    """Seconds of one client in a round."""

    sent: str
    trained: str
    pruning: float
    training: float
    """With self-distillation."""
    alone: float
    """Training without."""

    @property
    def share(self) -> float:
        """Of pruning in pruning and training, in %."""
        return 100 * self.pruning / (self.pruning + self.training)


def measured(family: ModelFamily, batches: int, repeats: int) -> list[Times]:
    """A row for each dispatched model, the largest first."""
    algorithm = FlexFL(training=Training(fraction=1.0, epochs=1, batch_size=BATCH))
    alone = replace(algorithm, kd_weight=0.0)
    site = pools.site_of(family, algorithm, batches * BATCH)
    whole = initial_params(family, 0)
    rows = []
    for sent in reversed(range(len(site.pool))):
        if site.pool[sent].dispatched:
            trained = max(0, sent - 1)
            free = math.nextafter(100 * site.pool[trained].share, math.inf)
            order = _order(site, whole, sent)
            here = replace(site, free=free)
            pruning = _median(repeats, partial(_pruned, algorithm, order, here))
            training, without = (_median(repeats, _training(each, order, here)) for each in (algorithm, alone))
            whole_round, names = BATCHES / batches, (site.pool[sent].name, site.pool[trained].name)
            rows.append(Times(*names, pruning, whole_round * training, whole_round * without))
    return rows


def _order(site: Site, whole: Params, sent: int) -> WorkOrder:
    """What a client receives: weights in memory of their own."""
    spec = site.pool[sent].spec
    payload = {name: tensor.clone() for name, tensor in take(whole, site.layout, spec).items()}
    return WorkOrder(0, 0, spec, payload, 0, sent)


def _pruned(algorithm: FlexFL, order: WorkOrder, site: Site) -> Params:
    """The weights to train, in memory of their own, so that what was received can be dropped."""
    start = _accepted(algorithm, order, site).start
    return {name: t if t.nbytes == t.untyped_storage().nbytes() else t.clone() for name, t in start.items()}


def _accepted(algorithm: FlexFL, order: WorkOrder, site: Site) -> Work:
    work = accept(algorithm, order, site)
    assert not isinstance(work, ClientFailure), work
    return work


def _training(algorithm: FlexFL, order: WorkOrder, site: Site) -> Callable[[], object]:
    work = _accepted(algorithm, order, site)

    def run() -> object:
        (outcome,) = train([work], site)
        assert not isinstance(outcome, ClientFailure), outcome
        return outcome

    return run


def _median(repeats: int, run: Callable[[], object]) -> float:
    """CPU seconds."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def line(name: str, row: Times) -> str:
    """A row of the table, in Markdown."""
    ours = f"{row.pruning:.3f} | {row.training:.1f} | {row.alone:.1f} | {row.share:.2f} %"
    theirs = " | ".join(["-"] * 4)
    if (published := PUBLISHED.get((name, row.sent))) is not None:
        pruning, training, alone = published
        theirs = f"{pruning:.2f} | {training:.2f} | {alone:.2f} | {100 * pruning / (pruning + training):.1f} %"
    return f"| {name} | {row.sent} | {row.trained} | {ours} | {theirs} |"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="part of a network's name")
    p.add_argument("--batches", type=count, default=2, help="batches that are trained (default: 2)")
    p.add_argument("--repeats", type=count, default=3, help="measurements of each (default: 3)")
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
