"""FlexFL against its paper (Chen et al., TCAD 2024), equation by equation, with numbers that a person can check.

Where the paper leaves something open, the expected value follows the authors' code as the module's docstring says.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import (
    FULL,
    SGD,
    Device,
    Distillation,
    LocalTask,
    ParamLayout,
    Params,
    Pool,
    Prunable,
    SubmodelSpec,
    TaskContext,
    WorkOrder,
)
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, paper_pool, tiny_pool
from fl_engine.training.local import Job, Trained, train
from fl_engine.training.losses import self_distillation

TINY = TinyNet()
THREE = Classification(3)


# ==================================================================================== AdaPrune, Sec. III-C
def trained_by(algorithm: FlexFL, received: str, free: float) -> str:
    layout, pool = paper_pool()
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(0, 0, sent.spec, {}, 1, NAMES.index(received))
    task = algorithm.task(order, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec)


NAMES = ["M1", "M2'", "M2", "M3'", "M3"]
ADAPRUNE = [
    # r in %, and what is trained of a received M1, M2, M3: the largest with size < r.
    (0.0, "M1", "M1", "M1"),
    (24.9, "M1", "M1", "M1"),
    (25.0, "M1", "M1", "M1"),
    (25.1, "M1", "M1", "M1"),
    (39.9, "M1", "M1", "M1"),
    (40.0, "M1", "M1", "M1"),
    (40.1, "M1", "M2'", "M2'"),
    (45.0, "M1", "M2'", "M2'"),
    (50.0, "M1", "M2'", "M2'"),
    (50.1, "M1", "M2", "M2"),
    (60.0, "M1", "M2", "M2"),
    (90.0, "M1", "M2", "M2"),
    (90.1, "M1", "M2", "M3'"),
    (100.0, "M1", "M2", "M3'"),
    (100.1, "M1", "M2", "M3"),
    (110.0, "M1", "M2", "M3"),
]


@pytest.mark.parametrize(("free", "of_m1", "of_m2", "of_m3"), ADAPRUNE)
def test_adaprune_paper_pool(free: float, of_m1: str, of_m2: str, of_m3: str) -> None:
    """Sec. IV-A1: r <= size(m) / size(M) * 100 is too little. M3 -> M3' -> M2 -> M2' -> M1."""
    found = [trained_by(FlexFL(), received, free) for received in ("M1", "M2", "M3")]
    assert found == [of_m1, of_m2, of_m3]


def test_defaults_are_those_of_the_paper_and_its_code() -> None:
    """Sec. IV-A: L_p = 25, 50, 100 %, Gamma = 10 %, lambda = 10, tau = 3; f = 10 %, five epochs of batches of 50, SGD
    with .01 and .5. The code: weight decay 1e-4, the rate times .998 each round, the last partial batch dropped."""
    flexfl, training = FlexFL(), Training()
    assert (flexfl.targets, flexfl.adaptive_size) == ((25.0, 50.0, 100.0), 10.0)
    assert (flexfl.kd_weight, flexfl.temperature, flexfl.teachers) == (10.0, 3.0, "eval")
    assert (flexfl.rule, flexfl.on_too_small) == ("closest", "train") and flexfl.use_apoz and flexfl.use_adjustment
    assert flexfl.training == training and flexfl.weighting == "examples"
    assert (training.fraction, training.epochs, training.batch_size) == (0.1, 5, 50)
    assert (training.lr, training.momentum, training.weight_decay, training.lr_decay) == (0.01, 0.5, 1e-4, 0.998)
    assert training.drop_last and training.clip_norm is None and training.lr_steps == ()


# ================================================================================ self-distillation, Sec. III-D
def softmax(logits: Sequence[float], tau: float) -> list[float]:
    powers = [math.exp(v / tau) for v in logits]
    return [p / sum(powers) for p in powers]


def kl_by_hand(student: list[list[float]], teacher: list[list[float]], tau: float) -> float:
    """tau^2 times the mean over batch *and* classes of t log(t / s)."""
    terms = []
    for s_row, t_row in zip(student, teacher, strict=True):
        pairs = zip(softmax(t_row, tau), softmax(s_row, tau), strict=True)
        terms += [t * math.log(t / s) for t, s in pairs]
    return tau**2 * sum(terms) / len(terms)


STUDENT = [[2.0, -1.0, 0.5], [0.0, 0.0, 3.0]]
TEACHER = [[1.0, 1.0, -2.0], [-1.0, 4.0, 0.0]]
OTHER = [[0.5, 0.25, 2.0], [3.0, 1.0, 1.0]]


@pytest.mark.parametrize("tau", [1.0, 3.0, 10.0])
def test_the_distillation_loss_by_hand(tau: float) -> None:
    found = self_distillation(THREE, torch.tensor(STUDENT), [torch.tensor(TEACHER)], tau).mean()
    assert float(found) == pytest.approx(kl_by_hand(STUDENT, TEACHER, tau), rel=1e-5)
    assert float(found) > 0


def test_the_distillation_loss_is_the_mean_over_teachers() -> None:
    found = self_distillation(THREE, torch.tensor(STUDENT), [torch.tensor(TEACHER), torch.tensor(OTHER)], 3.0).mean()
    both = kl_by_hand(STUDENT, TEACHER, 3.0) + kl_by_hand(STUDENT, OTHER, 3.0)
    assert float(found) == pytest.approx(both / 2, rel=1e-5)


def test_no_gradient_reaches_the_teacher() -> None:
    s, t = torch.tensor(STUDENT, requires_grad=True), torch.tensor(TEACHER, requires_grad=True)
    self_distillation(THREE, s, [t], 3.0).mean().backward()
    assert t.grad is None
    # d/ds of tau^2 * mean(t log(t/s)) is tau * (softmax(s/tau) - softmax(t/tau)) / (batch * classes).
    expected = [
        [3.0 * (a - b) / 6 for a, b in zip(softmax(sr, 3.0), softmax(tr, 3.0), strict=True)]
        for sr, tr in zip(STUDENT, TEACHER, strict=True)
    ]
    torch.testing.assert_close(s.grad, torch.tensor(expected))


# ---------------------------------------------------------------------------------- teachers during training
def samples(family: ModelFamily, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, *family.input_shape, generator=generator)
    return x, torch.randint(0, family.outputs, (count,), generator=generator)


def prefix_slice(family: ModelFamily, params: Params, spec: SubmodelSpec) -> Params:
    """The first rows and columns, copied: for prefixes, without `take`."""
    with torch.device("meta"):
        wanted = {n: t.shape for n, t in family.module(spec).state_dict().items()}
    return {n: params[n][tuple(slice(0, k) for k in shape)].clone() for n, shape in wanted.items()}


def reference(
    family: ModelFamily, start: Params, student: SubmodelSpec, teachers: Sequence[SubmodelSpec], sgd: SGD, steps: int,
    weight: float, tau: float, stale: bool = False,
) -> tuple[Params, list[float]]:  # fmt: skip
    """Plain PyTorch on the whole batch; teachers cut out anew before every step (`stale`: before the first only)."""
    x, y = samples(family)
    module = family.module(student).train()
    module.load_state_dict(start)
    optimizer = torch.optim.SGD(module.parameters(), sgd.lr, momentum=sgd.momentum, weight_decay=sgd.weight_decay)
    losses, cut = [], start
    for _ in range(steps):
        if not stale:
            cut = {n: t.detach().clone() for n, t in module.state_dict().items()}
        logits = module(x)
        terms = []
        for spec in teachers:
            teacher = family.module(spec).train()
            teacher.load_state_dict(prefix_slice(family, cut, spec))
            with torch.no_grad():
                soft = F.softmax(teacher(x) / tau, dim=1)
            log_s = F.log_softmax(logits / tau, dim=1)
            terms.append((soft * (soft.log() - log_s)).mean() * tau**2)
        loss = F.cross_entropy(logits, y) + weight * sum(terms) / max(1, len(terms))
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: t.detach() for n, t in module.state_dict().items()}, losses


def job_of(family: ModelFamily, task: LocalTask) -> Job:
    full = initial_params(family, 2)
    return Job(task, prefix_slice(family, full, task.spec), *samples(family))


DISTILLED = [
    pytest.param(TINY, 4, id="M3"),
    pytest.param(TINY, 2, id="M2"),
    pytest.param(TINY, 1, id="M2'"),
    pytest.param(SmallCNN((1, 8, 8), 4, width=0.5), 4, id="M3 with batch norm"),
]


@pytest.mark.parametrize(("family", "level"), DISTILLED)
def test_teachers_are_current_at_every_step(family: ModelFamily, level: int) -> None:
    pool = tiny_pool(FlexFL(), family)
    student, teachers = pool[level].spec, tuple(m.spec for m in pool[:level])
    sgd = SGD(0.3, 0.5, 1e-4)
    task = LocalTask(student, sgd, 4, 12, True, 9, Distillation(teachers, 10.0, 3.0))
    job = job_of(family, task)
    (found,) = train(family, Classification(family.outputs), [job])
    expected, losses = reference(family, job.start, student, teachers, sgd, 4, 10.0, 3.0)
    stale, _ = reference(family, job.start, student, teachers, sgd, 4, 10.0, 3.0, stale=True)
    assert found.steps == 4
    assert found.loss == pytest.approx(sum(losses) / 4, rel=1e-4)
    for name, tensor in expected.items():
        torch.testing.assert_close(found.params[name], tensor, rtol=1e-3, atol=2e-5)
    worst = max(float((stale[n] - t).abs().max()) for n, t in expected.items())
    assert worst > 2e-3, "this example could not tell a stale teacher from a current one"


class Counting:
    """A family that counts the samples each sub-network is run on."""

    def __init__(self, inner: ModelFamily) -> None:
        self.inner = inner
        self.runs: Counter[SubmodelSpec] = Counter()
        self.modes: dict[SubmodelSpec, set[bool]] = {}
        self.last: dict[SubmodelSpec, tuple[Tensor, Tensor]] = {}
        """The input and the output of the last run."""
        self.input_shape, self.outputs = inner.input_shape, inner.outputs

    def layout(self) -> ParamLayout:
        return self.inner.layout()

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        def count(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            self.runs[spec] += 1
            self.modes.setdefault(spec, set()).add(module.training)
            self.last[spec] = given[0], out.detach()

        module = self.inner.module(spec)
        module.register_forward_hook(count)
        return module

    def prunable(self) -> tuple[Prunable, ...]:
        return self.inner.prunable()


def run_counted(algorithm: FlexFL, received: str, free: float, round: int = 0) -> tuple[Counting, Pool, Trained]:
    counting, pool = Counting(TINY), tiny_pool(algorithm, TINY, (0.5, 0.5))
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(round, 0, sent.spec, {}, 1, NAMES.index(received))
    task = algorithm.task(order, TaskContext(TINY.layout(), pool, Device(0, "any", 110.0, 8.0), free))
    (found,) = train(counting, Classification(counting.outputs), [job_of(TINY, task)])  # type: ignore[arg-type]
    return counting, pool, found


ONE_EPOCH = Training(epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("received", "free", "teachers"),
    [("M3", 110.0, 4), ("M3", 95.0, 3), ("M3", 60.0, 2), ("M2", 110.0, 2), ("M3", 45.0, 1), ("M1", 110.0, 0)],
)
def test_every_smaller_member_of_the_pool_teaches(received: str, free: float, teachers: int) -> None:
    """M3 learns from M1, M2', M2 and M3'; M1 from nobody. Once per batch."""
    counting, pool, found = run_counted(FlexFL(training=ONE_EPOCH), received, free)
    assert found.steps == 3
    assert counting.runs == {m.spec: 3 for m in pool[: teachers + 1]}


@pytest.mark.parametrize(("teachers", "drop_in_rounds"), [("eval", []), ("train", [0, 1, 2, 999]), ("authors", [0])])
def test_in_which_rounds_teachers_are_in_training_mode(teachers: Any, drop_in_rounds: list[int]) -> None:
    for round in (0, 1, 2, 999):
        counting, pool, _ = run_counted(FlexFL(training=ONE_EPOCH, teachers=teachers), "M3", 110.0, round)
        assert counting.modes == {m.spec: {round in drop_in_rounds} for m in pool[:-1]} | {pool[-1].spec: {True}}


# ================================================================================= hyper-parameters of a task
def task_at(algorithm: FlexFL, round: int = 0, received: str = "M3", free: float = 110.0) -> LocalTask:
    layout, pool = paper_pool()
    (sent,) = (m for m in pool if m.name == received)
    order = WorkOrder(round, 0, sent.spec, {}, 1, NAMES.index(received))
    return algorithm.task(order, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))


# ==================================================================================================== ablations


def test_without_adjustment_every_weight_is_one() -> None:
    plain, ablated = FlexFL(), FlexFL(use_adjustment=False)
    family, scores = SmallCNN((1, 8, 8), 10), (0.3, 0.5, 0.7, 0.6)
    both = list(zip(tiny_pool(plain, family, scores), tiny_pool(ablated, family, scores), strict=True))
    assert sum(with_it.ratios != without.ratios for with_it, without in both) >= 3
    for with_it, without in both:
        assert with_it.name == without.name
        if without.gamma is not None:
            assert without.ratios == pytest.approx([min(max(without.gamma * (1 - a), 0.01), 1) for a in scores])
    assert task_at(plain) == task_at(ablated)


def test_without_apoz_every_layer_counts_as_half_zero() -> None:
    plain, ablated = FlexFL(), FlexFL(use_apoz=False)
    expected = tiny_pool(plain, TINY, (0.5, 0.5))
    for scores in ((0.3, 0.6), (0.9, 0.1), ()):
        assert tiny_pool(ablated, TINY, scores) == expected
    assert tiny_pool(plain, TINY, (0.3, 0.6)) != expected
    assert task_at(plain) == task_at(ablated)
