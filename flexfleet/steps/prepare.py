"""What every step begins with: the configuration, and the data and the network that follow from it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from fl_engine.core.errors import ConfigError
from fl_engine.core.registry import resolve
from fl_engine.core.samples import Data
from fl_engine.core.types import ModelFamily, TakesTokens
from fl_engine.datasets import DATASETS, Source, pad, subset
from flexfleet.config import Config, algorithm, cut_seed, load_config, min_side, model
from flexfleet.tracking import versioned

log = logging.getLogger("flexfleet")


def config_of(args: argparse.Namespace) -> Config:
    """What the options of `terminal.add_config` say."""
    path: Path | None = args.config
    if path is None and Path("params.yaml").is_file():
        path = Path("params.yaml")
    return load_config(path, args.set)


def prepare(config: Config) -> tuple[Data, ModelFamily]:
    """The data set, cut and (where it holds images) padded as configured, and the network for it."""
    torch.set_num_threads(1)  # in every step: the same bits on any number of cores
    source = resolve(DATASETS, config.dataset.name, "data set")
    if not isinstance(source, Source):
        raise ConfigError(f"dataset.name = {config.dataset.name!r} is {source!r}; a Source is expected")
    data = source.load(versioned.folder_of(config.dataset.root))
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
    family = model(config, data.input_shape, data.task.outputs)
    check_fits(data, family)
    if getattr(algorithm(config), "mask_labels", False):
        data.task.present(data.train_y[:1])  # refuses where there are no classes to mask
    return data, family


def check_fits(data: Data, family: ModelFamily) -> None:
    """Raises ConfigError where the network takes tokens and the data are none, or the other way round."""
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
