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
from torch import Tensor

from fl_engine.algorithms import FlexFL
from fl_engine.algorithms.training import Training
from fl_engine.core import pool as pools
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import ClientError
from fl_engine.core.slicing import initial_params, take
from fl_engine.core.types import (
    SGD,
    Assignment,
    Device,
    Distillation,
    LocalTask,
    Params,
    Pool,
    SubmodelSpec,
    TaskContext,
)
from fl_engine.models.chains import SmallCNN
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TinyNet, tiny_pool
from fl_engine.training.local import Trained, TrainingJob, train
from fl_engine.training.losses import self_distillation
from tests.harness.made_up import paper_pool
from tests.harness.networks import Watched

TINY = TinyNet()
THREE = Classification(3)


NAMES = ["M1", "M2'", "M2", "M3'", "M3"]
AUTHORS_SHARES = tuple(n / 33_646_666 for n in (9_877_106, 15_037_489, 18_102_099, 31_135_815, 33_646_666))
"""Of the published code's models of VGG16, which are larger than their targets."""


def task_of(algorithm: FlexFL, received: str = "M3", free: float = 110.0) -> tuple[str, LocalTask]:
    """Return which model a device trains of the one that it received, and its task."""
    layout, pool = paper_pool(AUTHORS_SHARES) if algorithm.rule == "authors" else paper_pool()
    level = NAMES.index(received)
    assignment = Assignment(0, 0, pool[level].spec, {}, 1, level)
    task = algorithm.task(assignment, TaskContext(layout, pool, Device(0, "any", 110.0, 8.0), free))
    return next(m.name for m in pool if m.spec == task.spec), task


ADAPRUNE = [
    # The rule, r in %, and what is trained of a received M1, M2, M3: with `closest` the largest with size < r (Sec.
    # IV-A1), with `authors` the largest whose target is not above r.
    ("closest", 0.0, "M1", "M1", "M1"),
    ("closest", 40.0, "M1", "M1", "M1"),
    ("closest", 40.1, "M1", "M2'", "M2'"),
    ("closest", 50.0, "M1", "M2'", "M2'"),
    ("closest", 50.1, "M1", "M2", "M2"),
    ("closest", 90.0, "M1", "M2", "M2"),
    ("closest", 90.1, "M1", "M2", "M3'"),
    ("closest", 100.0, "M1", "M2", "M3'"),
    ("closest", 100.1, "M1", "M2", "M3"),
    ("authors", 0.0, "M1", "M1", "M1"),
    ("authors", 39.9, "M1", "M1", "M1"),
    ("authors", 40.0, "M1", "M2'", "M2'"),
    ("authors", 49.9, "M1", "M2'", "M2'"),
    ("authors", 50.0, "M1", "M2", "M2"),
    ("authors", 89.9, "M1", "M2", "M2"),
    ("authors", 90.0, "M1", "M2", "M3'"),
    ("authors", 99.9, "M1", "M2", "M3'"),
    ("authors", 100.0, "M1", "M2", "M3"),
]


@pytest.mark.parametrize(("rule", "free", "of_m1", "of_m2", "of_m3"), ADAPRUNE)
def test_adaprune_of_the_paper_and_the_authors(rule: Any, free: float, of_m1: str, of_m2: str, of_m3: str) -> None:
    found = [task_of(FlexFL(rule=rule), received, free)[0] for received in ("M1", "M2", "M3")]
    assert found == [of_m1, of_m2, of_m3]


def test_a_device_below_the_smallest_target_trains_it_or_fails() -> None:
    strict = FlexFL(rule="authors", on_too_small="fail")
    assert task_of(strict, "M2", 25.0)[0] == "M1"
    with pytest.raises(ClientError):
        task_of(strict, "M2", 24.9)


def test_flexfl_defaults_are_those_of_the_paper_and_its_code() -> None:
    """Sec. IV-A: L_p = 25, 50, 100 %, Gamma = 10 %, lambda = 10, tau = 3; f = 10 %, five epochs of batches of 50, SGD
    with .01 and .5. The code: weight decay 1e-4, the rate times .998 each round, the last partial batch dropped."""
    flexfl, training = FlexFL(), Training()
    assert (flexfl.targets, flexfl.adaptive_size) == ((25.0, 50.0, 100.0), 10.0)
    assert (flexfl.kd_weight, flexfl.temperature, flexfl.weighting) == (10.0, 3.0, "examples")
    assert (training.fraction, training.epochs, training.batch_size) == (0.1, 5, 50)
    assert (training.lr, training.momentum, training.weight_decay, training.lr_decay) == (0.01, 0.5, 1e-4, 0.998)


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
def test_distillation_loss_is_the_mean_over_teachers(tau: float) -> None:
    found = self_distillation(THREE, torch.tensor(STUDENT), [torch.tensor(TEACHER), torch.tensor(OTHER)], tau).mean()
    both = kl_by_hand(STUDENT, TEACHER, tau) + kl_by_hand(STUDENT, OTHER, tau)
    assert float(found) == pytest.approx(both / 2, rel=1e-5)


def test_distillation_over_the_batch_sums_the_classes() -> None:
    # Logits 0 and ln 3 give the teacher 1/4 and 3/4, and the student has 1/2 and 1/2.
    student, teacher = torch.zeros(1, 2), torch.tensor([[0.0, math.log(3)]])
    kl = math.log(0.5) / 4 + 3 * math.log(1.5) / 4
    for reduction, expected in (("batch", kl), ("classes", kl / 2)):
        algorithm = FlexFL(kd_reduction=reduction, temperature=1.0)  # type: ignore[arg-type]
        found = task_of(algorithm)[1].distillation
        assert found is not None and found.reduction == reduction
        term = self_distillation(Classification(2), student, [teacher, teacher], 1.0, found.reduction)
        assert term.tolist() == [pytest.approx(expected)]


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


def samples(family: ModelFamily, count: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, *family.input_shape, generator=generator)
    return x, torch.randint(0, family.outputs, (count,), generator=generator)


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
            teacher.load_state_dict(take(cut, family.layout(), spec))
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


def job_of(family: ModelFamily, task: LocalTask) -> TrainingJob:
    return TrainingJob(task, take(initial_params(family, 2), family.layout(), task.spec), *samples(family))


DISTILLED = [
    pytest.param(TINY, 4, id="M3"),
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


def run_watched(algorithm: FlexFL, received: str, free: float, round: int = 0) -> tuple[Watched, Pool, Trained]:
    watched, pool = Watched(TINY), tiny_pool(algorithm, TINY, (0.5, 0.5))
    (sent,) = (m for m in pool if m.name == received)
    assignment = Assignment(round, 0, sent.spec, {}, 1, NAMES.index(received))
    task = algorithm.task(assignment, TaskContext(TINY.layout(), pool, Device(0, "any", 110.0, 8.0), free))
    (found,) = train(watched, Classification(TINY.outputs), [job_of(TINY, task)])  # type: ignore[arg-type]
    return watched, pool, found


ONE_EPOCH = Training(epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("received", "free", "teachers"),
    [("M3", 110.0, 4), ("M3", 60.0, 2), ("M2", 110.0, 2), ("M1", 110.0, 0)],
)
def test_every_smaller_pool_member_teaches(received: str, free: float, teachers: int) -> None:
    """M3 learns from M1, M2', M2 and M3'; M1 from nobody. Once per batch."""
    watched, pool, found = run_watched(FlexFL(training=ONE_EPOCH), received, free)
    assert found.steps == 3
    assert Counter(spec for spec, _ in watched.runs) == {m.spec: 3 for m in pool[: teachers + 1]}


@pytest.mark.parametrize(("teachers", "drop_in_rounds"), [("eval", []), ("authors", [0])])
def test_rounds_in_which_teachers_train(teachers: Any, drop_in_rounds: list[int]) -> None:
    for round in (0, 1, 999):
        watched, pool, _ = run_watched(FlexFL(training=ONE_EPOCH, teachers=teachers), "M3", 110.0, round)
        assert set(watched.runs) == {(m.spec, round in drop_in_rounds) for m in pool[:-1]} | {(pool[-1].spec, True)}


def test_without_adjustment_every_weight_is_one() -> None:
    plain, ablated = FlexFL(), FlexFL(use_adjustment=False)
    family, scores = SmallCNN((1, 8, 8), 10), (0.3, 0.5, 0.7, 0.6)
    both = list(zip(tiny_pool(plain, family, scores), tiny_pool(ablated, family, scores), strict=True))
    assert sum(with_it.ratios != without.ratios for with_it, without in both) >= 3
    for with_it, without in both:
        assert with_it.name == without.name
        if without.gamma is not None:
            assert with_it.spec == pools.spec_of(family, with_it.ratios), "the solver has the same scores"
            assert without.ratios == pytest.approx([min(max(without.gamma * (1 - a), 0.01), 1) for a in scores])
    assert task_of(plain) == task_of(ablated)


def test_without_apoz_every_layer_counts_as_half_zero() -> None:
    plain, ablated = FlexFL(), FlexFL(use_apoz=False)
    expected = tiny_pool(plain, TINY, (0.5, 0.5))
    for scores in ((0.3, 0.6), (0.9, 0.1), ()):
        assert tiny_pool(ablated, TINY, scores) == expected
    assert tiny_pool(plain, TINY, (0.3, 0.6)) != expected
    assert task_of(plain) == task_of(ablated)
