"""A user's own objective and optimizer: equal to the built-in ones if written alike, refusals, and failures."""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_engine.algorithms import DepthFL, FedAvg, FjORD, FlexFL, HeteroFL
from fl_engine.algorithms.training import Training
from fl_engine.core.allowed import trust
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.slicing import initial_params, made_up, take
from fl_engine.core.steps import Cosine
from fl_engine.core.types import FULL, SGD, ClientFailure, ClientUpdate, LocalTask, OwnOptimizer, SubmodelSpec
from fl_engine.exchange.client import accept_all, execute
from fl_engine.models.mobilenetv2 import MobileNetV2
from fl_engine.tasks import Classification
from fl_engine.testing.kinds import TinyLSTM
from fl_engine.testing.tiny import SEED, TinyNet, assert_same_bits, first_plan, tiny_site
from fl_engine.training.local import Trained, TrainingJob, can_share, train
from fl_engine.training.numerics import Numerics
from tests.harness.plugins import OBJECTIVE, OPTIMIZER, sgd

HERE = __name__
PLAIN = LocalTask(FULL, SGD(0.1, 0.5, 1e-4), epochs=2, batch_size=4, drop_last=True, seed=11)


@pytest.fixture(autouse=True)
def _as_a_configuration_names_them() -> None:
    trust([OBJECTIVE, OPTIMIZER, "__main__:in_a_cell"])


def job_of(family: ModelFamily, task: LocalTask, count: int = 9) -> TrainingJob:
    generator = torch.Generator().manual_seed(5)
    x = made_up(family, count, generator)
    y = torch.randint(0, family.outputs, (count,), generator=generator)
    return TrainingJob(task, take(initial_params(family, SEED), family.layout(), task.spec), x, y)


def trained(family: ModelFamily, task: LocalTask, numerics: Numerics | None = None) -> Trained:
    goal = Classification(family.outputs)
    return train(family, goal, [job_of(family, task)], Numerics() if numerics is None else numerics)[0]


def own_of(task: LocalTask, objective: str | None = OBJECTIVE, optimiser: str | None = OPTIMIZER) -> LocalTask:
    optimizer = task.optimizer if optimiser is None else OwnOptimizer(task.optimizer.lr, optimiser)
    return replace(task, objective=objective, optimizer=optimizer)


NARROW = SubmodelSpec.of({"conv": 5, "hidden": 20})
FAMILIES: dict[str, tuple[ModelFamily, SubmodelSpec]] = {
    "narrow": (TinyNet(), NARROW),
    "dropout": (TinyNet(dropout=0.5), FULL),
    "exits": (TinyNet(exits=("conv", "fc")), FULL),
    "statistics": (MobileNetV2((3, 32, 32), 4, width=0.25, norm="static"), FULL),
    "lstm": (TinyLSTM(), FULL),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("parts", [(OBJECTIVE, None), (None, OPTIMIZER)], ids=str)
def test_user_code_like_the_built_in_gives_the_same_bits(name: str, parts: tuple[str | None, str | None]) -> None:
    family, spec = FAMILIES[name]
    task = replace(PLAIN, spec=spec, clip_norm=1.0, proximal=0.1, schedule=Cosine())
    built_in, ours = trained(family, task), trained(family, own_of(task, *parts))
    assert_same_bits(ours.params, built_in.params)
    assert (ours.loss, ours.steps, ours.samples, ours.finite) == (
        built_in.loss, built_in.steps, built_in.samples, True,
    )  # fmt: skip


def test_heterofl_keeps_its_scaler_and_its_masks() -> None:
    algorithm = HeteroFL(training=Training(fraction=0.5, epochs=1, batch_size=4, lr=0.1), static_bn=False)
    mine = replace(algorithm, training=replace(algorithm.training, objective=OBJECTIVE, optimizer=OPTIMIZER))
    site = tiny_site(algorithm, TinyNet(dropout=0.5))
    plan = first_plan(algorithm, site)
    compared = 0
    for assignment in plan.assignments:
        built_in, ours = (execute(each, assignment, site) for each in (algorithm, mine))
        if isinstance(built_in, ClientUpdate):
            assert isinstance(ours, ClientUpdate)
            assert ours.spec == built_in.spec
            assert_same_bits(ours.payload, built_in.payload)
            compared += 1
    assert compared > 3


def pull(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    near = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
    return F.cross_entropy(model(x), y) + 0.05 * near


def test_network_has_the_names_and_shapes_of_its_state() -> None:
    """FedProx written with `model.named_parameters()` and `start` is the proximal term: mu/2 ||theta - start||^2."""
    ours = trained(TinyNet(), own_of(PLAIN, f"{HERE}:pull", None))
    term = trained(TinyNet(), replace(PLAIN, proximal=0.1))
    plain = trained(TinyNet(), PLAIN)
    for name, tensor in term.params.items():
        torch.testing.assert_close(ours.params[name], tensor, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(ours.params["fc.linear.weight"], plain.params["fc.linear.weight"], atol=1e-5)


def by_hand(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    """3 w.sum() + 0 * the rest: the gradient of the classifier's weight is 3 everywhere."""
    model(x)
    return 3 * dict(model.named_parameters())["classifier.weight"].sum()


def plain_sgd(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr)


def test_two_steps_by_hand() -> None:
    """Nine samples in batches of eight, the rest dropped, two epochs: w - 2 * 0.1 * 3."""
    task = replace(PLAIN, batch_size=8, optimizer=OwnOptimizer(0.1, f"{HERE}:plain_sgd"), objective=f"{HERE}:by_hand")
    start = initial_params(TinyNet(), SEED)
    found = trained(TinyNet(), task)
    torch.testing.assert_close(found.params["classifier.weight"], start["classifier.weight"] - 0.6)
    assert_same_bits({"w": found.params["fc.linear.weight"]}, {"w": start["fc.linear.weight"]})
    sums = [3 * start["classifier.weight"].sum() - 3 * 0.3 * step * 128 for step in (0, 1)]
    assert found.loss == pytest.approx(float(sum(sums)) / 2, rel=1e-4)


SEEN: list[Any] = []


def groups(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    first, *rest = parameters
    optimiser = torch.optim.SGD([{"params": [first], "lr": lr / 10}, {"params": rest}], lr)
    SEEN.append(optimiser)
    return optimiser


def test_schedule_sets_the_rate_and_groups_keep_their_ratio() -> None:
    SEEN.clear()
    task = own_of(replace(PLAIN, schedule=Cosine(floor=0.01)), None, f"{HERE}:groups")
    trained(TinyNet(), task)
    low, high = (group["lr"] for group in SEEN[0].param_groups)
    assert high == task.schedule.rate(0.1, 3, 2, 2) < 0.1
    assert low == pytest.approx(high / 10)


def noisy(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    scale = 1 + 0.1 * random.random() + 0.1 * float(np.random.rand())
    return F.cross_entropy(model(x + 0.1 * torch.randn(x.shape)), y) * scale


def test_random_numbers_follow_from_the_clients_seed() -> None:
    tasks = [own_of(replace(PLAIN, seed=seed), f"{HERE}:noisy") for seed in range(4)]
    before = np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    jobs = [job_of(TinyNet(), task) for task in tasks]
    alone = [train(TinyNet(), Classification(4), [job])[0] for job in jobs]
    torch.manual_seed(99)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: train(TinyNet(), Classification(4), [job])[0], jobs))
    for a, b in zip(alone, together, strict=True):
        assert_same_bits(a.params, b.params)
    assert before == (np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
    assert torch.get_rng_state().tolist() == torch.manual_seed(99).get_state().tolist()
    other = trained(TinyNet(), replace(tasks[0], seed=77))
    assert not torch.equal(other.params["classifier.weight"], alone[0].params["classifier.weight"])


def test_clients_train_one_at_a_time() -> None:
    for task in (own_of(PLAIN, optimiser=None), own_of(PLAIN, objective=None)):
        assert not can_share(task)
    algorithm = FedAvg(training=Training(fraction=0.5, batch_size=4, objective=OBJECTIVE))
    site = replace(tiny_site(algorithm), numerics=Numerics("batched", 4))
    plan = first_plan(algorithm, site)
    groups_of, failed = accept_all(algorithm, plan.assignments, site)
    assert [len(group) for group in groups_of] == [1] * (len(plan.assignments) - len(failed))


@pytest.mark.parametrize(
    "kind",
    [FlexFL, DepthFL, FjORD],
)
def test_objective_beside_an_algorithms_own_loss_is_refused(kind: Any) -> None:
    algorithm = kind(training=Training(objective=OBJECTIVE))
    site = tiny_site(algorithm)
    plan = first_plan(algorithm, site)
    reasons = [each.reason for each in (execute(algorithm, assignment, site) for assignment in plan.assignments)
               if isinstance(each, ClientFailure) and each.stage == "train"]  # fmt: skip
    assert reasons and all("training.objective" in reason for reason in reasons)


def vector(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def number(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> float:
    return 1.0


def apart(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    return x.sum()


def infinite(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(x), y) * torch.inf


def wrong(model: nn.Module, x: Tensor, y: Tensor, start: Mapping[str, Tensor]) -> Tensor:
    raise KeyError("fc.wieght")


FAILURES = {
    "vector": r"torch\.float32 \(4,\)",
    "number": "got float",
    "apart": "does not depend",
    "infinite": "got inf in step 1",
    "wrong": r"KeyError: 'fc\.wieght' \(line \d+ of .*test_own\.py\)",
}


@pytest.mark.parametrize("name", FAILURES)
def test_wrong_objective_is_a_client_failure(name: str) -> None:
    algorithm = FedAvg(training=Training(fraction=0.5, batch_size=4, objective=f"{HERE}:{name}"))
    site = tiny_site(algorithm)
    assignment = first_plan(algorithm, site).assignments[0]
    result = execute(algorithm, assignment, replace(site, free=200.0))
    assert isinstance(result, ClientFailure)
    assert result.stage == "train"
    assert re.search(FAILURES[name], result.reason), result.reason


def test_function_of_a_notebook_is_found() -> None:
    notebook = sys.modules["__main__"]
    notebook.in_a_cell = sgd  # type: ignore[attr-defined]
    try:
        ours = trained(TinyNet(), own_of(PLAIN, None, "__main__:in_a_cell"))
    finally:
        del notebook.in_a_cell  # type: ignore[attr-defined]
    assert_same_bits(ours.params, trained(TinyNet(), PLAIN).params)
