"""What denormal weights cost (numbers below 1.2e-38), and what is left of it where they count as zero.

python -m benchmarks.denormal

AEP's MLP with 45 % of the weights of three layers denormal, as FedOPT with weight decay had it after 2,037 rounds: an
evaluation on 3,947 samples, and the steps of a client of 200, without `torch.set_flush_denormal` and with it, in turn.
Prints the medians and their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from fl_engine.backends.in_process import prepare_process
from fl_engine.core.slicing import initial_params, runnable
from fl_engine.core.types import FULL, SGD, LocalTask, Params
from fl_engine.models.aep_mlp import AepMLP
from fl_engine.tasks import Regression
from fl_engine.training import local

LAYERS = ("fc3.linear.weight", "fc4.linear.weight", "fc5.linear.weight")
SHARE, DENORMAL = 0.45, 1 << 14
"""The share of these weights, and the bits of each: 2^-135."""
SAMPLES, TEST_SAMPLES, BATCH = 200, 3947, 32
TURNS = 15


def weights(family: AepMLP, generator: torch.Generator) -> Params:
    start = initial_params(family, 0)
    for name in LAYERS:
        chosen = torch.rand(start[name].shape, generator=generator) < SHARE
        start[name].view(torch.int32)[chosen] = DENORMAL  # as a number it would be zero where such count as zero
    return start


def main() -> None:
    prepare_process(("cpu",))
    family, generator = AepMLP((18,), 1), torch.Generator().manual_seed(0)
    start = weights(family, generator)
    x, y = torch.randn(TEST_SAMPLES, 18, generator=generator), torch.randn(TEST_SAMPLES, generator=generator)
    task = LocalTask(FULL, SGD(1e-6), epochs=1, batch_size=BATCH, drop_last=False, seed=0)
    job = local.Job(task, start, x[:SAMPLES], y[:SAMPLES])

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
        print(f"{name}: {1e3 * kept:.1f} ms, where they count as zero {1e3 * zero:.1f} ms: {kept / zero:.2f} x")


if __name__ == "__main__":
    main()
