"""What every step begins with: the configuration, and the data and the network that follow from it."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch

from fl_engine.core.errors import ConfigError
from fl_engine.core.registry import resolve
from fl_engine.core.types import Data, ModelFamily
from fl_engine.datasets import DATASETS, Source, pad, subset
from flexfleet.config import Config, cut_seed, load_config, min_side, model
from flexfleet.tracking import versioned

log = logging.getLogger("flexfleet")


def config_of(args: argparse.Namespace) -> Config:
    """What the options of `terminal.add_config` say."""
    path: Path | None = args.config
    if path is None and Path("params.yaml").is_file():
        path = Path("params.yaml")
    return load_config(path, args.set)


def prepare(config: Config) -> tuple[Data, ModelFamily]:
    """The data set, cut and padded as configured, and the network for its images."""
    torch.set_num_threads(1)  # in every step: the same bits on any number of cores
    source = resolve(DATASETS, config.dataset.name, "data set")
    if not isinstance(source, Source):
        raise ConfigError(f"dataset.name = {config.dataset.name!r} is {source!r}; a Source is expected")
    data = source.load(versioned.folder_of(config.dataset.root))
    if config.dataset.train_samples is not None or config.dataset.test_samples is not None:
        data = subset(data, config.dataset.train_samples, config.dataset.test_samples, cut_seed(config))
    wanted, side = config.dataset.pad, max(data.input_chw[1:])
    if wanted == "auto":
        smallest = min_side(config)
        if side < smallest:
            log.info("padding %dx%d images to %dx%d for %s", side, side, smallest, smallest, config.model["name"])
            data = pad(data, smallest)
    elif wanted != "none":
        data = pad(data, wanted)
    return data, model(config, data.input_chw, data.classes)


def parse_input(text: str) -> tuple[int, int, int]:
    """`3x32x32` to (3, 32, 32)."""
    try:
        c, h, w = (int(part) for part in text.split("x"))
    except ValueError:
        raise ConfigError(f"an input is written CxHxW, e.g. 3x32x32, got {text!r}") from None
    return c, h, w
