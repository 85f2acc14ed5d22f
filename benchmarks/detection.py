"""Check that point_detector can learn from real images. The network is trained centrally on 20 images of VisDrone.

The script requires VisDrone's validation images (`flexfleet fetch visdrone` prints their source). Training uses
`fl_engine.training.central` on one core. The score is measured on the training images. Therefore the score shows that
the network, the loss and the metric work together, but not how well the detector generalizes. The script prints one
line of JSON with the mAP-50 of the last and of the best epoch, and the CPU seconds.

Usage:
    python -m benchmarks.detection [--images 20] [--epochs 120] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import replace

import torch

from fl_engine.core.costs import count_macs, count_params
from fl_engine.core.slicing import initial_params
from fl_engine.core.steps import Cosine
from fl_engine.core.types import FULL, Adam, LocalTask
from fl_engine.datasets import DATASETS, data_root
from fl_engine.models.point_detector import PointDetector
from fl_engine.training.central import train_centrally


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--images", type=int, default=20)
    options.add_argument("--epochs", type=int, default=120)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    whole = DATASETS["visdrone"].load(data_root())
    x, y = whole.train_x[: args.images], whole.train_y[: args.images]
    data = replace(whole, train_x=x, train_y=y, test_x=x, test_y=y, natural_client=None)
    family = PointDetector(data.input_shape, data.task.outputs)
    task = LocalTask(FULL, Adam(1e-3), args.epochs, 2, drop_last=False, seed=args.seed, schedule=Cosine())
    began = time.process_time()
    scores = [e.score.value for e in train_centrally(family, data, task, initial_params(family, args.seed))]
    print(
        json.dumps(
            {
                "images": len(x),
                "boxes": int((y[..., 0] >= 0).sum()),
                "params": count_params(family),
                "macs": count_macs(family),
                "epochs": args.epochs,
                "map50": round(scores[-1], 4),
                "best": round(max(scores), 4),
                "cpu_seconds": round(time.process_time() - began),
            }
        )
    )


if __name__ == "__main__":
    main()
