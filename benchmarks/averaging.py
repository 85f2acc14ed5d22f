"""Compare the memory throughput of averaging updates with the throughput of a plain copy.

Adding one float32 update to float64 sums moves 20 bytes per parameter (4 + 8 bytes are read, 8 bytes are written).
Copying float64 numbers moves 16 bytes per number.

Usage:
    python -m benchmarks.averaging
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch

from fl_engine.aggregation.averaging import StreamingMean
from fl_engine.backends.in_process import prepare_process
from fl_engine.core.costs import count_params
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import FULL
from fl_engine.core.widths import prefix
from fl_engine.models import VGG16


def seconds(work: Callable[[], object], turns: int = 9) -> float:
    """Return the median seconds of `turns` calls of `work`, after one call as a warm-up."""
    work()
    taken = []
    for _ in range(turns):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.averaging", description=__doc__)
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args(argv)
    prepare_process(("cpu",))
    torch.set_num_threads(args.threads)
    family = VGG16((3, 32, 32), 10)
    layout, full = family.layout(), initial_params(family, 0)
    size = count_params(family)
    source, target = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    copy = 16 * size / seconds(lambda: target.copy_(source)) / 1e9
    print(f"copy: {copy:.1f} GB/s, {args.threads} thread(s); VGG16, {size / 1e6:.1f} million parameters")
    for name, spec in (("whole models", FULL), ("half of the channels", prefix(layout, 0.5))):
        update = {key: t.clone() for key, t in take(full, layout, spec).items()}
        mean = StreamingMean(full, layout)

        def add(mean: StreamingMean = mean, update: dict[str, torch.Tensor] = update, spec: object = spec) -> None:
            mean.add(update, spec, 1.0)  # type: ignore[arg-type]

        rate = 20 * sum(t.numel() for t in update.values()) / seconds(add) / 1e9
        print(f"adding {name}: {rate:.1f} GB/s, {rate / copy:.0%} of the copy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
