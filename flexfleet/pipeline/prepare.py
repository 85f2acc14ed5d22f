"""Read a configuration, and create its algorithm, data set and network."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fl_engine.backends.in_process import prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, ChoosesNetwork, ModelFamily, TakesTokens
from fl_engine.core.errors import (
    ConfigError,
    DataError,
    EnvironmentFailure,
    FlexfleetError,
    first_line,
    line_in,
    out_of_memory,
)
from fl_engine.core.fields import Moves
from fl_engine.core.pool import pool_of
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params, made_up
from fl_engine.core.task import has
from fl_engine.core.types import FULL, HEAD, Params
from fl_engine.core.widths import check_cuttable, hidden
from fl_engine.data import clusters
from fl_engine.data.partition_rules import Ints
from fl_engine.data.partitioning import BY_LABEL
from fl_engine.data.transforms import as_numbers, fingerprint
from fl_engine.datasets import DATASETS, pad, source_of, stored_data, subset
from fl_engine.models.build import build_model, model_kind
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.preparation import assumed
from fl_engine.preparation.weights import giver
from fl_engine.rounds import fault_injection, poisoning
from fl_engine.training import batches, evaluation
from flexfleet import config as configs
from flexfleet.config import Config, cut_seed, flatten, moves
from flexfleet.config.read import Files, Given, values_of
from flexfleet.files.run_folder import changes
from flexfleet.pipeline import own_code, warm_start
from flexfleet.tracking import dvc_remote

log = logging.getLogger("flexfleet")

DEFAULT = Path("params.yaml")
"""Configuration file that is read if no other file is passed."""

_COMPUTED: dict[tuple[object, ...], Ints] = {}
"""Cache of clusters of samples. The process that checks all runs of a comparison reuses these clusters."""


@dataclass(frozen=True)
class Resolved:
    """A configuration with the algorithm, data and network that it selects. All steps in a process use the same object,
    so the algorithm is built once. The data are read on first use."""

    config: Config
    algorithm: Algorithm

    @classmethod
    def of(cls, config: Config) -> Resolved:
        """Build the algorithm of a configuration. Raises ConfigError."""
        return cls(config, configs.algorithm(config))

    @classmethod
    def load(cls, files: Files = None, overrides: Given = ()) -> Resolved:
        """Read configuration files and overrides like `load_config`, and build the algorithm. Raises ConfigError."""
        return cls(*configs.parse_with_algorithm(values_of(files, overrides)))

    @cached_property
    def data(self) -> Data:
        """The data set, with the configured sample counts and image padding. Integer samples are treated as numbers
        unless the network takes tokens. Raises DataError and ConfigError."""
        return _read(self.config)

    @cached_property
    def clusters(self) -> Ints | None:
        """Cluster index of each training sample, shape (N_train,); None if the partition does not use clusters. Raises
        PartitionError, ConfigError, ModelError, and EnvironmentFailure if scikit-learn is missing."""
        p = self.config.partition
        return None if p.features is None or p.rule not in BY_LABEL else _clusters(self.config, self.data, p.features)

    @cached_property
    def family(self) -> ModelFamily:
        """The network for the data set, including changes by the algorithm. Raises ConfigError, ModelError or PoolError
        if the network, the algorithm and the data do not fit together."""
        data = self.data
        family = self.network(data.input_shape, data.task.outputs)
        check_fits(data, family)
        if self._masks_labels and data.task.present(data.train_y[:1]) is not None:
            axes = [axis for slot in family.layout().slots.values() for axis in slot.axes]
            if not any(part.group == HEAD for axis in axes for part in axis.parts):
                if not _sends_full_model_only(self.algorithm, family):
                    check_cuttable(hidden(family.layout()), family)
                why = f"the output layer of {self.config.model['name']} does not have a row for each class"
                why = "model.whole is true" if getattr(family, "whole", False) else why
                raise ConfigError(f"algorithm.mask_labels must be false, because {why}")
        training = self.config.training
        batches.check(training.sampler, training.augment, data.task, data.normalise(data.train_x[:1]))
        if "backdoor" in fault_injection.parse(self.config.rounds.faults).kinds:
            poisoning.check(data)
        return family

    @cached_property
    def start(self) -> Params | None:
        """Initial weights of the whole network from `model.init` or the user's module; None if neither has weights.
        Raises the errors of `warm_start.start`. Raises ConfigError if a preparation also returns initial weights."""
        weights = warm_start.start(self.config, self.family)
        if weights is not None and (name := giver(self.algorithm.preparations)) is not None:
            raise ConfigError(
                f"model.init (or the network) and the preparation {name} of {self.config.algorithm['name']} both set "
                "initial weights. Remove model.init, or choose another algorithm"
            )
        return weights

    @property
    def _masks_labels(self) -> bool:
        """True if clients send only some rows of the output layer. A user's module must then be traced to find its
        output layer."""
        return bool(getattr(self.algorithm, "mask_labels", False))

    def network(self, input_shape: tuple[int, ...], outputs: int) -> ModelFamily:
        """Build the network for this sample shape and number of outputs. A user's module is traced only if the
        algorithm uses sub-models. Raises ConfigError, ModelError or PoolError."""
        if issubclass(model_kind(self.config.model), ModuleFamily) and not self._masks_labels:
            family = build_model(self.config.model, input_shape, outputs, submodels=False)
            if _sends_full_model_only(self.algorithm, family):
                return family
        family = build_model(self.config.model, input_shape, outputs)
        return self.algorithm.network(family) if isinstance(self.algorithm, ChoosesNetwork) else family


def _sends_full_model_only(algorithm: Algorithm, family: ModelFamily) -> bool:
    """Return whether the algorithm's pool contains only the full model. `family` is a network without sub-models."""
    no_server: Any = None  # do not use the server, so that every machine makes the same decision
    try:
        pool = pool_of(algorithm, family, assumed(algorithm, family), no_server)
    except Exception:  # the error is raised again when the pool is built
        return False
    return all(model.spec == FULL for model in pool)


def resolved_of(args: argparse.Namespace) -> Resolved:
    """Read the configuration from parsed options, which `terminal.add_config` has defined."""
    files: Sequence[Path] = args.config or ([DEFAULT] if DEFAULT.is_file() else [])
    return Resolved.load(files, args.set)


def config_of(args: argparse.Namespace) -> Config:
    return resolved_of(args).config


@contextmanager
def unchanged(args: argparse.Namespace) -> Iterator[Resolved]:
    """Read the configuration from parsed options, and yield it. Raises ConfigError if the configuration has changed at
    the end of the context, because DVC reads params.yaml after a stage and would record the new values."""

    def counts(key: str) -> bool:
        return moves(key) not in (Moves.EXECUTION, Moves.PLACE) or key.startswith("publish.")

    resolved = resolved_of(args)
    yield resolved
    if changed := changes(flatten(resolved.config), flatten(config_of(args)), counts):
        raise ConfigError(
            f"the configuration has changed during the step ({changed}). The step computed {args.out} from the earlier "
            "configuration. Run the step again"
        )


def _read(config: Config) -> Data:
    torch.set_num_threads(1)  # results must not depend on the number of cores
    data = _found(config)
    if data.has_tokens:
        family = build_model(config.model, data.input_shape, data.task.outputs, submodels=False)
        data = data if isinstance(family, TakesTokens) else as_numbers(data)
    if config.dataset.train_samples is not None or config.dataset.test_samples is not None:
        data = subset(data, config.dataset.train_samples, config.dataset.test_samples, cut_seed(config))
    wanted = config.dataset.pad
    if wanted == "auto":
        smallest = getattr(model_kind(config.model), "min_hw", 0)
        side = max(data.input_shape[1:]) if data.has_images else 0
        if 0 < side < smallest:
            log.info("padding %dx%d images to %dx%d for %s", side, side, smallest, smallest, config.model["name"])
            data = pad(data, smallest)
    elif wanted != "none":
        data = pad(data, wanted)
    return data


def _found(config: Config) -> Data:
    """Read the data set. Raises DataError if the user's own reader fails, or EnvironmentFailure if the reader raises an
    OSError without a filename."""
    name, root = config.dataset.name, dvc_remote.folder_of(config.dataset.root)
    if stored_data.is_stored(name):
        return stored_data.read(root, name)
    source = source_of(name)
    try:
        found: Any = source.load(root)
    except FlexfleetError:
        raise
    except Exception as error:
        if name in DATASETS or getattr(error, "filename", None) is not None or out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}{line_in(source.load, error)}"
        kind = EnvironmentFailure if isinstance(error, OSError) else DataError
        raise kind.at(f"dataset.name = {name!r} failed to read {root} (dataset.root): {reason}") from error
    if not isinstance(found, Data):
        raise DataError.at(f"dataset.name = {name!r} must load a Data, got {type(found).__name__}")
    return found


def _clusters(config: Config, data: Data, features: str) -> Ints:
    p, seed, named = config.partition, cut_seed(config), f"partition.features = {features}"
    prepare_process(config.run.devices)
    if features.endswith(".npy"):
        return clusters.clusters_of(clusters.features_of(Path(features), len(data.train_y)), p.clusters, seed, named)
    family = build_model({"name": features}, data.input_shape, data.task.outputs, submodels=False)
    check_takes(data, family)
    own = own_code.digests(config.model_copy(update={"model": {"name": features}}), ("model",))
    inputs = (fingerprint(data), repr(family), repr(own), p.clusters, seed)
    if inputs not in _COMPUTED:
        start = initial_params(family, seeds.derive(seed, "features"))
        found = evaluation.last_layer_inputs(family, start, data)
        _COMPUTED[inputs] = clusters.clusters_of(found, p.clusters, seed, named)
    return _COMPUTED[inputs].copy()


def check_fits(data: Data, family: ModelFamily) -> None:
    """Raise ModelError if the network's output does not fit the task. Raise EnvironmentFailure if a package for the
    metric is missing. Also raises the errors of `check_takes`."""
    getattr(data.task, "ready", lambda: None)()
    check_takes(data, family)
    if has(data.task, "boxes") or has(data.task, "sequences") or data.has_tokens:
        with torch.no_grad():
            data.task.loss(family.module().eval()(made_up(family, 1)), data.train_y[:1])


def check_takes(data: Data, family: ModelFamily) -> None:
    """Raise ConfigError if the network cannot take the data as input, or if a token is outside the vocabulary."""
    kind = type(family).__name__
    if isinstance(family, TakesTokens) != data.has_tokens:
        given, taken = ("tokens", "numbers") if data.has_tokens else ("numbers", "tokens")
        raise ConfigError(f"{kind} expects {taken}, but {data.name} contains {given}. Choose a network for {given}")
    if isinstance(family, TakesTokens):
        largest = max(int(data.train_x.max()), int(data.test_x.max()))
        if largest >= family.vocabulary:
            raise ConfigError.at(
                f"model.vocabulary must be at least {largest + 1}, got {family.vocabulary}. {data.name} contains the "
                f"token {largest}"
            )
