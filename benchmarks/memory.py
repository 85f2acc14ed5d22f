"""Measure the memory of a training step of FedAIoT's networks, as in Table 2.6 of the thesis.

The precisions are fp32, amp and fp16. Only the memory of tensors is measured (`benchmarks.step_memory`), in MB of 1e6
bytes. Table 2.6 contains the memory of centralised training on a GPU, including the memory of CUDA, and does not state
the batch size.

Usage:
    `python -m benchmarks.memory`: Measure seven networks at batch size 32 on the CPU (a few minutes).
    `python -m benchmarks.memory --device cuda --only wisdm`: Measure only networks whose name contains wisdm, on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch

from benchmarks.step_memory import step_memory
from benchmarks.workloads import count
from fl_engine.backends.in_process import check_device
from fl_engine.core.contracts import ModelFamily, PublishedFor
from fl_engine.core.task import Task
from fl_engine.models import MODELS
from fl_engine.tasks import Classification, Detection, Regression
from fl_engine.training.numerics import Numerics, Precision

PUBLISHED: dict[str, tuple[int, int] | None] = {
    "wisdm_lstm": (1444, 564),
    "aep_mlp": (1201, 500),
    "casas_bilstm": (1834, 732),
    "uthar_resnet18": (1716, 639),
    "widar_resnet18": (1734, 636),
    "epic_resnet18": (2176, 936),
    "point_detector": None,
}
"""MB in FP32 and FP16 (Table 2.6). point_detector has no value, because the thesis measured another detector."""
MOST = 100
PRECISIONS: tuple[Precision, ...] = ("fp32", "amp", "fp16")


def measured(name: str, batch: int, device: str) -> dict[str, float]:
    """Measure a training step of a network, and return the MB for each precision."""
    kind: Any = MODELS[name]
    assert isinstance(kind, PublishedFor)
    family: ModelFamily = kind(kind.published_input, kind.published_outputs)  # type: ignore[call-arg]
    goal: Task
    if name == "point_detector":
        goal = Detection(kind.published_outputs - 4, MOST)
    else:
        goal = Regression() if kind.published_outputs == 1 else Classification(kind.published_outputs)
    numerics = {precision: Numerics(precision=precision) for precision in PRECISIONS}
    return {p: step_memory(family, goal, batch, n, device) / 1e6 for p, n in numerics.items()}


def line(name: str, mb: dict[str, float]) -> str:
    ours = [f"{mb[p]:,.1f}" for p in PRECISIONS] + [less(mb["fp16"], mb["fp32"])]
    theirs = ["-"] * 3
    if (published := PUBLISHED[name]) is not None:
        full, half = published
        theirs = [f"{full:,}", f"{half:,}", less(half, full)]
    return f"| {name} | " + " | ".join([*ours, *theirs]) + " |"


def less(small: float, large: float) -> str:
    return f"{100 * (small / large - 1):+.1f} %"


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    p.add_argument("--batch", type=count, default=32, help="samples of the step (default: 32)")
    p.add_argument("--only", default="", help="measure only networks with this in their name")
    p.add_argument("--json", action="store_true", help="print one JSON object instead: MB by network and precision")
    args = p.parse_args()
    check_device(args.device)
    torch.set_num_threads(1)
    found = {}
    if not args.json:
        ours, theirs = ("fp32", "amp", "fp16", "fp16 against fp32"), ("Table 2.6 FP32", "FP16", "FP16 against FP32")
        head = ("network", *ours, *theirs)
        print(f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}", sep="\n", flush=True)
    for name in PUBLISHED:
        if args.only in name:
            found[name] = measured(name, args.batch, args.device)
            if not args.json:
                print(line(name, found[name]), flush=True)
    if args.json:
        print(json.dumps({"device": args.device, "batch": args.batch, "mb": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
