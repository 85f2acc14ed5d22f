"""Measure the peak memory of training each level of FlexFL.

With `kubernetes.observe=cgroup`, flexfleet compares the peak memory of a level with the memory of a pod. M1, M2 and M3
have 25, 50 and 100 % of the parameters. Memory is in MB of 1e6 bytes:

`tensors` is the memory of live tensors, as in `benchmarks.memory`, including the batches and the received weights.
`resident` is the resident memory without the memory of an idle process (`fl_engine.training.memory.level_peaks`).
`with idle` is the resident memory including the memory of an idle process.

`KD` is self-distillation from all smaller models of the pool. M1 is the smallest model, so its memory is the same with
and without `KD`.

Usage:
    `python -m benchmarks.peaks`: Measure VGG16, ResNet34 and MobileNetV2 at batch size 50 (a few minutes).
    `python -m benchmarks.peaks --only vgg16`: Measure only VGG16.
    `python -m benchmarks.peaks --apoz half`: Use an APoZ of 0.5 for all layers instead of the APoZ in FlexFL's code.
    `python -m benchmarks.peaks --resident`: Also measure the resident memory, as the coordinator does.
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
from fl_engine.core.types import Assignment, TaskContext
from fl_engine.tasks import Classification
from fl_engine.training import memory
from fl_engine.training.local import Session, TrainingJob
from fl_engine.training.memory import LevelTrial, TrialSite
from fl_engine.training.numerics import SINGLE

BATCH = 50
STEPS = 2
"""Number of measured steps, at least 2. The optimizer creates its state only at the end of the first step."""


def trials(family: ModelFamily, algorithm: FlexFL, batch: int) -> list[LevelTrial]:
    """Return a trial for each of M1, M2 and M3, in which the client has enough memory for the received model."""
    site = pools.site_of(family, algorithm, batch)
    found = []
    for level, member in enumerate(site.pool):
        if member.dispatched:
            room = math.nextafter(100 * member.share, math.inf)
            context = TaskContext(site.layout, site.pool, site.fleet[0], room)
            task = algorithm.task(Assignment(0, 0, member.spec, {}, 0, level), context)
            found.append(LevelTrial(member.name, member.spec, task))
    return found


def tensors(family: ModelFamily, trial: LevelTrial) -> int:
    sent = memory.made_up_weights(family, trial.sent)
    start = take(sent, family.layout(), trial.task.spec, have=trial.sent)
    generator, count = torch.Generator().manual_seed(0), STEPS * trial.task.batch_size
    x, y = made_up(family, count, generator), torch.arange(count) % pools.CLASSES
    job = TrainingJob(replace(trial.task, epochs=1), start, x, y)
    goal = Classification(pools.CLASSES)
    with counted("cpu") as found, Session(family, goal, [job], SINGLE) as session:
        session.epoch()
    return found["peak"] + sum(t.nbytes for t in (*sent.values(), x, y))


def images(family: ModelFamily) -> Data:
    """Return a data set with one image in the input shape of the network."""
    x, y = torch.zeros(1, *family.input_shape, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    channels = family.input_shape[0]
    return Data("made up", Classification(pools.CLASSES), x, y, x, y, (0.5,) * channels, (0.25,) * channels)


def measured(family: ModelFamily, algorithm: FlexFL, batch: int, resident: bool) -> dict[str, list[float]]:
    """Map each kind of memory to its values in MB for M1, M2 and M3."""
    of_levels = trials(family, replace(algorithm, training=Training(fraction=1.0, batch_size=batch)), batch)
    found = {"tensors": [tensors(family, trial) / 1e6 for trial in of_levels]}
    if resident:
        prepare = partial(prepare_process, ("cpu",))
        site = TrialSite(family, images(family), memory.BATCHES * batch, SINGLE, prepare)
        peaks = memory.level_peaks(site, of_levels)
        found["resident"] = [need / 1e6 for need in peaks.needs]
        found["with idle"] = [peak / 1e6 for peak in peaks.levels]
    return found


def line(name: str, apoz: str, kd: bool, of: str, mb: Sequence[float]) -> str:
    shares = [f"{100 * each / mb[-1]:.0f} %" for each in mb[:-1]]
    columns = [name, apoz, "yes" if kd else "no", of, *(f"{each:,.0f}" for each in mb), *shares]
    return f"| {' | '.join(columns)} |"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--only", default="", help="measure only networks with this in their name")
    p.add_argument("--batch", type=count, default=BATCH, help=f"samples of a step (default: {BATCH})")
    p.add_argument("--resident", action="store_true", help="measure the memory of processes too")
    p.add_argument("--json", action="store_true", help="print one JSON object per row instead")
    p.add_argument("--apoz", choices=("authors", "half"), default="authors", help="APoZ of the pool (default: authors)")
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
