"""Classes that the server alone owns: its proxy has all their samples and no others, clients have none of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.algorithms import HeteroFL
from fl_engine.backends import InProcess
from fl_engine.core.errors import PartitionError
from fl_engine.core.samples import Data
from fl_engine.data import partitioning as p
from fl_engine.data.partition import Partition
from fl_engine.rounds.collect import Clients
from fl_engine.rounds.round import Progress, play
from fl_engine.rounds.run import Run
from fl_engine.rounds.terms import RoundsConfig
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, start_of, tiny_site
from fl_engine.training.evaluation import OWNERS, Score, by_owner

CLASSES = 10
Y = np.arange(1000) % CLASSES


def made() -> Data:
    x = torch.zeros(len(Y), 1, 1, 1, dtype=torch.uint8)
    y = torch.from_numpy(Y)
    return Data("made", Classification(CLASSES), x, y, x[:1], y[:1], (0.0,), (1.0,), torch.arange(len(Y)) % 7)


DATA = made()
OWNED = (8, 9)
RULES: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.5},
    "dirichlet_per_client": {"alpha": 0.5},
    "quantity": {"alpha": 0.5},
    "disjoint_labels": {"labels_per_client": 3},
    "natural": {},
    "manual": {"owner": np.arange(len(Y)) // 200},
}


def cut(rule: str = "iid", owned: tuple[int, ...] = OWNED, seed: int = 0, share: float = 0.05) -> Partition:
    return p.partition(DATA, rule, 5, share, seed, server_classes=owned, **RULES[rule])


@pytest.mark.parametrize("rule", RULES)
@given(owned=st.sets(st.integers(0, CLASSES - 1), min_size=1, max_size=6).map(tuple), seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_proxy_has_the_servers_classes_clients_the_others(rule: str, owned: tuple[int, ...], seed: int) -> None:
    found = cut(rule, owned, seed)
    proxy = np.concatenate([found.proxy_train, found.proxy_test])
    assert sorted(proxy) == np.flatnonzero(np.isin(Y, owned)).tolist()
    assert (len(found.proxy_train), len(found.proxy_test)) == (80 * len(owned), 20 * len(owned))
    assert sorted(chain.from_iterable(found.clients)) == np.flatnonzero(~np.isin(Y, owned)).tolist()
    assert all((np.diff(part) > 0).all() for part in (found.proxy_train, found.proxy_test, *found.clients))
    assert not found.counts[list(owned)].any() and found.counts.sum() == len(Y) - len(proxy)
    assert found.server_classes == tuple(sorted(owned))


@pytest.mark.parametrize("owned", [(8, 10), (-1,), (8, 9, 8), tuple(range(10))])
def test_classes_that_cannot_be_meant_are_refused(owned: tuple[int, ...]) -> None:
    with pytest.raises(PartitionError, match=r"partition\.server_classes"):
        cut(owned=owned)


def test_accuracy_by_owner_by_hand() -> None:
    """Classes 0, 1 are the devices', 2 the server's: 3 + 1 of 6, and 3 of 4 samples are right."""
    confusion = torch.tensor([[3, 0, 1], [1, 1, 0], [0, 1, 3]])
    score = Score(0.7, 1.0, {"accuracy": 0.7}, confusion)
    found = by_owner(score, (2,))
    assert dict(found.metrics) == {
        "accuracy": 0.7,
        "accuracy_device_classes": 4 / 6,
        "accuracy_server_classes": 3 / 4,
    }
    assert next(iter(found.metrics)) == "accuracy" and (found.value, found.loss) == (0.7, 1.0)
    assert by_owner(score, ()) is score


def test_a_round_scores_each_level_by_owner() -> None:
    algorithm = HeteroFL(training=TRAINING, static_bn=False)
    site = tiny_site(algorithm)
    owned = replace(site, partition=replace(site.partition, server_classes=(3,)))
    rows = []
    for here in (site, owned):
        run = Run(algorithm, here, RoundsConfig(stop=1))
        clients = Clients(InProcess(here), None, lambda: False)
        rows.append(play(run, Progress(start_of(algorithm, here)), 0, clients)[1].metrics)
    plain, told = rows
    levels = [member.name for member in site.pool if member.reported]
    wanted = {f"{name}/{level}" for name in OWNERS for level in levels}
    assert told.keys() - plain.keys() == wanted and len(levels) > 1
    assert all(0 <= told[name] <= 1 for name in wanted)
    assert all(told[f"accuracy/{level}"] == plain[f"accuracy/{level}"] for level in levels)
