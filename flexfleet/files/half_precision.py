"""How much faster half precision trains on this machine, measured with one thread of a CPU, or on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.types import FULL, SGD, LocalTask
from fl_engine.models.resnet import ResNet18
from fl_engine.tasks import Classification
from fl_engine.training.local import Job, opened
from fl_engine.training.numerics import Numerics, Precision

BATCH = 50
TURNS = 15


NETWORK = ResNet18((3, 32, 32), 10, width=0.25)


def seconds_a_step(
    device: str, precisions: Sequence[Precision] = ("fp32", "bf16"), turns: int = TURNS
) -> dict[Precision, float]:
    """Seconds of a training step of a quarter-width ResNet18 with 50 images of 3x32x32 and momentum, by precision:
    medians over `turns` alternating steps. On a CPU it is the time of this process. Raises EnvironmentFailure if torch
    does not have the device."""
    check_device(device)
    prepare_process((device,))
    family, goal = NETWORK, Classification(NETWORK.outputs)
    generator = torch.Generator().manual_seed(0)
    x, y = made_up(family, BATCH, generator).to(device), goal.examples(BATCH, generator).to(device)
    task = LocalTask(FULL, SGD(0.01, 0.5), epochs=turns + 2, batch_size=BATCH, drop_last=False, seed=0)
    job = Job(task, initial_params(family, 0), x, y)
    taken: dict[Precision, list[float]] = {precision: [] for precision in precisions}
    with ExitStack() as stack:
        sessions = {p: stack.enter_context(opened(family, goal, [job], Numerics(precision=p))) for p in precisions}
        for turn in range(turns + 2):  # the first two warm up
            for precision, session in sessions.items():
                started = _now(device)
                session.epoch()
                taken[precision] += [_now(device) - started] if turn > 1 else []
    return {precision: statistics.median(seconds) for precision, seconds in taken.items()}


def _now(device: str) -> float:
    if not device.startswith("cuda"):
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def said(seconds: Mapping[Precision, float]) -> list[str]:
    """Return a line like `bf16: 1.9 x fp32 here` for each precision but fp32."""
    return [f"{name}: {seconds['fp32'] / each:.1f} x fp32 here" for name, each in seconds.items() if name != "fp32"]
