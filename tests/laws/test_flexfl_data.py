"""The data of FlexFL's experiments (IEEE TCAD 2024, Sec. IV): CIFAR-10's 50,000 training labels, 100 clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fl_engine.core.samples import Data
from fl_engine.data import partitioning as p
from fl_engine.tasks import Classification

LABELS = torch.from_numpy(np.arange(50_000) % 10)
"""Of CIFAR-10: 5,000 of each class. No rule looks at their order."""
PICTURES = torch.zeros(1, 1, 1, 1, dtype=torch.uint8).expand(len(LABELS), 1, 1, 1)
CIFAR = Data("made", Classification(10), PICTURES, LABELS, PICTURES[:1], LABELS[:1], (0.0,), (1.0,))


def dealt(cap: bool, seed: int) -> p.Partition:
    """All samples go to the clients, since the authors take the proxy from the test set."""
    return p.partition(CIFAR, "dirichlet", 100, 0.0, seed, alpha=0.3, cap=cap)


@pytest.mark.parametrize(
    ("cap", "classes", "deviation"),
    [
        (True, 7.1, 200.0),  # with the authors' cap of N/K samples
        (False, 8.2, 280.0),
    ],
)
def test_the_cap_leaves_clients_fewer_classes_and_more_equal_sizes(cap: bool, classes: float, deviation: float) -> None:
    """Classes of a client and standard deviation of the clients' sizes, at alpha .3, means over 20 seeds."""
    counts = [dealt(cap, seed).counts for seed in range(20)]
    assert all(each.sum() == 50_000 for each in counts)
    assert np.mean([(each > 0).sum(0).mean() for each in counts]) == pytest.approx(classes, rel=0.1)
    assert np.mean([each.sum(0).std() for each in counts]) == pytest.approx(deviation, rel=0.1)
