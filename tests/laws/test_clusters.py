"""Samples that are alike are in one cluster, the same ones every time; features are a network's, or a file's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fl_engine.core.errors import PartitionError
from fl_engine.data.clusters import clusters_of, features_of
from fl_engine.models import MODELS
from fl_engine.models.build import build_model

RNG = np.random.default_rng(0)
GROUPS = RNG.permutation(np.arange(90) % 3)
BLOBS = (10.0 * np.eye(3, 5)[GROUPS] + RNG.normal(0, 0.1, (90, 5))).astype(np.float32)
"""Three groups, far from each other."""


def test_groups_that_lie_apart_are_clusters() -> None:
    found = clusters_of(BLOBS, 3, seed=0, what="blobs")
    assert found.dtype == np.int64
    pairs = set(zip(found.tolist(), GROUPS.tolist(), strict=True))
    assert len(pairs) == 3 and {cluster for cluster, _ in pairs} == {0, 1, 2}
    assert np.array_equal(found, clusters_of(BLOBS, 3, seed=0, what="blobs"))


def test_fewer_different_samples_than_clusters_are_an_error() -> None:
    with pytest.raises(PartitionError):
        clusters_of(BLOBS, 91, 0, "blobs")
    alike = np.repeat(np.eye(2, dtype=np.float32), 30, axis=0)
    with pytest.raises(PartitionError):
        clusters_of(alike, 3, 0, "alike")
    late = np.float32(1.7e9 + 50 * np.arange(60.0))[:, None]  # float32 has every 128th number there
    with pytest.raises(PartitionError):
        clusters_of(late, 30, 0, "late")
    for scale in (1e-25, 1e25):
        with pytest.raises(PartitionError):
            clusters_of(np.float32(BLOBS * scale), 3, 0, "blobs")
    for wrong in (np.nan, np.inf):
        odd = BLOBS.copy()
        odd[7, 2] = wrong
        with pytest.raises(PartitionError):
            clusters_of(odd, 3, 0, "blobs")


@pytest.mark.parametrize(
    "values",
    [
        np.array([["a"]]),
        np.zeros(3),
        np.array([[{}]], dtype=object),
    ],
)
def test_other_features_are_refused(values: np.ndarray[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "features.npy"
    np.save(path, values, allow_pickle=True)
    with pytest.raises(PartitionError):
        features_of(path, 3)
    with pytest.raises(PartitionError):
        features_of(tmp_path / "none.npy", 3)


def test_every_network_ends_in_a_layer_with_features() -> None:
    for name in MODELS:
        kind: Any = MODELS[name]
        shape, outputs = getattr(kind, "published_input", (3, 32, 32)), getattr(kind, "published_outputs", 10)
        with torch.device("meta"):
            module = build_model({"name": name}, shape, outputs).module()
        (last,) = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)][-1:]
        assert (last.out_features if isinstance(last, nn.Linear) else last.out_channels) == outputs, name
