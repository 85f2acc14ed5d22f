"""Figures that a method has its clients report: who may declare what, that measuring moves nothing, and what a lie is
worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fl_engine.algorithms import FedAvg
from fl_engine.backends import InProcess, Processes
from fl_engine.core.contracts import ClientContext, ClientMetric
from fl_engine.core.slicing import runnable
from fl_engine.core.types import ClientFailure, ClientResult, ClientUpdate, RoundPlan
from fl_engine.exchange.client import Site, execute
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.selection import Uniform
from fl_engine.storage.store import FolderStore
from fl_engine.testing.algorithms import AlgorithmSuite
from fl_engine.testing.tiny import (
    CLASSES,
    TRAINING,
    TinyNet,
    assert_same_bits,
    assert_same_results,
    first_plan,
    start_of,
    tiny_site,
)
from fl_engine.training.numerics import Numerics
from tests.harness.plugins import MOST, LargestUtility

ASKING = FedAvg(training=TRAINING, eligible="all", selection=LargestUtility())


class TestASelectionThatAsksItsClients(AlgorithmSuite):
    @pytest.fixture
    def algorithm(self) -> FedAvg:
        return ASKING

    def promises_to_fit(self, algorithm: Any) -> bool:
        return False  # sends all the largest model


@dataclass(frozen=True)
class Declares(Uniform):
    metrics: tuple[tuple[str, float, float, Callable[[ClientContext], float]], ...] = ()

    def client_metrics(self) -> tuple[ClientMetric, ...]:
        return tuple(ClientMetric(*each) for each in self.metrics)


def asking(*metrics: tuple[Any, ...]) -> FedAvg:
    return FedAvg(training=TRAINING, eligible="all", selection=Declares(model="largest", metrics=metrics))


def work(algorithm: Any, **site: Any) -> tuple[Site, RoundPlan]:
    at = replace(tiny_site(algorithm), **site)
    return at, first_plan(algorithm, at)


def by_client(results: Any) -> list[ClientResult]:
    return sorted(results, key=lambda result: result.client)


def test_the_losses_are_those_of_the_received_weights() -> None:
    site, plan = work(ASKING)
    assignment = plan.assignments[0]
    result = execute(ASKING, assignment, site)
    assert isinstance(result, ClientUpdate)
    own = site.partition.clients[assignment.client]
    x, y = site.data.normalise(site.data.train_x[own]), site.data.train_y[own]
    with torch.no_grad():
        losses = cross_entropy(
            runnable(TinyNet(), assignment.spec, dict(assignment.payload)).eval()(x), y, reduction="none"
        )
    expected = len(y) * math.sqrt(sum(float(loss) ** 2 for loss in losses) / len(y))
    assert result.metrics["utility"] == pytest.approx(expected, rel=1e-6)
    assert expected > len(y) * math.log(CLASSES) / 2, "an untrained network has losses to speak of"


def spoil(client: ClientContext) -> float:
    total = float(client.losses.sum()) + float(torch.randn(()))
    for params in (client.received, client.trained):
        for tensor in params.values():
            tensor.fill_(7.0)
    client.losses.zero_()
    client.x.zero_()
    client.y.zero_()
    return max(-1e3, min(1e3, total))


@pytest.mark.parametrize("numerics", [Numerics(), Numerics("batched", 3)], ids=["single", "batched"])
def test_measuring_moves_no_bit_of_training(numerics: Numerics) -> None:
    plain = FedAvg(training=TRAINING, eligible="all", selection=Uniform(model="largest"))
    site, plan = work(plain, numerics=numerics)
    before = {name: tensor.clone() for name, tensor in plan.assignments[0].payload.items()}
    bare = by_client(InProcess(site).run(plain, plan))
    measured = by_client(InProcess(site).run(asking(("spoilt", -1e3, 1e3, spoil)), plan))
    assert_same_bits(plan.assignments[0].payload, before)
    for a, b in zip(bare, measured, strict=True):
        assert isinstance(a, ClientUpdate) and isinstance(b, ClientUpdate)
        assert_same_bits(a.payload, b.payload)
        assert {**a.metrics, "seconds": 0} == {n: v for n, v in {**b.metrics, "seconds": 0}.items() if n != "spoilt"}


@pytest.mark.parametrize("numerics", [Numerics(), Numerics("batched", 3)], ids=["single", "batched"])
def test_every_backend_measures_the_same(numerics: Numerics, tmp_path: Path) -> None:
    site, plan = work(ASKING, numerics=numerics)
    expected = [execute(ASKING, assignment, site) for assignment in plan.assignments]
    assert all(isinstance(result, ClientUpdate) and result.metrics["utility"] > 0 for result in expected)
    with closing(Processes(site, ("cpu", "cpu"))) as processes:
        for backend in (InProcess(site), InProcess(site, ("cpu", "cpu")), processes):
            assert_same_results(by_client(backend.run(ASKING, plan)), expected)


def says(value: float, client: ClientContext) -> float:
    return value


@pytest.mark.parametrize("value", [1.5, -0.5, math.nan, math.inf])
def test_metric_out_of_bounds_fails_its_client(value: float, tmp_path: Path) -> None:
    algorithm = asking(("a", 0, 1, partial(says, value)))
    site, plan = work(algorithm)
    with closing(Processes(site, ("cpu",))) as p:
        found = [by_client(backend.run(algorithm, plan)) for backend in (InProcess(site), p)]
    assert found[0] == found[1] and len(found[0]) == len(plan.assignments)
    for result in found[0]:
        assert isinstance(result, ClientFailure) and result.stage == "train"
        assert "client metric a" in result.reason


def received(tmp_path: Path, **said: float | None) -> ClientResult:
    site, plan = work(ASKING)
    honest = execute(ASKING, plan.assignments[0], site)
    assert isinstance(honest, ClientUpdate)
    metrics = {name: value for name, value in {**honest.metrics, **said}.items() if value is not None}
    mailbox = Mailbox(FolderStore(tmp_path), replace(site.rules, algorithm=ASKING), key=lambda assignment: b"key")
    mailbox.put_result(plan, replace(honest, metrics=metrics))
    return mailbox.receive(plan, honest.client)


@pytest.mark.parametrize("worst", [0.0, MOST])
def test_the_worst_lie_is_the_bound(worst: float, tmp_path: Path) -> None:
    lie = received(tmp_path, utility=worst)
    assert isinstance(lie, ClientUpdate) and lie.metrics["utility"] == worst
    site, plan = work(ASKING)
    tables = LargestUtility().learn(start_of(ASKING, site).tables, plan.assignments[0], lie, 0.0)
    assert tables["utility"][0][lie.client] == worst
    assert all(0 <= value <= MOST for value in tables["utility"][0])


LIES: dict[str, dict[str, float | None]] = {
    "one step beyond": {"utility": math.nextafter(MOST, math.inf)},
    "one step below": {"utility": math.nextafter(0, -1)},
    "left out": {"utility": None},
    "one more": {"more": 0.0},
    "the engine's left out": {"free": None},
}


@pytest.mark.parametrize("lie", LIES)
def test_one_step_beyond_is_refused(lie: str, tmp_path: Path) -> None:
    result = received(tmp_path, **LIES[lie])
    assert isinstance(result, ClientFailure) and (result.stage, result.code) == ("validate", "metrics")
