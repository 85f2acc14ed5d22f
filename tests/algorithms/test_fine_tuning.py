"""The server's fine-tuning, against arithmetic written out here: y = u*a + v*b + c on two samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import AdaGQ, DAdaQuant, FedAvg
from fl_engine.algorithms.fine_tuning import FineTuning
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import Params
from fl_engine.rounds.server import ServerSite
from fl_engine.tasks import Regression
from fl_engine.testing.tiny import TRAINING, TinyNet, assert_same_bits, start_of, tiny_site
from fl_engine.training.numerics import Numerics
from tests.harness.networks import Line

SAMPLES = (((1.0, 2.0), 3.0), ((0.0, -1.0), 1.0))
"""((a, b), y)"""
AGGREGATE = (0.5, -0.25, 0.125)
"""(u, v, c)"""
LR, GAMMA = 0.1, 0.7


def weights(line: Sequence[float]) -> Params:
    return {"head.weight": torch.tensor([[line[0], line[1]]]), "head.bias": torch.tensor([line[2]])}


def of(params: Params) -> tuple[float, ...]:
    return *params["head.weight"][0].tolist(), params["head.bias"].item()


def server() -> ServerContext:
    """Owns both samples of client 0; client 1 has the same."""
    x = torch.tensor([sample for sample, _ in SAMPLES] * 2)
    y = torch.tensor([[wanted] for _, wanted in SAMPLES] * 2)
    data = Data("line", Regression(bins=0), x, y, x, y)
    site = tiny_site(FedAvg(TRAINING), Line(), sizes=(2, 2), fleet=tiny_site(FedAvg(TRAINING)).fleet[:2], data=data)
    parts = replace(site.partition, proxy_train=site.partition.clients[0][:1], proxy_test=site.partition.clients[0][1:])
    return ServerSite(replace(site, partition=parts))


def gradient(line: Sequence[float]) -> tuple[float, ...]:
    u, v, c = line
    errors = [u * a + v * b + c - wanted for (a, b), wanted in SAMPLES]
    rows = [(2 * e * a / 2, 2 * e * b / 2, 2 * e / 2) for e, ((a, b), _) in zip(errors, SAMPLES, strict=True)]
    return tuple(map(sum, zip(*rows, strict=True)))


def stepped(line: Sequence[float], lr: float = LR) -> tuple[float, ...]:
    """One step of size `lr` from `line`; the regulariser pulls to AGGREGATE."""
    pulled = zip(line, gradient(line), AGGREGATE, strict=True)
    return tuple(theta - lr * (g + GAMMA * (theta - to)) for theta, g, to in pulled)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_fine_tuning_steps_by_hand(epochs: int) -> None:
    tuning, expected = FineTuning(batch_size=2, lr=LR, gamma=GAMMA, epochs=epochs), AGGREGATE
    for _ in range(epochs):
        expected = stepped(expected)
    assert of(server().train(tuning.task(0), weights(AGGREGATE))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("schedule", "lr"), [("constant", LR), ("inverse_sqrt", LR / 2)])
def test_fine_tuning_step_of_the_fourth_round_by_hand(schedule: Any, lr: float) -> None:
    tuning = FineTuning(batch_size=2, lr=LR, gamma=GAMMA, lr_schedule=schedule)
    found = of(server().train(tuning.task(0, round=3), weights(AGGREGATE)))
    assert found == pytest.approx(stepped(AGGREGATE, lr), rel=1e-5)


@pytest.mark.parametrize("strategy", ["single", "batched"])
def test_order_of_names_changes_no_bit(strategy: str) -> None:
    site = tiny_site(FedAvg(TRAINING))
    own = replace(site.partition, proxy_train=site.partition.clients[0][:7], proxy_test=site.partition.clients[0][7:])
    numerics = Numerics(strategy)  # type: ignore[arg-type]
    here = ServerSite(replace(site, partition=own, numerics=numerics))
    tuning = FineTuning(epochs=4, batch_size=3, lr=0.1, gamma=0.5)
    aggregate = initial_params(TinyNet(), 1)
    whole = here.train(tuning.task(3), aggregate)
    swapped = {name: aggregate[name] for name in sorted(aggregate, reverse=True)}
    assert_same_bits(ServerSite(lambda: here.site).train(tuning.task(3), swapped), whole)
    unlike = here.train(replace(tuning, gamma=0.0).task(3), aggregate)
    assert any(not torch.equal(whole[name], unlike[name]) for name in whole)


@pytest.mark.parametrize("kind", [AdaGQ, DAdaQuant])
def test_a_server_without_data_is_refused_before_the_first_round(kind: Any) -> None:
    algorithm = kind(training=TRAINING, fine_tuning=FineTuning(gamma=0.0))
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError):
        start_of(algorithm, site)
    start_of(replace(algorithm, fine_tuning=None), site)
    parts = replace(site.partition, proxy_train=site.partition.clients[0][:1])
    start_of(algorithm, replace(site, partition=parts))
