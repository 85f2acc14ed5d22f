"""Teachers that take what the student has computed already: less work, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import FULL, SGD, Distillation, LocalTask, SubmodelSpec
from fl_engine.core.widths import prefix
from fl_engine.models.resnet import ResNet18
from fl_engine.models.vgg16 import VGG16
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, assert_same_bits
from fl_engine.training import objective
from fl_engine.training.lanes import Network
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import SINGLE, Numerics
from fl_engine.training.shared_layers import Seen, shared

VGG = VGG16((3, 32, 32), 4, fc=(24, 20), width=0.06)
RESNET = ResNet18((3, 16, 16), 4, width=0.08)
DROPOUT = TinyNet(dropout=0.5)
TASK = LocalTask(FULL, SGD(0.05, 0.5), epochs=2, batch_size=4, drop_last=False, seed=3)


def from_group(family: ModelFamily, first: str) -> SubmodelSpec:
    """Half of the channels of `first` and of the groups after it."""
    groups = list(family.layout().groups)
    half = prefix(family.layout(), 0.5).kept
    return SubmodelSpec.of({g: half[g] for g in groups[groups.index(first) :] if g in half})


def jobs(family: ModelFamily, task: LocalTask, count: int) -> list[Job]:
    out = []
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(9, *family.input_shape, generator=generator)
        y = torch.randint(0, family.outputs, (9,), generator=generator)
        start = take(initial_params(family, i), family.layout(), task.spec)
        out.append(Job(replace(task, seed=i), {k: t.clone() for k, t in start.items()}, x, y))
    return out


@contextmanager
def nothing_shared(_: Network, __: list[Network]) -> Iterator[Seen]:
    yield {}


CASES = {
    "vgg, from conv8 on": (VGG, from_group(VGG, "conv8")),
    "vgg, no layer in common": (VGG, prefix(VGG.layout(), 0.5)),
    "vgg, the student itself": (VGG, FULL),
    "resnet": (RESNET, from_group(RESNET, list(RESNET.layout().groups)[-2])),
    "dropout": (DROPOUT, from_group(DROPOUT, list(DROPOUT.layout().groups)[-2])),
}


@pytest.mark.parametrize("numerics", [SINGLE, Numerics("batched", 8), replace(SINGLE, precision="bf16")])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_no_bit_moves(name: str, training: bool, numerics: Numerics, monkeypatch: pytest.MonkeyPatch) -> None:
    family, teacher = CASES[name]
    kd = Distillation((teacher, prefix(family.layout(), 0.5)), 10.0, 3.0, training=training)
    task = replace(TASK, distillation=kd)
    with_sharing = train(family, Classification(family.outputs), jobs(family, task, 2), numerics)
    monkeypatch.setattr(objective, "shared", nothing_shared)
    for a, b in zip(
        with_sharing, train(family, Classification(family.outputs), jobs(family, task, 2), numerics), strict=True
    ):
        assert_same_bits(a.params, b.params)
        assert a.loss == b.loss


def network(family: ModelFamily, spec: SubmodelSpec) -> Network:
    with torch.device("meta"):
        out = Network(family.module(spec).train())
    weights = take(initial_params(family, 0), family.layout(), spec)
    out.bind({name: t[None] for name, t in weights.items()}, lambda: [torch.Generator()])
    return out


def test_common_layers_run_once_and_the_network_is_restored() -> None:
    student, teacher = network(VGG, FULL), network(VGG, from_group(VGG, "conv8"))
    ran: list[str] = []
    for name, layer in teacher.weighted.items():
        layer.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    computed: list[str] = []
    for name, layer in teacher.weighted.items():

        def count(*given: torch.Tensor, name: str = name, forward: object = layer.forward) -> torch.Tensor:
            computed.append(name)
            return forward(*given)  # type: ignore[operator,no-any-return]

        layer.forward = count
    x = torch.randn(4, 3, 32, 32)
    with shared(student, [teacher]) as seen:
        student(x)
        teacher(x)
        everything = list(teacher.weighted)
        assert computed == everything[everything.index("conv8.conv") :]
        seen.clear()
        teacher(x)  # of another step: nothing is known yet
        assert computed[-len(everything) :] == everything
    computed.clear()
    student(x)
    teacher(x)
    assert not seen
