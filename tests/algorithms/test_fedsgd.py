"""FedAvg and FedSGD as names that people type: their work, and one round against a gradient computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fl_engine.algorithms import FedSGD
from fl_engine.backends import InProcess
from fl_engine.core.errors import ConfigError
from fl_engine.core.samplers import Balanced
from fl_engine.core.types import ClientUpdate, Params
from fl_engine.exchange.client import Site
from fl_engine.rounds.server import ServerSite
from fl_engine.testing.tiny import (
    SEED,
    TRAINING,
    TinyNet,
    assert_same_bits,
    context_of,
    start_of,
    tiny_fleet,
    tiny_site,
)

SIZES = (1, 2, 3, 9, 5, 6, 7, 8, 4, 10)
PLAIN = replace(TRAINING, fraction=1.0, momentum=0.5, weight_decay=0.0)


def site_of(algorithm: Any) -> Site:
    return tiny_site(algorithm, TinyNet(), sizes=SIZES, fleet=tiny_fleet(len(SIZES)))


def after_a_round(algorithm: Any, site: Site) -> Params:
    state = start_of(algorithm, site)
    plan = algorithm.plan(state, context_of(site, 0, SEED))
    answers = sorted(InProcess(site).run(algorithm, plan), key=lambda answer: answer.client)
    assert all(isinstance(answer, ClientUpdate) and answer.metrics["steps"] == 1.0 for answer in answers)
    return dict(algorithm.merge(state, plan, answers, ServerSite(site)).params)


def gradient(site: Site, params: Params, clients: range) -> Params:
    network = site.family.module()
    network.load_state_dict(params)
    network.train()
    rows = torch.cat([torch.from_numpy(site.partition.clients[client]) for client in clients])
    x, y = site.data.normalise(site.data.train_x[rows]), site.data.train_y[rows]
    torch.nn.functional.cross_entropy(network(x), y).backward()
    return {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


def test_a_round_is_one_gradient_step_on_all_data() -> None:
    """w - lr * sum_k (n_k / n) grad F_k(w): the gradient of the mean loss over all samples, whoever holds them."""
    algorithm = FedSGD(training=PLAIN)
    site = site_of(algorithm)
    start = dict(start_of(algorithm, site).params)
    stepped, grads = after_a_round(algorithm, site), gradient(site, start, range(len(SIZES)))
    assert grads.keys() == start.keys()
    for name, grad in grads.items():
        assert grad.abs().max() > 1e-4
        torch.testing.assert_close(stepped[name], start[name] - PLAIN.lr * grad, rtol=0, atol=2e-7)


def test_what_training_says_of_local_work_changes_nothing() -> None:
    other = replace(PLAIN, epochs=7, batch_size=3, drop_last=False, sampler=Balanced(1.0))
    one, two = FedSGD(training=PLAIN), FedSGD(training=other)
    assert_same_bits(after_a_round(one, site_of(one)), after_a_round(two, site_of(two)))


def test_client_with_too_many_samples_is_refused() -> None:
    algorithm = FedSGD(training=PLAIN, most_samples=9)
    site = site_of(algorithm)
    with pytest.raises(ConfigError, match=r"algorithm\.most_samples"):
        algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED))
    with pytest.raises(ConfigError, match=r"partition.rule=local the server does not know"):
        algorithm.plan(start_of(algorithm, site), context_of(site, 0, SEED, samples=()))
    fits = FedSGD(training=PLAIN, most_samples=10)
    assert len(fits.plan(start_of(fits, site), context_of(site, 0, SEED)).orders) == len(SIZES)
