"""On CUDA: the same bits twice, on one device or several, in one run or resumed; and nearly the figures of a CPU.

Without a GPU these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.backends.in_process import InProcess, prepare_process
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params, made_up, runnable, take
from fl_engine.core.task import Task
from fl_engine.core.types import FULL, SGD, Adam, Distillation, LocalTask, Params
from fl_engine.core.widths import prefix
from fl_engine.models.chains import VGG16, SmallCNN
from fl_engine.models.fedaiot_resnet18 import WidarResNet18
from fl_engine.models.recurrent import WisdmLSTM
from fl_engine.tasks import Classification, Detection, NextToken, Regression
from fl_engine.testing.kinds import KINDS
from fl_engine.testing.tiny import TRAINING, assert_same_bits, assert_same_results, first_plan, tiny_site
from fl_engine.training import local
from fl_engine.training.isolation import isolated
from fl_engine.training.local import TrainingJob
from fl_engine.training.numerics import SINGLE, Numerics
from tests.harness.networks import SMALL
from tests.harness.processes import Done

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda")
TASK = LocalTask(FULL, SGD(0.05, 0.5, 1e-3), epochs=2, batch_size=8, drop_last=True, seed=0)


@pytest.fixture(autouse=True)
def as_in_a_run() -> Iterator[None]:
    with isolated():
        prepare_process(("cuda",))
        yield


def goal_of(name: str, family: ModelFamily) -> Task:
    if name in KINDS:
        return KINDS[name][1].task
    if name == "point_detector":
        return Detection(family.outputs - 4, 5)
    if name.startswith("text_") and "one answer" not in name:
        return NextToken(family.outputs, family.input_shape[0])
    return Regression() if family.outputs == 1 else Classification(family.outputs)


def job(family: ModelFamily, goal: Task, task: LocalTask, i: int, device: torch.device = CUDA) -> TrainingJob:
    generator = torch.Generator().manual_seed(100 + i)
    x, y = made_up(family, 24, generator), goal.examples(24, generator)
    start = take(initial_params(family, i), family.layout(), task.spec)
    return TrainingJob(replace(task, seed=i), start, x.to(device), y.to(device))


def same(a: local.Trained, b: local.Trained) -> None:
    assert_same_bits(a.params, b.params)
    assert (a.loss, a.finite) == (b.loss, b.finite)


FAMILIES = SMALL | {name: family for name, (family, _) in KINDS.items()}
LARGER: dict[str, ModelFamily] = {
    "larger vgg16": VGG16((3, 32, 32), 10, width=0.25),
    "larger lstm": WisdmLSTM((200, 6), 12),
    "larger widar": WidarResNet18((22, 20, 20), 9, width=0.5),
}
TASKS = {
    "plain": TASK,
    "adam": replace(TASK, optimizer=Adam(0.01)),
    "clipped": replace(TASK, proximal=0.3, clip_norm=0.5),
}


def with_teachers(family: ModelFamily) -> LocalTask:
    layout = family.layout()
    return replace(TASK, distillation=Distillation((prefix(layout, 0.3), prefix(layout, 0.5)), 10.0, 3.0))


@pytest.mark.parametrize("name", FAMILIES | LARGER)
def test_training_again_gives_the_same_bits(name: str) -> None:
    family = (FAMILIES | LARGER)[name]
    goal = goal_of(name, family)
    tasks = dict(TASKS)
    if name in ("small_cnn", "vgg16", "resnet18", "mobilenetv2", "aep_mlp", "wisdm_lstm"):
        tasks["distilled"] = with_teachers(family)
    for said, task in tasks.items():
        one, other = (local.train(family, goal, [job(family, goal, task, 0)])[0] for _ in range(2))
        assert one.finite, said
        same(one, other)


@pytest.mark.parametrize("precision", ["bf16", "amp", "fp16"])
@pytest.mark.parametrize("name", ["small_cnn", "wisdm_lstm", "aep_mlp", "widar_resnet18", "text_transformer"])
def test_half_precision_gives_the_same_bits(name: str, precision: str) -> None:
    family = FAMILIES[name]
    goal = goal_of(name, family)
    numerics = Numerics(precision=precision)  # type: ignore[arg-type]
    given = job(family, goal, TASK, 0)
    one, other = (local.train(family, goal, [given], numerics)[0] for _ in range(2))
    same(one, other)
    assert one.finite


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_nearly_what_a_cpu_trains(name: str) -> None:
    """One step without tf32. In networks so small batch norm makes much of rounding, most of all behind convolutions of
    a single channel (MobileNetV2)."""
    family = FAMILIES[name]
    if "dropout" in str(family.module()).lower():
        pytest.skip("masks are drawn by another generator")
    torch.backends.cudnn.allow_tf32 = False
    goal, task = goal_of(name, family), replace(TASK, epochs=1, batch_size=24, optimizer=SGD(1.0))
    here, there = (job(family, goal, task, 0, torch.device(d)) for d in ("cpu", "cuda"))
    on_cpu, on_gpu = (local.train(family, goal, [each])[0] for each in (here, there))
    assert on_gpu.loss == pytest.approx(on_cpu.loss, rel=1e-2)
    moved = [_moved(here.start, each.params) for each in (on_cpu, on_gpu)]
    assert (moved[0] - moved[1]).norm() < (0.1 if name == "mobilenetv2" else 0.02) * moved[0].norm()


def _moved(start: Params, params: Params) -> torch.Tensor:
    return torch.cat([(params[name].cpu() - start[name]).double().flatten() for name in start])


def test_a_scaled_loss_trains_as_with_torchs_own_scaler() -> None:
    family, goal = SmallCNN((1, 8, 8), 4, width=0.5), Classification(4)
    task = replace(TASK, epochs=1, batch_size=24, optimizer=SGD(0.5))
    given = job(family, goal, task, 0)
    (found,) = local.train(family, goal, [given], Numerics(precision="amp"))
    module = runnable(family, FULL, {n: t.to(CUDA, copy=True) for n, t in given.start.items()}).train()
    optimizer, scaler = torch.optim.SGD(module.parameters(), 0.5), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        out = module(given.x)
    scaler.scale(goal.loss(out.float(), given.y).mean()).backward()
    scaler.step(optimizer)
    by_hand = {name: t.detach() for name, t in module.state_dict().items()}
    a, b = _moved(given.start, found.params), _moved(given.start, by_hand)
    assert b.norm() > 0 and (a - b).norm() < 0.03 * b.norm()


@pytest.mark.parametrize("numerics", [SINGLE, Numerics(precision="amp")], ids=["fp32", "amp"])
@pytest.mark.parametrize("name", ["vgg16", "wisdm_lstm"])
def test_training_that_is_resumed_ends_in_the_same_bits(name: str, numerics: Numerics) -> None:
    family = FAMILIES[name]
    goal, given = goal_of(name, family), job(family, goal_of(name, family), TASK, 0)
    with local.Session(family, goal, [given], numerics) as session:
        session.epoch()
        half = session.snapshot()
        session.epoch()
    with local.Session(family, goal, [given], numerics) as resumed:
        resumed.restore(half)
        resumed.epoch()
    same(resumed.trained()[0], session.trained()[0])


def test_several_devices_of_one_gpu_give_the_same_bits() -> None:
    algorithm = FlexFL(training=TRAINING)
    site = replace(tiny_site(algorithm), numerics=Numerics("batched", 8))  # a GPU trains one at a time all the same
    plan = first_plan(algorithm, site)
    found = [
        sorted(InProcess(site, devices).run(algorithm, plan), key=lambda o: o.client)
        for devices in (("cuda",), ("cuda", "cuda"), ("cuda:0", "cuda:0", "cuda:0"))
    ]
    for other in found[1:]:
        assert_same_results(found[0], other)


@pytest.mark.parametrize("backend", ["in_process", "processes"])
def test_resumed_run_ends_in_the_same_model(
    backend: str, flexfleet: Callable[..., Done], quick: tuple[str, ...], tmp_path: Path
) -> None:
    own = (*quick, "run.devices=[cuda]", f"run.store={tmp_path}", "tracking.mlflow=null")

    def run(name: str, rounds: int, backend: str) -> None:
        done = flexfleet(
            "run", "--run-id", name, "--resume", sets=[*own, f"rounds.stop={rounds}", f"run.backend={backend}"]
        )
        assert done.code == 0, done.err

    run("whole", 3, "in_process")
    run("parts", 1, backend)
    run("parts", 3, backend)
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
