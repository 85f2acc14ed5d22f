"""The server's data: classes that it alone owns, or a proxy that clients hold too; and FlexFL's cap on clients (IEEE
TCAD 2024, Sec. IV)."""

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
from fl_engine.data.partition import Partition
from fl_engine.rounds.collect import Clients
from fl_engine.rounds.options import RoundsConfig
from fl_engine.rounds.round import Progress, run_round
from fl_engine.rounds.run import Run
from fl_engine.tasks import Classification
from fl_engine.testing.tiny import TRAINING, start_of, tiny_site
from fl_engine.training.evaluation import OWNERS, Score, by_owner
from tests.harness.jobs import dealt

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
    return dealt(DATA, rule, 5, share, seed, server_classes=owned, **RULES[rule])


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


@pytest.mark.parametrize("owned", [(8, 10), (8, 9, 8), tuple(range(10))])
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
        rows.append(run_round(run, Progress(start_of(algorithm, here)), 0, clients)[1].metrics)
    plain, told = rows
    levels = [member.name for member in site.pool if member.reported]
    wanted = {f"{name}/{level}" for name in OWNERS for level in levels}
    assert told.keys() - plain.keys() == wanted and len(levels) > 1
    assert all(0 <= told[name] <= 1 for name in wanted)
    assert all(told[f"accuracy/{level}"] == plain[f"accuracy/{level}"] for level in levels)


@pytest.mark.parametrize("rule", RULES)
@given(share=st.floats(0.003, 1.0), seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_shared_proxy_leaves_the_clients_all_samples(rule: str, share: float, seed: int) -> None:
    found = dealt(DATA, rule, 5, share, seed, proxy_shared=True, **RULES[rule])
    assert sorted(chain.from_iterable(found.clients)) == list(range(len(Y))) and found.counts.sum() == len(Y)
    proxy = proxy_of(found)
    assert len(set(proxy)) == len(proxy) == int(np.floor(len(Y) * share + 0.5))
    if share < 0.9:
        assert proxy == proxy_of(dealt(DATA, "iid", 2, share, seed)), "shared or not, it is the same proxy"


def proxy_of(partition: Partition) -> list[int]:
    return sorted([*partition.proxy_train.tolist(), *partition.proxy_test.tolist()])


LABELS = torch.from_numpy(np.arange(50_000) % 10)
"""Of CIFAR-10: 5,000 of each class. No rule looks at their order."""
PICTURES = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(len(LABELS), 1, 1, 1)
CIFAR = Data("made", Classification(10), PICTURES, LABELS, PICTURES[:1], LABELS[:1], (0.0,), (1.0,))


def capped(cap: bool, seed: int) -> Partition:
    """All samples go to the clients, since the authors take the proxy from the test set."""
    return dealt(CIFAR, "dirichlet", 100, 0.0, seed, alpha=0.3, cap=cap)


@pytest.mark.parametrize(
    ("cap", "classes", "deviation"),
    [
        (True, 7.1, 200.0),  # with the authors' cap of N/K samples
        (False, 8.2, 280.0),
    ],
)
def test_cap_gives_fewer_classes_and_more_equal_sizes(cap: bool, classes: float, deviation: float) -> None:
    """Classes of a client and standard deviation of the clients' sizes, at alpha .3, means over 20 seeds."""
    counts = [capped(cap, seed).counts for seed in range(20)]
    assert all(each.sum() == 50_000 for each in counts)
    assert np.mean([(each > 0).sum(0).mean() for each in counts]) == pytest.approx(classes, rel=0.1)
    assert np.mean([each.sum(0).std() for each in counts]) == pytest.approx(deviation, rel=0.1)
