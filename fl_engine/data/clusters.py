"""Clusters of similar samples, which partition rules use as labels if the data have no better ones (FedAIoT, section
2.2.3.1: ten clusters of VGG19's ImageNet features; its published code: a hundred of ResNet-50's).

The thesis calls the method "K-nearest neighbors", but its code is k-means, as here: scikit-learn's, with the best of
ten starts.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fl_engine.core import seeds
from fl_engine.core.errors import EnvironmentFailure, PartitionError
from fl_engine.data.array_files import map_npy

STARTS = 10


def features_of(path: Path, samples: int) -> NDArray[np.float32]:
    """Return (samples, F), the features of each training sample, from a .npy file; further axes are flattened. Raises
    PartitionError, which names the file."""
    try:
        found = map_npy(path)
    except ValueError as error:
        raise PartitionError(f"partition.features = {path} must be an array of NumPy, found {error}") from error
    if found.ndim < 2 or len(found) != samples or not math.prod(found.shape):
        raise PartitionError(
            f"partition.features = {path} must have a row of features for each of {samples} training samples, found "
            f"{' x '.join(map(str, found.shape))} numbers"
        )
    with np.errstate(over="ignore"):  # infinite values are refused below
        features = found.reshape(samples, -1).astype(np.float32)
    _check_finite(features, f"partition.features = {path}")
    return features


def clusters_of(features: NDArray[np.float32], count: int, seed: int, what: str) -> NDArray[np.int64]:
    """Return (N,), the number of each sample's cluster, 0 to count - 1, by k-means on `features` (N, F). `what` names
    the features in error messages.

    On one machine the result depends on features and seed alone. Another machine may break a tie differently because
    of rounding. Raises PartitionError if there are fewer different samples than clusters, EnvironmentFailure if
    scikit-learn or a package that it needs is missing.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise lacking(error) from error

    _check_finite(features, what)
    state = seeds.derive(seed, "clusters") % 2**32
    different = 0
    if len(features) >= count:
        # More threads would change the order of the sums, and so their last bits, from run to run.
        with threadpool_limits(1), warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore", ConvergenceWarning)  # too few different samples are refused below
            found = KMeans(count, n_init=STARTS, random_state=state).fit_predict(features)
        different = len(np.unique(found))
    if different < count:
        raise PartitionError(
            f"{what}: k-means cannot make {count} clusters of {len(features)} samples, because too few of them differ. "
            "Lower partition.clusters, or scale features that are very small or large for float32"
        )
    labels: NDArray[np.int64] = found.astype(np.int64)
    return labels


def lacking(error: ImportError) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"partition.features makes clusters with scikit-learn ({error}): pip install 'flexfleet[data]'"
    )


def _check_finite(features: NDArray[np.float32], what: str) -> None:
    wrong = np.flatnonzero(~np.isfinite(features).all(1))
    if len(wrong):
        raise PartitionError(f"{what}: the features of {len(wrong)} samples are not finite, sample {wrong[0]} first")
