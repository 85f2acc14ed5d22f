"""How much quicker half precision trains on this machine: measured, with one thread of a CPU."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.types import FULL, SGD, LocalTask, ParamLayout, Prunable, Slot, SubmodelSpec
from fl_engine.models.layers import FREE
from fl_engine.tasks import Classification
from fl_engine.training.local import Job, opened
from fl_engine.training.numerics import Numerics, Precision

BATCH = 50
TURNS = 15


@dataclass(frozen=True)
class McMahanCNN:
    """The network of McMahan et al. (AISTATS 2017, Sec. 3) for images: two 5x5 convolutions, each with a 2x2 max pool,
    and 512 hidden units. It has no sub-models."""

    input_shape: tuple[int, int, int] = (3, 32, 32)
    outputs: int = 10

    min_hw: ClassVar[int] = 4

    def layout(self) -> ParamLayout:
        state = self.module().state_dict()
        return ParamLayout(
            {}, {name: Slot(name.partition(".")[0], (FREE,) * tensor.dim()) for name, tensor in state.items()}
        )

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        c, h, w = self.input_shape
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(c, 32, 5, padding=2), pool1=nn.MaxPool2d(2), relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 5, padding=2), pool2=nn.MaxPool2d(2), relu2=nn.ReLU(),
            flatten=nn.Flatten(), fc=nn.Linear(64 * (h // 4) * (w // 4), 512), relu3=nn.ReLU(),
            out=nn.Linear(512, self.outputs),
        )  # fmt: skip
        return nn.Sequential(layers)

    def prunable(self) -> tuple[Prunable, ...]:
        return ()


def seconds_a_step(
    device: str, precisions: Sequence[Precision] = ("fp32", "bf16"), turns: int = TURNS
) -> dict[Precision, float]:
    """Seconds of a training step of `McMahanCNN` with 50 images of 3x32x32 and momentum, by precision: medians over
    `turns` steps of each, taken in turn. Of a CPU the seconds that this process computes (others do not count). Raises
    EnvironmentFailure where torch does not have the device."""
    check_device(device)
    prepare_process((device,))
    family, goal = McMahanCNN(), Classification(McMahanCNN.outputs)
    generator = torch.Generator().manual_seed(0)
    x, y = made_up(family, BATCH, generator).to(device), goal.examples(BATCH, generator).to(device)
    task = LocalTask(FULL, SGD(0.01, 0.5), epochs=turns + 2, batch_size=BATCH, drop_last=False, seed=0)
    job = Job(task, initial_params(family, 0), x, y)
    taken: dict[Precision, list[float]] = {precision: [] for precision in precisions}
    with ExitStack() as stack:
        sessions = {p: stack.enter_context(opened(family, goal, [job], Numerics(precision=p))) for p in precisions}
        for turn in range(turns + 2):  # the first two make ready what the others use again
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
    """A line for each precision but fp32: `bf16: 1.9 x fp32 here`."""
    return [f"{name}: {seconds['fp32'] / each:.1f} x fp32 here" for name, each in seconds.items() if name != "fp32"]
