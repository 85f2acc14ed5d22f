"""Labels that are not the data set's own: clusters of features, which a partition uses as labels, and wrong labels.

Both take long to compute, so the run store caches them by data, network, seed and a few parameters.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import ModelFamily
from fl_engine.core.errors import PartitionError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.data import array_files, clusters
from fl_engine.data.label_noise import likely_mistakes, made_wrong
from fl_engine.data.partition import Partition
from fl_engine.data.partition_rules import Ints
from fl_engine.data.partitioning import BY_LABEL
from fl_engine.data.transforms import fingerprint
from fl_engine.models.build import build_model
from fl_engine.preparation import confusion
from fl_engine.preparation.confusion import Confusion, measure_confusion
from fl_engine.storage.store import sha256
from fl_engine.training import evaluation
from flexfleet.config import Config, cut_seed
from flexfleet.files import cache
from flexfleet.pipeline import own_code

log = logging.getLogger("flexfleet")

MAP, FEATURES = "the content of partition.map", "what partition.features names"
NETWORK = "the network of noise.labels"
BATCH_SIZE = 50
"""Samples per step of the training whose mistakes become wrong labels."""
CONTENTS = (MAP, FEATURES, NETWORK)

_COMPUTED: dict[str, Ints] = {}
"""Clusters by a digest of their inputs. One process checks all runs of a comparison, and a check writes nothing."""


def feature_network(config: Config, data: Data) -> ModelFamily | None:
    """The network that `partition.features` names, or None. Raises ConfigError or ModelError."""
    p = config.partition
    if p.features is None or p.rule not in BY_LABEL or p.features.endswith(".npy"):
        return None
    return build_model({"name": p.features}, data.input_shape, data.task.outputs, submodels=False)


def clusters_for(config: Config, data: Data) -> Ints | None:
    """(N_train,): the cluster of each training sample; None if the partition does not use clusters. Raises
    PartitionError, EnvironmentFailure without scikit-learn, and for a network ConfigError and ModelError."""
    p = config.partition
    if p.features is None or p.rule not in BY_LABEL:
        return None
    samples, inputs = len(data.train_y), _inputs(config, data)
    known = cache.find(_store(config), "clusters", inputs, list[int])
    if known is not None and len(known) == samples and min(known) >= 0 and max(known) < p.clusters:
        return np.array(known, dtype=np.int64)
    if (digest := sha256(json.dumps(inputs, sort_keys=True).encode())) not in _COMPUTED:
        _COMPUTED[digest] = _computed(config, data)
    return _COMPUTED[digest].copy()


def _computed(config: Config, data: Data) -> Ints:
    p, samples = config.partition, len(data.train_y)
    assert p.features is not None
    prepare_process(config.run.devices)
    family = feature_network(config, data)
    if family is None:
        features = clusters.features_of(Path(p.features), samples)
    else:
        features = evaluation.last_layer_inputs(
            family, initial_params(family, seeds.derive(cut_seed(config), "features")), data
        )
    return clusters.clusters_of(features, p.clusters, cut_seed(config), f"partition.features = {p.features}")


def keep_clusters(config: Config, data: Data, found: Ints) -> None:
    """Cache the clusters for the next run with the same features."""
    cache.keep(_store(config), "clusters", _inputs(config, data), list[int], found.tolist())


def _inputs(config: Config, data: Data) -> dict[str, Any]:
    family = feature_network(config, data)
    given = _features(config) if family is None else {"network": repr(family), **_features(config)}
    try:
        library = version("scikit-learn")
    except PackageNotFoundError as error:
        raise clusters.lacking(error) from error
    return given | {
        "data": fingerprint(data),
        "clusters": config.partition.clusters,
        "seed": cut_seed(config),
        "scikit-learn": library,
        "code": [_code(module) for module in (clusters, array_files, evaluation)],
    }


def _features(config: Config) -> dict[str, Any]:
    """Digests of what `partition.features` names: a file, or the user's own network."""
    features = config.partition.features
    assert features is not None
    if features.endswith(".npy"):
        return {"file": _content("partition.features", features)}
    return own_code.digests(config.model_copy(update={"model": {"name": features}}), ("model",))


def contents(config: Config, *, needed: bool = True) -> dict[str, Any]:
    """Digests of the files and of the user's own code that the partition and its labels are made from, by CONTENTS.
    With `needed` a file that cannot be read raises PartitionError, else it is left out."""
    p, found = config.partition, dict[str, Any]()

    def looked_at(file: str) -> bool:
        return needed or os.access(file, os.R_OK)

    if p.rule == "manual" and p.map is not None and looked_at(p.map):
        found[MAP] = _content("partition.map", p.map)
    if p.features is not None and p.rule in BY_LABEL and (not p.features.endswith(".npy") or looked_at(p.features)):
        found[FEATURES] = _features(config)
    if config.noise.labels:
        found[NETWORK] = own_code.digests(config, ("model",))
    return {name: value for name, value in found.items() if value}


def _content(name: str, path: str) -> str:
    try:
        return sha256(Path(path).read_bytes())
    except OSError as error:
        raise PartitionError(f"{name} = {path} cannot be read: {error.strerror}") from error


def noisy(config: Config, data: Data, parts: Partition, held_out: Sequence[Ints]) -> Partition:
    """Return the partition with the configured wrong labels. Trains centrally unless the result is cached, with the
    configured network without an algorithm's changes, so that compared algorithms have the same labels.

    Args:
        held_out: The samples of each client that it does not train on; empty if it trains on all.

    Raises:
        ConfigError: The data have no classes.
        ModelError: The training diverges.
    """
    n, device = config.noise, config.run.devices[0]
    confusion.check_classes(data.task, data.name)
    family = build_model(config.model, data.input_shape, data.task.outputs, submodels=False)
    seed, settings = cut_seed(config), n.model_dump(include={"epochs", "lr", "batch_size"})
    network = {"network": repr(family), **own_code.digests(config, ("model",))}
    where = {} if device == "cpu" else {"device": device.partition(":")[0]}
    inputs = {"data": fingerprint(data), "code": _code(confusion), "seed": seed, **network, **settings, **where}

    def measured() -> Confusion:
        check_device(device)
        prepare_process((device,))
        return measure_confusion(family, data, seed, n.epochs, n.lr, BATCH_SIZE, device)

    found = cache.kept(_store(config), "confusion", inputs, Confusion, measured)
    mistakes = likely_mistakes(found.matrix, n.sure, parts.server_classes)
    noise = made_wrong(data.train_y.numpy(), parts.clients, mistakes, n.labels, seed, held_out)
    level = logging.INFO if noise.reached >= n.labels / 2 else logging.WARNING
    log.log(
        level,
        "label noise: %d of %d labels of clients are wrong, %.2f %%; %g %% were asked for, and the labels of %d of %d "
        "classes stay right",
        sum(noise.figures.wrong), sum(map(len, parts.clients)) - noise.figures.held_out, 100 * noise.reached,
        100 * n.labels, int((mistakes.sum(1) == 0).sum()), data.task.outputs,
    )  # fmt: skip
    return replace(parts, noise=noise)


def _store(config: Config) -> Path:
    return Path(config.run.store)


def _code(module: Any) -> str:
    return sha256(Path(module.__file__).read_bytes())
