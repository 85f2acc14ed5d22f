"""The data of FlexFL's experiments (IEEE TCAD 2024, Sec. IV): the cap on clients, and a proxy that is theirs too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_engine.core.samples import Data
from fl_engine.data import partitioning as p
from fl_engine.data.partition import Partition
from fl_engine.tasks import Classification

LABELS = torch.from_numpy(np.arange(50_000) % 10)
"""Of CIFAR-10: 5,000 of each class. No rule looks at their order."""
PICTURES = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(len(LABELS), 1, 1, 1)
CIFAR = Data("made", Classification(10), PICTURES, LABELS, PICTURES[:1], LABELS[:1], (0.0,), (1.0,))


def dealt(cap: bool, seed: int) -> Partition:
    """All samples go to the clients, since the authors take the proxy from the test set."""
    return p.partition(CIFAR, "dirichlet", 100, 0.0, seed, alpha=0.3, cap=cap)


@pytest.mark.parametrize(
    ("cap", "classes", "deviation"),
    [
        (True, 7.1, 200.0),  # with the authors' cap of N/K samples
        (False, 8.2, 280.0),
    ],
)
def test_cap_gives_fewer_classes_and_more_equal_sizes(cap: bool, classes: float, deviation: float) -> None:
    """Classes of a client and standard deviation of the clients' sizes, at alpha .3, means over 20 seeds."""
    counts = [dealt(cap, seed).counts for seed in range(20)]
    assert all(each.sum() == 50_000 for each in counts)
    assert np.mean([(each > 0).sum(0).mean() for each in counts]) == pytest.approx(classes, rel=0.1)
    assert np.mean([each.sum(0).std() for each in counts]) == pytest.approx(deviation, rel=0.1)


SMALL = replace(
    CIFAR, train_x=CIFAR.train_x[:1000], train_y=CIFAR.train_y[:1000], natural_client=torch.arange(1000) % 25
)
RULES: dict[str, dict[str, object]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3, "cap": True},
    "dirichlet_per_client": {"alpha": 0.3},
    "quantity": {"alpha": 0.3},
    "disjoint_labels": {"labels_per_client": 3},
    "natural": {},
    "manual": {"owner": np.arange(1000) // 50},
}


def shared(rule: str, share: float, seed: int = 0) -> Partition:
    return p.partition(SMALL, rule, 20, share, seed, proxy_shared=True, **RULES[rule])  # type: ignore[arg-type]


def proxy_of(partition: Partition) -> list[int]:
    return sorted([*partition.proxy_train.tolist(), *partition.proxy_test.tolist()])


@pytest.mark.parametrize("rule", RULES)
@given(share=st.floats(0.003, 1.0), seed=st.integers(0, 2**32))
@settings(max_examples=10)
def test_clients_have_all_samples_and_the_server_some_of_them(rule: str, share: float, seed: int) -> None:
    found = shared(rule, share, seed)
    assert sorted(np.concatenate(found.clients).tolist()) == list(range(1000))
    assert found.counts.sum() == 1000
    proxy = proxy_of(found)
    assert len(set(proxy)) == len(proxy) == int(np.floor(1000 * share + 0.5))
    if share < 0.9:
        assert proxy == proxy_of(p.partition(SMALL, "iid", 2, share, seed)), "shared or not, it is the same proxy"


@pytest.mark.parametrize(("share", "train", "test"), [(0.003, 120, 30), (0.01, 400, 100), (1.0, 40_000, 10_000)])
def test_the_proxies_of_table_iii(share: float, train: int, test: int) -> None:
    """Of CIFAR-10, and the .3 % of Sec. IV-F2: 80 % to pre-train, 20 % to measure APoZ."""
    found = p.partition(CIFAR, "iid", 100, share, 0, proxy_shared=True)
    assert (len(found.proxy_train), len(found.proxy_test)) == (train, test)
    assert [len(part) for part in found.clients] == [500] * 100
