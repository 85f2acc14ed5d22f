"""Local accuracy: which test samples are a client's, and what a model chooses among."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fl_engine.core.pool import member
from fl_engine.core.slicing import initial_params, runnable, take
from fl_engine.core.types import FULL, SubmodelSpec
from fl_engine.data.partition_rules import Ints
from fl_engine.testing.tiny import TinyNet, tiny_data
from fl_engine.training.evaluation import evaluate_pool
from fl_engine.training.local_accuracy import NOBODY, Local, LocalAccuracy, deal

CLASSES = 4


def watched(
    outputs: Sequence[Sequence[float]], labels: Sequence[int], held: Sequence[Sequence[int]], seed: int = 0
) -> Local | None:
    judge = LocalAccuracy(np.array(labels), np.array(held), seed)
    judge.watch("full", torch.tensor(outputs), torch.arange(len(labels)))
    return judge.of("full")


def test_model_chooses_among_the_clients_classes() -> None:
    """Client 0 holds classes 0 and 1, client 1 class 2 alone, client 2 nothing. Class 2 is the largest output
    everywhere: it is no choice of client 0, whose largest other outputs are right in 3 of 4 cases, though all are below
    0. Client 1 has no other choice: 1. So the mean is 7/8, the standard deviation |3/4 - 1| / sqrt 2."""
    outputs = [[-1.0, -2.0, 5.0], [-1.0, -2.0, 5.0], [-2.0, -1.0, 5.0], [-1.0, -2.0, 5.0], [9.0, 9.0, -5.0]]
    found = watched(outputs, [0, 0, 1, 1, 2], [[8, 0, 0], [8, 0, 0], [0, 3, 0]])
    assert found is not None and found.clients == 2
    assert found.mean == pytest.approx(7 / 8)
    assert found.sd == pytest.approx(1 / 4 / math.sqrt(2))
    assert found.histogram == {75: 1, 100: 1}


HELD = arrays.arrays(
    np.int64, st.tuples(st.just(CLASSES), st.integers(1, 6)), elements=st.sampled_from([0, 0, 1, 2, 7, 50])
)
LABELS = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=60).map(np.array)


@given(LABELS, HELD, st.integers(0, 5))
def test_each_test_sample_is_dealt_once_to_a_holder_of_its_class(labels: Ints, held: Ints, seed: int) -> None:
    owner = deal(labels, held, seed)
    assert owner.shape == labels.shape
    for label, client in zip(labels, owner, strict=True):
        assert client == NOBODY if not held[label].any() else held[label, client] > 0
    for label in np.flatnonzero(held.sum(1)):
        dealt = np.bincount(owner[labels == label], minlength=held.shape[1])
        fair = held[label] / held[label].sum() * (labels == label).sum()
        assert (np.abs(dealt - fair) < 1).all(), "its share, rounded up or down"
    assert np.array_equal(owner, deal(labels, held, seed)), "the same seed, the same clients"


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=len)
def test_watch_gets_the_outputs_of_every_level(devices: tuple[str, ...]) -> None:
    family, data = TinyNet(), tiny_data()
    params = initial_params(family, 2)
    specs = {"M1": SubmodelSpec.of({"hidden": 8}), "M2": SubmodelSpec.of({"hidden": 16}), "M3": FULL}
    pool = tuple(member(family, name, spec, dispatched=True, reported=name != "M2") for name, spec in specs.items())
    seen = {name: torch.full((len(data.test_y), CLASSES), torch.nan) for name in ("M1", "M3")}

    def watch(level: str, outputs: torch.Tensor, places: torch.Tensor) -> None:
        seen[level][places] = outputs

    scores = evaluate_pool(family, params, pool, data, devices, watch=watch)
    assert scores == evaluate_pool(family, params, pool, data, devices), "watching changes no score"
    for name, outputs in seen.items():
        network = runnable(family, specs[name], take(params, family.layout(), specs[name])).eval()
        with torch.no_grad():
            direct = network(data.normalise(data.test_x))
        assert torch.allclose(outputs, direct, atol=1e-5)
    judge = LocalAccuracy(data.test_y.numpy(), np.ones((CLASSES, 1), dtype=np.int64), 0)
    again = evaluate_pool(family, params, pool, data, devices, watch=judge.watch)
    for name, score in again.items():
        found = judge.of(name)
        assert found is not None and found.mean == pytest.approx(score.value)
