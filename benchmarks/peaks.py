"""Peak memory of training FlexFL's levels, of which a pod's room decides where `kubernetes.observe=cgroup`.

    python -m benchmarks.peaks                  VGG16, ResNet34 and MobileNetV2 at batch 50 (a few minutes)
    python -m benchmarks.peaks --only vgg16     those with this in their name
    python -m benchmarks.peaks --apoz half      with APoZ .5 everywhere, not that of FlexFL's code
    python -m benchmarks.peaks --resident       a process's memory too, as the coordinator measures it

Of M1, M2 and M3 (25, 50 and 100 % of the parameters), in MB of 1e6 bytes: `tensors` that are alive, as
`benchmarks.memory` counts them, with the batches and the weights that were sent; what is `resident` on top of an idle
process (`fl_engine.training.memory.level_peaks`), and `with idle` that process itself. `KD`: with self-distillation
from all smaller models of the pool, which M1 has not.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks import pools
from benchmarks.step_memory import counted
from benchmarks.workloads import count
from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.samples import Data
from fl_engine.core.slicing import made_up, take
from fl_engine.core.types import TaskContext, WorkOrder
from fl_engine.tasks import Classification
from fl_engine.training import memory
from fl_engine.training.local import Job, opened
from fl_engine.training.memory import Trial
from fl_engine.training.numerics import SINGLE

BATCH = 50
STEPS = 2
"""Whose tensors are counted: from the second on the optimiser has its state."""


def trials(family: ModelFamily, algorithm: FlexFL, batch: int) -> list[Trial]:
    """What clients do that are sent M1, M2 and M3 and have room for it."""
    site = pools.site_of(family, algorithm, batch)
    found = []
    for level, member in enumerate(site.pool):
        if member.dispatched:
            room = math.nextafter(100 * member.share, math.inf)
            context = TaskContext(site.layout, site.pool, site.fleet[0], room)
            task = algorithm.task(WorkOrder(0, 0, member.spec, {}, 0, level), context)
            found.append(Trial(member.name, member.spec, task))
    return found


def tensors(family: ModelFamily, trial: Trial) -> int:
    """Bytes of the tensors that are alive at the peak of a trial."""
    sent = memory.made_up_weights(family, trial.sent)
    start = take(sent, family.layout(), trial.task.spec, have=trial.sent)
    generator, count = torch.Generator().manual_seed(0), STEPS * trial.task.batch_size
    x, y = made_up(family, count, generator), torch.arange(count) % pools.CLASSES
    job = Job(replace(trial.task, epochs=1), start, x, y)
    goal = Classification(pools.CLASSES)
    with counted("cpu") as found, opened(family, goal, [job], SINGLE) as session:
        session.epoch()
    return found["peak"] + sum(t.nbytes for t in (*sent.values(), x, y))


def images(family: ModelFamily) -> Data:
    """Of the kind that the pools are for."""
    x, y = torch.zeros(1, *family.input_shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    channels = family.input_shape[0]
    return Data("made up", Classification(pools.CLASSES), x, y, x, y, (0.5,) * channels, (0.25,) * channels)


def measured(family: ModelFamily, algorithm: FlexFL, batch: int, resident: bool) -> dict[str, list[float]]:
    """MB of M1, M2 and M3, by what is measured."""
    of_levels = trials(family, replace(algorithm, training=Training(fraction=1.0, batch_size=batch)), batch)
    found = {"tensors": [tensors(family, trial) / 1e6 for trial in of_levels]}
    if resident:
        prepare = partial(prepare_process, ("cpu",))
        peaks = memory.level_peaks(family, images(family), of_levels, memory.BATCHES * batch, SINGLE, prepare)
        found["resident"] = [need / 1e6 for need in peaks.needs]
        found["with idle"] = [peak / 1e6 for peak in peaks.levels]
    return found


def line(name: str, apoz: str, kd: bool, of: str, mb: Sequence[float]) -> str:
    """A row of the table, in Markdown."""
    shares = [f"{100 * each / mb[-1]:.0f} %" for each in mb[:-1]]
    columns = [name, apoz, "yes" if kd else "no", of, *(f"{each:,.0f}" for each in mb), *shares]
    return f"| {' | '.join(columns)} |"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="part of a network's name")
    p.add_argument("--batch", type=count, default=BATCH, help=f"samples of a step (default: {BATCH})")
    p.add_argument("--resident", action="store_true", help="measure processes too")
    p.add_argument("--json", action="store_true", help="print one JSON object a row instead")
    p.add_argument("--apoz", choices=("authors", "half"), default="authors", help="whose pool (default: authors)")
    args = p.parse_args()
    torch.set_num_threads(1)
    if not args.json:
        head = ("network", "APoZ", "KD", "MB of", "M1", "M2", "M3", "M1 / M3", "M2 / M3")
        print(
            f"| {' | '.join(head)} |", f"| --- | --- | --- | --- |{' ---: |' * (len(head) - 4)}", sep="\n", flush=True
        )
    for name, family in pools.FAMILIES.items():
        scores = pools.APOZ[name] if args.apoz == "authors" else (0.5,) * len(family.prunable())
        for kd in (False, True) if args.only in name else ():
            algorithm = FlexFL(apoz=scores) if kd else FlexFL(apoz=scores, kd_weight=0.0)
            found = measured(family, algorithm, args.batch, args.resident)
            if args.json:
                print(json.dumps({"network": name, "apoz": args.apoz, "kd": kd, "mb": found}), flush=True)
            else:
                print(*(line(name, args.apoz, kd, of, mb) for of, mb in found.items()), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
