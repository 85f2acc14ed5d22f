"""How far a client's update moved the weights it was sent, and how large a model is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fl_engine.algorithms import FlexFL
from fl_engine.core.slicing import is_statistic
from fl_engine.core.types import ClientUpdate
from fl_engine.exchange.client import execute
from fl_engine.models.small_cnn import SmallCNN
from fl_engine.rounds.acceptance import Moved
from fl_engine.rounds.movement import Movements, movement, size_of
from fl_engine.testing.tiny import SEED, TRAINING, context_of, start_of, tiny_site

ALGORITHM = FlexFL(training=TRAINING)
SITE = tiny_site(ALGORITHM, SmallCNN((1, 8, 8), 4, width=0.25, norm="static"))
PLAN = ALGORITHM.plan(start_of(ALGORITHM, SITE), context_of(SITE, 0, SEED))
ORDER = PLAN.orders[0]


def moved_by(weights: float, statistics: float = 0.0) -> ClientUpdate:
    """An update of the network with statistics, each of whose numbers moved by so much."""
    payload = {n: t + (statistics if is_statistic(n) else weights) for n, t in ORDER.payload.items()}
    return ClientUpdate(0, ORDER.client, ORDER.spec, payload, 8, {})


def test_how_far_an_update_moved() -> None:
    weights = sum(t.numel() for name, t in ORDER.payload.items() if not is_statistic(name))
    assert movement(moved_by(0.0), ORDER, SITE.layout) == Moved(0.0, 0.0)
    assert movement(moved_by(2.0), ORDER, SITE.layout) == (pytest.approx(2 * weights**0.5), 0.0, 1.0)
    assert movement(moved_by(0.0, 3.0), ORDER, SITE.layout) == (0.0, pytest.approx(3.0), 1.0)
    without = tiny_site(ALGORITHM)
    order = ALGORITHM.plan(start_of(ALGORITHM, without), context_of(without, 0, SEED)).orders[0]
    honest = execute(ALGORITHM, order, without)
    assert isinstance(honest, ClientUpdate)
    weights, statistics, steps = movement(honest, order, without.layout)
    assert weights > 0 and statistics == 0.0, "a network without statistics"
    assert steps == honest.metrics["steps"] > 1


def test_how_far_is_the_same_bits_in_whatever_order_of_axes() -> None:
    honest = execute(ALGORITHM, ORDER, SITE)
    assert isinstance(honest, ClientUpdate)
    last = torch.channels_last
    other = {n: t.contiguous(memory_format=last) if t.dim() == 4 else t for n, t in honest.payload.items()}
    assert any(not t.is_contiguous() for t in other.values())
    assert movement(replace(honest, payload=other), ORDER, SITE.layout) == movement(honest, ORDER, SITE.layout)


@pytest.mark.parametrize("held", [0, 2**20])
def test_together_or_alone_updates_moved_as_far_to_the_bit(monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    monkeypatch.setattr("fl_engine.rounds.movement.WAITING_BYTES", held)
    generator = torch.Generator().manual_seed(1)
    movements, alone = Movements(PLAN, SITE.layout), {}
    for order in PLAN.orders:
        payload = {n: t + torch.randn(t.shape, generator=generator) for n, t in order.payload.items()}
        if order.client % 3 == 0:
            payload.popitem()
        update = ClientUpdate(0, order.client, order.spec, payload, 8, {"steps": float(order.client)})
        alone[order.client] = movement(update, order, SITE.layout)
        movements.add(update)
    assert len(alone) > 2 and movements.all() == alone
    assert list(movements.all()) == list(alone), "in the order in which they came"


def test_how_large_a_model_is() -> None:
    params = {"w": torch.tensor([3.0, -3.0]), "bn.running_var": torch.tensor([1.0]), "bn.running_mean": torch.zeros(1)}
    assert size_of(params) == (pytest.approx(18**0.5), pytest.approx(0.5**0.5), 1.0)
