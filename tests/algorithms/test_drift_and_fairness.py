"""FedNova, SCAFFOLD, q-FFL and Ditto against the formulas of their papers: y = u*a + v*b + c on two clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_engine.algorithms import QFFL, Ditto, FedNova, Scaffold
from fl_engine.algorithms.training import Training
from fl_engine.core.errors import ConfigError
from fl_engine.core.samples import Data
from fl_engine.core.types import FULL, Assignment, ClientUpdate, Params, RoundPlan
from fl_engine.exchange.client import Site
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.store import FolderStore
from fl_engine.tasks import Regression
from fl_engine.testing.client_state import states_of
from fl_engine.testing.rounds import federated
from fl_engine.testing.tiny import TRAINING, start_of, tiny_site
from tests.harness.networks import Line

LR, STEPS = 0.05, 2
TRAINED = Training(fraction=1, epochs=STEPS, batch_size=2, lr=LR, lr_decay=1, momentum=0, weight_decay=0)
CLIENTS = (([[1.0, 2.0], [0.0, -1.0]], [3.0, 1.0]), ([[-1.0, 0.5], [2.0, 1.0]], [0.0, -2.0]))
"""Samples (a, b) and targets of both clients."""


def site_of(algorithm: Any) -> Site:
    x = torch.tensor([sample for samples, _ in CLIENTS for sample in samples])
    y = torch.tensor([[target] for _, targets in CLIENTS for target in targets])
    data, fleet = Data("line", Regression(bins=0), x, y, x, y), tiny_site(FedNova(TRAINING)).fleet[:2]
    return tiny_site(algorithm, Line(), sizes=(2, 2), fleet=fleet, data=data)


def gradient(client: int, w: np.ndarray) -> np.ndarray:
    """The gradient of the mean squared error at w = (u, v, c)."""
    samples, targets = (np.array(each) for each in CLIENTS[client])
    x = np.hstack([samples, np.ones((2, 1))])
    return np.array(2 / 2 * x.T @ (x @ w - targets))


def array_of(params: Params, prefix: str = "") -> np.ndarray:
    names = (f"{prefix}head.weight", f"{prefix}head.bias")
    return torch.cat([params[name].flatten().double() for name in names]).numpy()


def run(algorithm: Any, rounds: int, folder: Path) -> tuple[np.ndarray, Any, list[Params]]:
    """Return the first weights, the last state of the algorithm, and each client's state."""
    site = site_of(algorithm)
    state, _ = federated(Run(algorithm, site, RoundsConfig(stop=rounds, commit_every=1)), FolderStore(folder))
    return (
        array_of(start_of(algorithm, site).params),
        state,
        [state for _, (_, state) in sorted(states_of(folder).items())],
    )


def test_scaffold_follows_algorithm_1(tmp_path: Path) -> None:
    x, state, kept = run(Scaffold(TRAINED), 3, tmp_path)
    c, own = np.zeros(3), [np.zeros(3), np.zeros(3)]
    for _ in range(3):
        y, before = [x.copy(), x.copy()], [each.copy() for each in own]
        for i in range(2):
            for _ in range(STEPS):
                y[i] -= LR * (gradient(i, y[i]) - own[i] + c)
            own[i] = own[i] - c + (x - y[i]) / (STEPS * LR)
        x = (y[0] + y[1]) / 2
        c = c + sum(new - old for new, old in zip(own, before, strict=True)) / 2
    assert array_of(state.params) == pytest.approx(x, rel=1e-4, abs=1e-6)
    assert array_of(state.variate) == pytest.approx(c, rel=1e-3, abs=1e-4)
    for i in range(2):
        assert array_of(kept[i], "variate/") == pytest.approx(own[i], rel=1e-3, abs=1e-4)


def test_ditto_follows_algorithm_1(tmp_path: Path) -> None:
    lam = 0.8
    w, state, kept = run(Ditto(TRAINED, lam=lam), 3, tmp_path)
    v = [w.copy(), w.copy()]
    for _ in range(3):
        y = [w.copy(), w.copy()]
        for i in range(2):
            for _ in range(STEPS):
                v[i] -= LR * (gradient(i, v[i]) + lam * (v[i] - w))
                y[i] -= LR * gradient(i, y[i])
        w = (y[0] + y[1]) / 2
    assert array_of(state.params) == pytest.approx(w, rel=1e-4, abs=1e-6)
    for i in range(2):
        assert array_of(kept[i], "personal/") == pytest.approx(v[i], rel=1e-4, abs=1e-6)


def merged(
    algorithm: Any, steps: Sequence[float], samples: Sequence[int], losses: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return the weights before and after a round, and the change of each client: 1, 2, 3 and -3, 0, 1."""
    site = site_of(algorithm)
    state, changes = start_of(algorithm, site), [np.array([1.0, 2.0, 3.0]), np.array([-3.0, 0.0, 1.0])]
    updates = []
    for client, change in enumerate(changes):
        moved = torch.tensor(array_of(state.params) + change).float()
        payload = {"head.weight": moved[None, :2], "head.bias": moved[2:]}
        metrics = {"loss": 1.0, "steps": steps[client], "loss_before": losses[client]}
        updates.append(ClientUpdate(0, client, FULL, payload, samples[client], metrics))
    plan = RoundPlan(0, tuple(Assignment(0, client, FULL, dict(state.params), 0, 0) for client in range(2)))
    after = algorithm.merge(state, plan, updates, ServerSite(site))
    return array_of(state.params), array_of(after.params), changes


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fednova_divides_changes_by_their_distance(momentum: float) -> None:
    steps, shares = (1.0, 4.0), (0.25, 0.75)
    before, after, changes = merged(FedNova(replace(TRAINED, momentum=momentum)), steps, (1, 3), (1.0, 1.0))
    # In step k of a constant gradient, the velocity is 1 + m + ... + m^(k-1).
    reach = [sum(sum(momentum**j for j in range(k + 1)) for k in range(int(count))) for count in steps]
    tau = sum(share * a for share, a in zip(shares, reach, strict=True))
    moved = tau * sum(share * d / a for share, d, a in zip(shares, changes, reach, strict=True))
    assert after - before == pytest.approx(moved, rel=1e-5)


@pytest.mark.parametrize("q", [0.0, 1.0, 2.5])
def test_qffl_follows_algorithm_2(q: float) -> None:
    losses, shares, lipschitz = (0.5, 4.0), (0.25, 0.75), 1 / LR
    before, after, changes = merged(QFFL(TRAINED, q=q), (2.0, 2.0), (1, 3), losses)
    gradients = [-lipschitz * change for change in changes]
    delta = sum(p * loss**q * g for p, loss, g in zip(shares, losses, gradients, strict=True))
    h = sum(
        p * (q * loss ** (q - 1) * float(g @ g) + lipschitz * loss**q)
        for p, loss, g in zip(shares, losses, gradients, strict=True)
    )
    assert after - before == pytest.approx(-delta / h, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", [FedNova, Scaffold])
def test_momentum_of_one_is_refused(kind: Any) -> None:
    algorithm = kind(replace(TRAINED, momentum=1.0))
    with pytest.raises(ConfigError) as error:
        start_of(algorithm, site_of(algorithm))
    assert error.value.path == "training.optimizer"
