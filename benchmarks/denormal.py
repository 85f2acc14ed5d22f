"""Measure how much denormal weights (below 1.2e-38) slow down training and evaluation if they are not flushed to zero.

The network is AEP's MLP. In three layers, 45 % of the weights are denormal, as after 2,037 rounds of FedOPT with weight
decay. The script measures an evaluation on 3,947 samples and the training of a client with 200 samples. Both tasks run
alternately with and without `torch.set_flush_denormal`. The script prints the median times and their ratio.

Usage:
    python -m benchmarks.denormal
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fl_engine.backends.in_process import prepare_process
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL, SGD, LocalTask, Params
from fl_engine.models.chains import AepMLP
from fl_engine.tasks import Regression
from fl_engine.training import local

LAYERS = ("fc3.linear.weight", "fc4.linear.weight", "fc5.linear.weight")
SHARE, DENORMAL = 0.45, 1 << 14
"""Fraction of denormal weights, and the bit pattern of a denormal weight (2^-135)."""
SAMPLES, TEST_SAMPLES, BATCH = 200, 3947, 32
TURNS = 15


def weights(family: AepMLP, generator: torch.Generator) -> Params:
    start = initial_params(family, 0)
    for name in LAYERS:
        chosen = torch.rand(start[name].shape, generator=generator) < SHARE
        start[name].view(torch.int32)[chosen] = DENORMAL  # set bits, because a denormal float may be flushed to zero
    return start


def main() -> None:
    prepare_process(("cpu",))
    family, generator = AepMLP((18,), 1), torch.Generator().manual_seed(0)
    start = weights(family, generator)
    x, y = torch.randn(TEST_SAMPLES, 18, generator=generator), torch.randn(TEST_SAMPLES, generator=generator)
    task = LocalTask(FULL, SGD(1e-6), epochs=1, batch_size=BATCH, drop_last=False, seed=0)
    job = local.TrainingJob(task, start, x[:SAMPLES], y[:SAMPLES])

    def evaluation() -> None:
        network = runnable(family, FULL, start).eval()
        with torch.no_grad():
            for batch in x.split(500):
                network(batch)

    parts: dict[str, Callable[[], object]] = {
        "evaluation": evaluation,
        "training": lambda: local.train(family, Regression(), [job]),
    }
    taken: dict[tuple[str, bool], list[float]] = {(name, flush): [] for name in parts for flush in (False, True)}
    for _ in range(TURNS):
        for (name, flush), seconds in taken.items():
            torch.set_flush_denormal(flush)
            started = time.thread_time()
            parts[name]()
            seconds.append(time.thread_time() - started)
    for name in parts:
        kept, zero = (statistics.median(taken[name, flush]) for flush in (False, True))
        print(f"{name}: {1e3 * kept:.1f} ms, flushed to zero {1e3 * zero:.1f} ms: {kept / zero:.2f} x")


if __name__ == "__main__":
    main()
