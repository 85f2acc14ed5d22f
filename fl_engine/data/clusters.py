"""Clusters similar samples. Partition rules can use the clusters as labels if the data have no suitable labels.

FedAIoT (section 2.2.3.1) uses ten clusters of VGG19's ImageNet features. FedAIoT's published code uses 100 clusters of
ResNet-50's features. FedAIoT calls the method "K-nearest neighbors", but its code and this module use k-means.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import EnvironmentFailure, PartitionError
from fl_engine.core.system import install_command
from fl_engine.data.array_files import map_npy

STARTS = 10


def features_of(path: Path, samples: int) -> NDArray[np.float32]:
    """Return the features (samples, F) of the training samples from a .npy file. Further axes are flattened. Raises
    PartitionError if the file does not contain one row per sample."""
    try:
        found = map_npy(path)
    except ValueError as error:
        raise PartitionError(f"partition.features = {path} must be a NumPy array, found {error}") from error
    if found.ndim < 2 or len(found) != samples or not math.prod(found.shape):
        raise PartitionError(
            f"partition.features = {path} must have one row per training sample ({samples}), found {found.shape}"
        )
    with np.errstate(over="ignore"):  # `clusters_of` rejects infinite values
        return found.reshape(samples, -1).astype(np.float32)


def clusters_of(features: NDArray[np.float32], count: int, seed: int, what: str) -> NDArray[np.int64]:
    """Cluster `features` (N, F) with k-means, and return the cluster of each sample (N,), numbered 0 to count - 1.
    `what` is the name of the features in error messages.

    Because of rounding errors, different machines may resolve ties between clusters differently. Raises PartitionError
    if there are fewer distinct samples than clusters, and EnvironmentFailure if scikit-learn is not installed.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        message = f"{what} requires scikit-learn ({error}). Run `{install_command('data')}`"
        raise EnvironmentFailure(message) from error

    wrong = np.flatnonzero(~np.isfinite(features).all(1))
    if len(wrong):
        raise PartitionError(f"{what} must be finite, got NaN or infinity in {len(wrong)} samples (first: {wrong[0]})")
    state = seeds.derive(seed, "clusters") % 2**32
    different = 0
    if len(features) >= count:
        # With several threads, the order of additions and the last bits of sums would change between runs.
        with threadpool_limits(1), warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore", ConvergenceWarning)  # data with too few distinct samples are rejected below
            found = KMeans(count, n_init=STARTS, random_state=state).fit_predict(features)
        different = len(np.unique(found))
    if different < count:
        raise PartitionError(
            f"{what}: {len(features)} samples are too similar for {count} clusters. Lower partition.clusters"
        )
    labels: NDArray[np.int64] = found.astype(np.int64)
    return labels
