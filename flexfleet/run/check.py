"""Everything that can be checked before the first round: parameters, data, partition, fleet, pool sizes."""

from __future__ import annotations

from typing import Any

from fl_engine.backends.in_process import check_device
from fl_engine.core import seeds
from fl_engine.core.errors import ConfigError
from fl_engine.core.slicing import initial_params
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.models import export as exports
from fl_engine.rounds.run import Run
from flexfleet.config import Config
from flexfleet.steps.partition import cut
from flexfleet.steps.prepare import Resolved
from flexfleet.steps.pretrain import need_proxy


def check(resolved: Resolved) -> dict[str, Any]:
    """A short description of the run. Raises BadInput for whatever is wrong; trains nothing, writes nothing."""
    config, algorithm, data, family = resolved.config, resolved.algorithm, resolved.data, resolved.family
    for device in config.run.devices:
        check_device(device)
    parts = cut(resolved)
    if config.publish.models:
        exports.check(family, data, config.partition.proxy)
    fleet = devices.fleet(config.fleet.tiers, config.partition.clients, config.seed)
    _check_rates(config)
    if algorithm.needs_apoz:
        need_proxy(parts)
    # Without measured scores every layer has the same score; targets, Gamma and nesting can still be checked.
    pool = algorithm.pool(family, (0.5,) * len(family.prunable()))
    initial = initial_params(family, seeds.derive(config.seed, "init"))
    site = Site(family, pool, fleet, data, parts, config.seed)
    run = Run(algorithm, site, config.rounds)
    algorithm.plan(algorithm.init(initial, site.layout, fleet, pool, run.server), run.context(0, 0.0))
    return {
        "ok": True,
        "dataset": data.name,
        "train": len(data.train_y),
        "test": len(data.test_y),
        "model": config.model["name"],
        "algorithm": config.algorithm["name"],
    }


def _check_rates(config: Config) -> None:
    """A learning rate that grows would overflow only in some later round, so it is checked now."""
    try:
        config.training.sgd(config.rounds.stop - 1)
    except OverflowError:
        raise ConfigError(
            f"training.lr_decay = {config.training.lr_decay}: by round {config.rounds.stop} the learning rate is no "
            "number any more; it is multiplied by this after each round"
        ) from None
