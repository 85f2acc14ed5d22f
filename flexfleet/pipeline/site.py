"""Prepares the rounds of a run: its site, trace, first weights, and the numerics of its clients."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, ModelFamily
from fl_engine.core.errors import IntegrityError, ModelError
from fl_engine.core.slicing import initial_params
from fl_engine.core.task import Task
from fl_engine.core.types import Device, Params, Pool
from fl_engine.data import partition_files
from fl_engine.data.partition import as_told
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices, trace_sources
from fl_engine.fleet.trace import Trace
from fl_engine.preparation.weights import fitting
from fl_engine.rounds.server import ServerSite
from fl_engine.selection.capacity import check_eligible, dispatched, round_size
from fl_engine.training import strategy
from fl_engine.training.numerics import Numerics, settled
from flexfleet.config import Config
from flexfleet.files.artifacts import WEIGHTS, PoolFile
from flexfleet.pipeline.partition import held_out, most_of
from flexfleet.pipeline.prepare import Resolved

log = logging.getLogger("flexfleet")


def site_of(resolved: Resolved, partition_dir: Path, pool_dir: Path, before: Mapping[str, Any] | None = None) -> Site:
    """Return the site of clients on this machine, and prepare the process for training. `before`: the numerics of the
    run that is resumed, whose precision a run with `run.precision=auto` keeps."""
    config, family = resolved.config, resolved.family
    parts = partition_files.load(partition_dir, resolved.data)
    data = as_told(resolved.data, parts)
    parts, held = held_out(config, parts)
    pool = PoolFile.read(pool_dir / "pool.json").pool()
    fleet = fleet_of(resolved, pool)
    if len(dispatched(pool)) > 1:
        _tell_raised(config, fleet)
    prepare_process(config.run.devices)
    numerics = numerics_of(config, resolved.algorithm, family, data.task, before)
    most = most_of(config)
    return Site(family, pool, fleet, data, parts, config.seed, numerics, None, held, most)


def fleet_of(resolved: Resolved, pool: Pool) -> tuple[Device, ...]:
    """Return the devices of the run. Raises ConfigError for invalid tiers."""
    config = resolved.config
    # `eligible: capable` uses the configured memory, to leave out weak devices.
    keeps_to_memory = getattr(resolved.algorithm, "eligible", "all") == "capable"
    smallest = None if keeps_to_memory else pool[dispatched(pool)[0]].params
    return devices.fleet(config.fleet.tiers, config.partition.clients, config.seed, resolved.family, smallest)


def _tell_raised(config: Config, fleet: Sequence[Device]) -> None:
    """Log the tiers whose devices have more memory than configured, so that a model fits."""
    tiers = devices.named(config.fleet.tiers) if isinstance(config.fleet.tiers, str) else config.fleet.tiers
    has = {device.tier: device.memory for device in fleet}
    for tier in tiers:
        if tier.name in has and has[tier.name] > tier.memory:
            log.info(
                "fleet: devices of tier %s can hold %.4g %% of this network instead of %.4g %%, so that a model fits",
                tier.name, has[tier.name], tier.memory,
            )  # fmt: skip


def check_fleet(resolved: Resolved, pool: Pool) -> None:
    """Raise ConfigError if no model of the pool fits into a device of the fleet."""
    method: Any = resolved.algorithm
    if hasattr(method, "selector"):
        method.selector(pool).init(check_eligible(method, fleet_of(resolved, pool), pool), pool)


def trace_of(config: Config, site: Site) -> tuple[Trace | None, str | None]:
    """Return the fleet's trace and the sha256 of its files. Raises ConfigError and DataError."""
    source = config.fleet.trace
    if source is None:
        return None, None
    samples = [len(indices) for indices in site.partition.clients]
    digest = trace_sources.digest(source) if source.files else None
    return source.trace(site.fleet, samples, config.seed), digest


def given_weights(pool_dir: Path, family: ModelFamily) -> Params | None:
    """Return the weights of the pool; None if the run starts from fresh ones. Raises IntegrityError if the file is
    missing, damaged or of another network."""
    weights = PoolFile.read(pool_dir / "pool.json").weights(pool_dir)
    try:
        return None if weights is None else fitting(family, weights)
    except ModelError as error:
        raise IntegrityError(f"{pool_dir / WEIGHTS} is not of this network: {error}") from error


def initial_state(resolved: Resolved, site: Site, weights: Params | None = None) -> Any:
    """Return the algorithm's state before the first round. `weights`: of the full network; None: fresh ones."""
    params = weights
    if params is None:
        params = initial_params(site.family, seeds.derive(resolved.config.seed, "init"))
    return resolved.algorithm.init(params, site.layout, site.fleet, site.pool, ServerSite(site))


def numerics_of(
    config: Config, algorithm: Algorithm, family: ModelFamily, goal: Task, before: Mapping[str, Any] | None
) -> Numerics:
    """Return the configured numerics, or those that suit the network. `before`: see `settled`."""
    training: Training = algorithm.training  # type: ignore[attr-defined]
    run, per_round = config.run, round_size(training.fraction, config.partition.clients)
    precision = settled(run.precision, run.devices, before)
    if precision == "fp16" and training.weight_decay:
        log.warning("run.precision=fp16: training.weight_decay = %g is ignored", training.weight_decay)
    if run.strategy == "single" or training.is_own:
        return Numerics(precision=precision)
    if run.strategy == "batched":
        return strategy.batched(family, training.batch_size, per_round, precision, run.devices)
    return strategy.choose(family, goal, training.batch_size, per_round, precision, run.devices)


def tell_unused(config: Config) -> None:
    """Log that a GPU is not used."""
    here = not config.run.apart and all(name == "cpu" for name in config.run.devices)
    if here and torch.cuda.is_available():
        log.info("a CUDA device is not used; set run.devices=auto to train on it")
