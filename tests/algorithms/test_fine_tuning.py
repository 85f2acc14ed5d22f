"""The server's fine-tuning, against arithmetic written out here: y = u*a + v*b + c on two samples."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from fl_engine.algorithms import AdaGQ, DAdaQuant, FedAvg
from fl_engine.algorithms.fine_tuning import FineTuning, fine_tuned
from fl_engine.core.contracts import ServerContext
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import FULL, HEAD, Axis, ParamLayout, Params, Prunable, SubmodelSpec
from fl_engine.models.layers import FREE, linear_slots
from fl_engine.rounds.server import LazyServer, ServerSite
from fl_engine.tasks import Regression
from fl_engine.testing.tiny import TRAINING, TinyNet, assert_same_bits, start_of, tiny_site
from fl_engine.training.numerics import Numerics


@dataclass(frozen=True)
class Line:
    """(B, 2) -> one number: weight (u, v), bias c."""

    input_shape: tuple[int, ...] = (2,)
    outputs: int = 1

    def layout(self) -> ParamLayout:
        return ParamLayout({HEAD: 1}, linear_slots("head", "head", FREE, Axis(HEAD)))

    def module(self, spec: SubmodelSpec = FULL) -> nn.Module:
        return nn.Sequential(OrderedDict(head=nn.Linear(2, 1)))

    def prunable(self) -> tuple[Prunable, ...]:
        return ()


SAMPLES = (((1.0, 2.0), 3.0), ((0.0, -1.0), 1.0))
"""((a, b), y)"""
AGGREGATE, PREVIOUS = (0.5, -0.25, 0.125), (0.2, 0.15, 0.125)
"""(u, v, c); their difference is (0.3, -0.4, 0), whose norm is 0.5."""
LR, GAMMA = 0.1, 0.7


def weights(line: Sequence[float]) -> Params:
    return {"head.weight": torch.tensor([[line[0], line[1]]]), "head.bias": torch.tensor([line[2]])}


def of(params: Params) -> tuple[float, ...]:
    return *params["head.weight"][0].tolist(), params["head.bias"].item()


def server(numerics: Numerics | None = None) -> ServerContext:
    """Owns both samples of client 0; client 1 has the same."""
    x = torch.tensor([sample for sample, _ in SAMPLES] * 2)
    y = torch.tensor([[wanted] for _, wanted in SAMPLES] * 2)
    data = Data("line", Regression(bins=0), x, y, x, y)
    site = tiny_site(FedAvg(TRAINING), Line(), sizes=(2, 2), fleet=tiny_site(FedAvg(TRAINING)).fleet[:2], data=data)
    parts = replace(site.partition, proxy_train=site.partition.clients[0][:1], proxy_test=site.partition.clients[0][1:])
    return ServerSite(replace(site, partition=parts, numerics=numerics or site.numerics))


def gradient(line: Sequence[float]) -> tuple[float, ...]:
    u, v, c = line
    errors = [u * a + v * b + c - wanted for (a, b), wanted in SAMPLES]
    rows = [(2 * e * a / 2, 2 * e * b / 2, 2 * e / 2) for e, ((a, b), _) in zip(errors, SAMPLES, strict=True)]
    return tuple(map(sum, zip(*rows, strict=True)))


def stepped(line: Sequence[float], norm: str) -> tuple[float, ...]:
    """One step of size LR from `line`, where the regulariser pulls to AGGREGATE."""
    away = [theta - g for theta, g in zip(line, AGGREGATE, strict=True)]
    length = math.sqrt(sum(d * d for d in away))
    pull = [d if norm == "squared" else d / length if length else 0.0 for d in away]
    return tuple(t - LR * (g + GAMMA * p) for t, g, p in zip(line, gradient(line), pull, strict=True))


def tuned(given: ServerContext | None = None, seed: int = 0, **options: object) -> tuple[float, ...]:
    tuning = replace(FineTuning(batch_size=2, lr=LR, gamma=GAMMA), **options)  # type: ignore[arg-type]
    return of(fine_tuned(tuning, server() if given is None else given, weights(AGGREGATE), weights(PREVIOUS), seed))


VARIANTS = tuple(product(("squared", "printed"), ("aggregate", "previous")))


@pytest.mark.parametrize(("norm", "start"), VARIANTS)
def test_the_first_step_by_hand(norm: str, start: str) -> None:
    first = stepped(AGGREGATE if start == "aggregate" else PREVIOUS, norm)
    assert tuned(norm=norm, start=start) == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(("norm", "start"), VARIANTS)
def test_the_second_step_is_pulled_to_the_aggregate(norm: str, start: str) -> None:
    first = stepped(AGGREGATE if start == "aggregate" else PREVIOUS, norm)
    assert tuned(norm=norm, start=start, epochs=2) == pytest.approx(stepped(first, norm), rel=1e-5)


@pytest.mark.parametrize("norm", ["squared", "printed"])
@pytest.mark.parametrize("strategy", ["single", "batched"])
def test_the_order_of_the_names_changes_no_bit(norm: str, strategy: str) -> None:
    site = tiny_site(FedAvg(TRAINING))
    own = replace(site.partition, proxy_train=site.partition.clients[0][:7], proxy_test=site.partition.clients[0][7:])
    numerics = Numerics(strategy)  # type: ignore[arg-type]
    here = ServerSite(replace(site, partition=own, numerics=numerics))
    tuning = FineTuning(epochs=4, batch_size=3, lr=0.1, gamma=0.5, norm=norm, start="previous")  # type: ignore[arg-type]
    aggregate, previous = (initial_params(TinyNet(), seed) for seed in (1, 2))
    whole = fine_tuned(tuning, here, aggregate, previous, 3)
    swapped = [{name: given[name] for name in sorted(given, reverse=True)} for given in (aggregate, previous)]
    assert_same_bits(fine_tuned(tuning, LazyServer(lambda: here), *swapped, 3), whole)
    unlike = fine_tuned(replace(tuning, gamma=0.0), here, aggregate, previous, 3)
    assert any(not torch.equal(whole[name], unlike[name]) for name in whole)


@pytest.mark.parametrize("kind", [AdaGQ, DAdaQuant])
def test_a_server_without_data_is_refused_before_the_first_round(kind: Any) -> None:
    algorithm = kind(training=TRAINING, fine_tuning=FineTuning(gamma=0.0))
    site = tiny_site(algorithm)
    with pytest.raises(ConfigError, match="the algorithm asks for data on the server"):
        start_of(algorithm, site)
    start_of(replace(algorithm, fine_tuning=None), site)
    parts = replace(site.partition, proxy_train=site.partition.clients[0][:1])
    start_of(algorithm, replace(site, partition=parts))


def test_at_the_aggregate_the_first_step_is_a_plain_one() -> None:
    """Neither norm has a gradient there: no NaN from 0 / 0."""
    plain = tuned(gamma=0.0)
    assert tuned(norm="squared") == plain
    assert tuned(norm="printed") == plain
