"""The configuration, and the algorithm, data and network that follow from it. Every step begins with these."""

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
from fl_engine.core.slicing import made_up
from fl_engine.core.task import check_ready, has_boxes, has_sequences
from fl_engine.core.types import FULL, HEAD, Params
from fl_engine.data.partition_rules import Ints
from fl_engine.datasets import DATASETS, pad, source_of, stored_data, subset
from fl_engine.models.build import build_model, model_kind
from fl_engine.models.traced.family import ModuleFamily
from fl_engine.preparation import assumed
from fl_engine.preparation.weights import giver
from fl_engine.tasks import TASKS
from fl_engine.training import batches
from flexfleet import config as configs
from flexfleet.config import Config, cut_seed, flatten, min_side, moves
from flexfleet.config.read import Files, Given, values_of
from flexfleet.files.run_folder import changes
from flexfleet.pipeline import warm_start
from flexfleet.pipeline.labels import clusters_for, feature_network
from flexfleet.tracking import data_repository

log = logging.getLogger("flexfleet")

DEFAULT = Path("params.yaml")
"""Read if no other file is given."""


@dataclass(frozen=True)
class Resolved:
    """A configuration and what it names. A process creates it once and passes it to every step, so the algorithm is
    built once, and the data are read once, when the first step needs them."""

    config: Config
    algorithm: Algorithm

    @classmethod
    def of(cls, config: Config) -> Resolved:
        """Raises ConfigError."""
        return cls(config, configs.algorithm(config))

    @classmethod
    def load(cls, files: Files = None, overrides: Given = ()) -> Resolved:
        """Read files and overrides (`load_config`). Raises ConfigError."""
        return cls(*configs.parse_with_algorithm(values_of(files, overrides)))

    @cached_property
    def data(self) -> Data:
        """The data set, cut and (if it holds images) padded as configured. Raises DataError and ConfigError."""
        return _read(self.config)

    @cached_property
    def clusters(self) -> Ints | None:
        """(N_train,): the cluster of each training sample; None unless the partition uses clusters."""
        family = feature_network(self.config, self.data)
        if family is not None:
            check_takes(self.data, family)
        return clusters_for(self.config, self.data)

    @cached_property
    def family(self) -> ModelFamily:
        """The network for the data set, with the changes that the algorithm makes. Raises ConfigError, ModelError or
        PoolError, also if the algorithm cannot use the data."""
        data = self.data
        family = self.network(data.input_shape, data.task.outputs)
        check_fits(data, family)
        if self._masks_labels:
            data.task.present(data.train_y[:1])  # raises if there are no classes to mask
            axes = [axis for slot in family.layout().slots.values() for axis in slot.axes]
            if not any(part.group == HEAD for axis in axes for part in axis.parts):
                raise ConfigError(
                    "algorithm.mask_labels needs an output layer with a row for each class, which "
                    f"{self.config.model['name']} does not have. Set algorithm.mask_labels=false"
                )
        training = self.config.training
        batches.check(training.sampler, training.augment, data.task, data.normalise(data.train_x[:1]))
        return family

    @cached_property
    def start(self) -> Params | None:
        """The weights of the whole network that `model.init` or the network gives for the first round, or None. Raises
        what `warm_start.start` raises, and ConfigError if a preparation gives such weights too."""
        weights = warm_start.start(self.config, self.family)
        if weights is not None and (name := giver(self.algorithm.preparations)) is not None:
            raise ConfigError(
                f"model.init, or the network, gives weights to start from, and so does preparation {name} of "
                f"{self.config.algorithm['name']}. Leave out one of them"
            )
        return weights

    @property
    def _masks_labels(self) -> bool:
        """Whether clients send only rows of the output layer, which only a trace finds in a user's module."""
        return bool(getattr(self.algorithm, "mask_labels", False))

    def network(self, input_shape: tuple[int, ...], outputs: int) -> ModelFamily:
        """The network for this sample shape and number of outputs. A user's module is traced only if the algorithm cuts
        it. Raises ConfigError, ModelError or PoolError."""
        if issubclass(model_kind(self.config.model), ModuleFamily) and not self._masks_labels:
            family = build_model(self.config.model, input_shape, outputs, submodels=False)
            if _sends_full_model_only(self.algorithm, family):
                return family
        family = build_model(self.config.model, input_shape, outputs)
        return self.algorithm.network(family) if isinstance(self.algorithm, ChoosesNetwork) else family


def _sends_full_model_only(algorithm: Algorithm, family: ModelFamily) -> bool:
    """Whether the algorithm's pool is only the full model. `family` is a network without sub-models."""
    no_server: Any = None  # the decision must be the same on every machine
    try:
        pool = pool_of(algorithm, family, assumed(algorithm, family), no_server)
    except Exception:  # it needs sub-models; other errors are raised again when the pool is built
        return False
    return all(model.spec == FULL for model in pool)


def resolved_of(args: argparse.Namespace) -> Resolved:
    """Read what the options of `terminal.add_config` name."""
    files: Sequence[Path] = args.config or ([DEFAULT] if DEFAULT.is_file() else [])
    return Resolved.load(files, args.set)


def config_of(args: argparse.Namespace) -> Config:
    """The configuration of `resolved_of` alone."""
    return resolved_of(args).config


def check_unchanged(args: argparse.Namespace, config: Config) -> None:
    """Raise ConfigError if the options no longer give `config`, with which the step ran. DVC reads params.yaml when a
    stage has ended, and would record the result as that of the new values."""

    def counts(key: str) -> bool:
        return moves(key) not in (Moves.EXECUTION, Moves.PLACE) or key.startswith("publish.")

    if changed := changes(flatten(config), flatten(config_of(args)), counts):
        raise ConfigError(
            f"the configuration has changed while this ran ({changed}), and {args.out} has the values before. Start it "
            "again"
        )


@contextmanager
def unchanged(args: argparse.Namespace) -> Iterator[Resolved]:
    """Yield what the options give. Raises ConfigError at the end if they give something else by then."""
    resolved = resolved_of(args)
    yield resolved
    check_unchanged(args, resolved.config)


def _read(config: Config) -> Data:
    torch.set_num_threads(1)  # before any step computes: the same bits on any number of cores
    data = _found(config)
    if config.dataset.train_samples is not None or config.dataset.test_samples is not None:
        data = subset(data, config.dataset.train_samples, config.dataset.test_samples, cut_seed(config))
    wanted = config.dataset.pad
    if wanted == "auto":
        smallest, side = min_side(config), max(data.input_shape[1:]) if data.has_images else 0
        if 0 < side < smallest:
            log.info("padding %dx%d images to %dx%d for %s", side, side, smallest, smallest, config.model["name"])
            data = pad(data, smallest)
    elif wanted != "none":
        data = pad(data, wanted)
    return data


def _found(config: Config) -> Data:
    """The data set as published or given. Raises DataError if the user's own reader fails, EnvironmentFailure if it
    fails with an OSError that has no filename."""
    name, root = config.dataset.name, data_repository.folder_of(config.dataset.root)
    if stored_data.is_stored(name):
        return stored_data.read(root, name, TASKS)
    source = source_of(name)
    try:
        found: Any = source.load(root)
    except FlexfleetError:
        raise
    except Exception as error:
        of_file = isinstance(error, OSError) and error.filename is not None
        if name in DATASETS or of_file or out_of_memory(error):
            raise
        told = f"{type(error).__name__}: {first_line(error)}{line_in(source.load, error)}"
        kind = EnvironmentFailure if isinstance(error, OSError) else DataError
        raise kind(f"dataset.name = {name!r} failed to read {root} (dataset.root): {told}") from error
    if not isinstance(found, Data):
        raise DataError(f"dataset.name = {name!r}: its load gave {type(found).__name__}; a Data is expected")
    return found


def check_fits(data: Data, family: ModelFamily) -> None:
    """Raises what `check_takes` raises, ModelError if the network's output does not fit the task, EnvironmentFailure if
    a package is missing that computes the metric."""
    check_ready(data.task)
    check_takes(data, family)
    if has_boxes(data.task) or has_sequences(data.task) or data.has_tokens:
        with torch.no_grad():
            data.task.loss(family.module().eval()(made_up(family, 1)), data.train_y[:1])


def check_takes(data: Data, family: ModelFamily) -> None:
    """Raise ConfigError if only one of network and data has tokens, or if a token is outside the vocabulary."""
    kind = type(family).__name__
    if isinstance(family, TakesTokens) != data.has_tokens:
        given, taken = ("tokens", "numbers") if data.has_tokens else ("numbers", "tokens")
        raise ConfigError(f"{kind} takes {taken} and {data.name} holds {given}: choose a network for {given}")
    if isinstance(family, TakesTokens):
        largest = max(int(data.train_x.max()), int(data.test_x.max()))
        if largest >= family.vocabulary:
            raise ConfigError(
                f"{kind} knows the tokens 0 to {family.vocabulary - 1}, {data.name} holds {largest}: set "
                f"model.vocabulary={largest + 1}"
            )


def parse_input(text: str) -> tuple[int, ...]:
    """`3x32x32` to (3, 32, 32), `18` to (18,)."""
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"an input is the shape of a sample, 3x32x32 of an image, 200x6 of a series, 18 of a vector; got {text!r}"
        )
    return tuple(int(part) for part in parts)
