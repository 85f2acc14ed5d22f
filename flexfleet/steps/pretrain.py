"""Step 2: pre-train the global model on the proxy and measure APoZ (FlexFL Sec. III-A, steps 1 and 2).

Only the scores are kept, not the weights. The step trains only for algorithms that need scores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import torch

from fl_engine.backends.in_process import check_device
from fl_engine.core import pool, seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import PartitionError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, Adam, LocalTask, Params
from fl_engine.data import partitioning as partitions
from fl_engine.training import local
from fl_engine.training.evaluation import evaluate
from flexfleet.config import Config
from flexfleet.files import terminal as common
from flexfleet.files.artifacts import Apoz, ApozLayer
from flexfleet.steps.prepare import Resolved, resolved_of

log = logging.getLogger("flexfleet")

PROXY_TEST_SHARE = 0.2


def pretrain(resolved: Resolved, partition: Path, out: Path) -> Path:
    """Writes apoz.json into `out`: a score and an adjustment weight for each layer that can be pruned."""
    config = resolved.config
    if not resolved.algorithm.needs_apoz:
        log.info("pretrain: %s asks for no APoZ, nothing to do", config.algorithm["name"])
        return Apoz(layers=()).write(out / "apoz.json")
    started = time.monotonic()
    data, family = resolved.data, resolved.family
    parts = partitions.load(partition, data)
    need_proxy(parts)
    check_device(config.run.devices[0])
    params, scores = _scores(config, data, family, parts.proxy_train, parts.proxy_test)
    held_out = torch.from_numpy(parts.proxy_test)
    device = config.run.devices[0]
    score = evaluate(family, params, FULL, data, data.train_x[held_out], data.train_y[held_out], device)
    reference = None
    if config.pretrain.reference:
        everything = seeds.rng(config.seed, "reference").permutation(len(data.train_y))
        cut = round(PROXY_TEST_SHARE * len(everything))
        _, reference = _scores(config, data, family, everything[cut:], everything[:cut])
    sizes = pool.layer_sizes(family)
    layers = zip(family.prunable(), sizes, scores, pool.adjustment_weights(sizes), strict=True)
    return Apoz(
        layers=tuple(ApozLayer(group=p.group, size=n, apoz=a, adjustment=w) for p, n, a, w in layers),
        reference=reference,
        proxy_samples=len(parts.proxy_train) + len(parts.proxy_test),
        proxy_accuracy=score.value if isfinite(score.value) else None,
        seconds=round(time.monotonic() - started, 3),
    ).write(out / "apoz.json")


def need_proxy(parts: partitions.Partition) -> None:
    """Raises PartitionError if the server holds no samples to measure on."""
    if not len(parts.proxy_train) or not len(parts.proxy_test):
        raise PartitionError(
            "the algorithm measures APoZ on proxy data, and partition.proxy leaves the server none: raise it, "
            "or set algorithm.use_apoz=false"
        )


def _scores(
    config: Config, data: Data, family: ModelFamily, train: np.ndarray, held_out: np.ndarray
) -> tuple[Params, tuple[float, ...]]:
    device = config.run.devices[0]
    task = LocalTask(
        spec=FULL,
        optimizer=Adam(config.pretrain.lr),
        epochs=config.pretrain.epochs,
        batch_size=config.pretrain.batch_size,
        drop_last=True,
        seed=seeds.derive(config.seed, "pretrain"),
    )
    start = {k: v.to(device) for k, v in initial_params(family, seeds.derive(config.seed, "init")).items()}
    chosen = torch.from_numpy(np.sort(train))
    x, y = data.normalise(data.train_x[chosen].to(device)), data.train_y[chosen].to(device)
    log.info("pretrain: %d samples, %d epochs", len(y), task.epochs)
    trained = local.train(family, data.task, [local.Job(task, start, x, y)])[0]
    x_held_out = data.normalise(data.train_x[torch.from_numpy(np.sort(held_out))].to(device))
    return trained.params, pool.measure_apoz(family, trained.params, x_held_out)


def main(argv: Sequence[str] | None = None) -> int:
    p = common.step_parser(__doc__ or "", partition="partition")
    args = p.parse_args(argv)
    print(pretrain(resolved_of(args), args.partition, args.out))
    return 0


if __name__ == "__main__":
    common.run_main(main)
