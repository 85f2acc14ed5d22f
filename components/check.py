"""Everything that can be checked before the first round: parameters, data, partition, fleet, pool sizes."""

from __future__ import annotations

from typing import Any

from components import common
from components.partition import cut
from components.pretrain import need_proxy
from fl_engine import config as configs
from fl_engine import devices, seeds
from fl_engine import export as exports
from fl_engine.backends.in_process import check_device
from fl_engine.config import Config
from fl_engine.errors import ConfigError
from fl_engine.slicing import initial_params


def check(config: Config) -> dict[str, Any]:
    """What would run, in a few words. Raises BadInput for whatever could not; trains nothing, writes nothing."""
    data, family = common.prepare(config)
    for device in config.run.devices:
        check_device(device)
    parts = cut(config, data)
    if config.publish.models:
        exports.check(family, config.partition.proxy)
    fleet = devices.fleet(config.fleet.tiers, config.partition.clients, config.seed)
    _check_rates(config)
    algorithm = configs.algorithm(config)
    if algorithm.needs_apoz:
        need_proxy(parts)
    # Without measured scores every layer counts alike; targets, Gamma and nesting are checked all the same.
    pool = algorithm.pool(family, (0.5,) * len(family.prunable()))
    initial = initial_params(family, seeds.derive(config.seed, "init"))
    algorithm.plan(algorithm.init(initial, family.layout(), fleet, pool), 0, config.seed)
    return {
        "ok": True,
        "dataset": data.name,
        "train": len(data.train_y),
        "test": len(data.test_y),
        "model": config.model["name"],
        "algorithm": config.algorithm["name"],
    }


def _check_rates(config: Config) -> None:
    """A rate that grows is only known to be too large when it is asked for, in some later round."""
    try:
        config.training.sgd(config.rounds.stop - 1)
    except OverflowError:
        raise ConfigError(
            f"training.lr_decay = {config.training.lr_decay}: by round {config.rounds.stop} the learning rate is no "
            "number any more; it is multiplied by this after each round"
        ) from None
