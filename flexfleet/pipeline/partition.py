"""Step 1: select the server's proxy data, and divide the remaining training samples among the clients.

This module also creates the `Site` of a run (data, partition, pool and fleet), the trace and the initial weights.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fl_engine.algorithms.training import Training
from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm, ServerContext
from fl_engine.core.errors import DataError, IntegrityError, ModelError, PartitionError
from fl_engine.core.samples import Data
from fl_engine.core.slicing import initial_params
from fl_engine.core.types import Device, Pool
from fl_engine.data import heat_map, local_data, partitioning
from fl_engine.data.partition import Partition, read_map
from fl_engine.data.partition_rules import Ints
from fl_engine.data.partitioning import draw_noise, hold_out, likely_mistakes, with_noise
from fl_engine.data.transforms import fingerprint
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices, trace_files
from fl_engine.models.build import build_model
from fl_engine.preparation.confusion import check_classes, measure_confusion
from fl_engine.preparation.weights import fitting
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.selection.capacity import check_eligible, dispatched, round_size
from fl_engine.storage.store import canonical, sha256
from fl_engine.training import strategy
from fl_engine.training.numerics import Numerics, choose_precision
from flexfleet.config import Config, codecs, cut_seed
from flexfleet.files.artifacts import WEIGHTS, PoolFile
from flexfleet.pipeline.prepare import Resolved

log = logging.getLogger("flexfleet")

BATCH_SIZE = 50
"""Batch size of the central training whose misclassifications determine the wrong labels."""


def partition(resolved: Resolved, out: Path) -> Path:
    """Write partition.safetensors and partition.json into `out`. Also write partition.svg, a plot of the labels of each
    client, unless clients have their own data."""
    config, data = resolved.config, resolved.data
    if data.natural_client is not None and config.partition.rule != "natural":
        log.info(
            "%s has an owner for each sample, but partition.rule = %s ignores owners. Use partition.rule=natural",
            data.name,
            config.partition.rule,
        )
    parts = cut(resolved)
    if parts.rule == local_data.LOCAL:
        return parts.save(out)
    if resolved.config.noise.labels:
        parts = _noisy(resolved, parts)
    heat_map.draw(parts.counts, out / "partition.svg", parts.label)
    return parts.save(out)


def cut(resolved: Resolved) -> Partition:
    """Partition the data as configured, but without wrong labels. Raises PartitionError if this is impossible."""
    p = resolved.config.partition
    if p.rule == local_data.LOCAL:
        return local_data.of_server(resolved.data, p.clients, cut_seed(resolved.config))
    if p.proxy_shared and resolved.config.noise.labels:
        raise PartitionError(
            "partition.proxy_shared must be false with noise.labels, because the proxy's samples would have two labels"
        )
    owner = read_map(Path(p.map), len(resolved.data.train_y)) if p.rule == "manual" and p.map is not None else None
    return partitioning.partition(resolved.data, p, cut_seed(resolved.config), resolved.clusters, owner)


def _noisy(resolved: Resolved, parts: Partition) -> Partition:
    """Return the partition with wrong labels as configured in `noise`. Wrong labels are sampled from the errors of a
    centrally trained model. This model does not depend on the algorithm, so compared algorithms get the same labels.

    Raises:
        ConfigError: The data have no classes, or the network does not fit the data.
        ModelError: The training diverges.
    """
    config, data = resolved.config, resolved.data
    n, device, seed = config.noise, config.run.devices[0], cut_seed(config)
    _ = resolved.family  # check that the network fits the data
    check_classes(data.task, data.name)
    family = build_model(config.model, data.input_shape, data.task.outputs, submodels=False)
    check_device(device)
    prepare_process((device,))
    found = measure_confusion(family, data, seed, n.epochs, n.lr, BATCH_SIZE, device)
    mistakes = likely_mistakes(found, n.sure, parts.server_classes)
    _, held = held_out(config, parts, data)
    noise, noisy = draw_noise(data.train_y.numpy(), parts.clients, mistakes, n.labels, seed, held)
    reached = noise.reached(sum(map(len, parts.clients)))
    level = logging.INFO if reached >= n.labels / 2 else logging.WARNING
    log.log(
        level,
        "label noise: %d of %d labels of clients are wrong: %.2f %%, with noise.labels = %g %%; %d of %d classes have "
        "no wrong labels",
        sum(noise.wrong), sum(map(len, parts.clients)) - noise.held_out, 100 * reached,
        100 * n.labels, int((mistakes.sum(1) == 0).sum()), data.task.outputs,
    )  # fmt: skip
    return replace(parts, noise=noise, noisy=noisy)


def site_before_pool(resolved: Resolved, parts: Partition) -> Site:
    """Return a `Site` without a pool, for steps that run before the pool is built."""
    return Site(resolved.family, (), (), resolved.data, parts, resolved.config.seed, most=most_of(resolved.config))


def most_of(config: Config) -> int | None:
    """Return the maximum number of samples that a client may report; None if the server knows all sample counts."""
    return config.partition.most if config.partition.rule == local_data.LOCAL else None


def reads(config: Config, root: str | None) -> Config:
    """Return the configuration of a client that reads its data from the folder `root`. If clients have their own data,
    `dataset.test_samples` applies only to the server."""
    dataset = {"root": root} if most_of(config) is None else {"root": root, "test_samples": None}
    return config.model_copy(update={"dataset": config.dataset.model_copy(update=dataset)})


def simulated(resolved: Resolved, site: Site) -> Site:
    """Return a copy of `site` that contains the clients' data from `partition.folders`. If clients do not have their
    own data, or run on other machines, return `site` unchanged. Raises DataError and PartitionError."""
    config = resolved.config
    p = config.partition
    if p.rule != local_data.LOCAL or p.folders is None or config.run.apart:
        return site
    form, parts = local_data.Form.of(site.data), []
    for folder in local_data.folders(Path(p.folders), p.clients):
        try:
            own = Resolved(reads(config, str(folder)), resolved.algorithm).data
        except DataError as error:
            raise DataError(str(error) if str(folder) in str(error) else f"{folder}: {error}") from error
        parts.append(form.normalises(own, str(folder), p.most))
    data, partition = local_data.joined(site.data, site.partition, parts)
    partition, held = held_out(config, partition, data)
    return replace(site, data=data, partition=partition, held=held)


def folders_sum(site: Site) -> str:
    """Return the sha256 of the clients' data and sample counts. `site` must have been returned by `simulated`."""
    sizes = [len(own) + len(site.held_by(client)) for client, own in enumerate(site.partition.clients)]
    return sha256(canonical([fingerprint(site.data), sizes]))


def held_out(config: Config, parts: Partition, data: Data) -> tuple[Partition, tuple[Ints, ...]]:
    """Hold out samples of each client for evaluation; return the partition for training and the held-out samples. If
    metrics are not measured on clients, no samples are held out."""
    if config.evaluate.on == "server":
        return parts, ()
    return hold_out(parts, config.evaluate.held_out, cut_seed(config), data)


def server_of(resolved: Resolved) -> ServerContext:
    """Return the server context that is used to build the pool. The data are partitioned on first use."""
    return ServerSite(lambda: site_before_pool(resolved, cut(resolved)), resolved.config.run.devices[0])


def site_of(resolved: Resolved, partition_dir: Path, pool_dir: Path, before: Mapping[str, Any] | None = None) -> Site:
    """Return the `Site` for clients on this machine, and prepare this process for training. `before`: recorded numerics
    of a resumed run. If `run.precision` is `auto`, the recorded precision is used again."""
    config = resolved.config
    parts = Partition.load(partition_dir, resolved.data)
    data = with_noise(resolved.data, parts)
    parts, held = held_out(config, parts, data)
    pool = PoolFile.read(pool_dir / "pool.json").pool()
    fleet = fleet_of(resolved, pool)
    prepare_process(config.run.devices)
    numerics = numerics_of(resolved, before)
    return Site(resolved.family, pool, fleet, data, parts, config.seed, numerics, None, held, most_of(config))


def fleet_of(resolved: Resolved, pool: Pool) -> tuple[Device, ...]:
    """Return the devices of the run. Raises ConfigError for invalid tiers."""
    config = resolved.config
    # With algorithm.eligible=capable, devices keep the configured memory, even if no model fits into the memory.
    keeps_to_memory = getattr(resolved.algorithm, "eligible", "all") == "capable"
    smallest = None if keeps_to_memory else pool[dispatched(pool)[0]].params
    return devices.fleet(config.fleet.tiers, config.partition.clients, config.seed, resolved.family, smallest)


def check_fleet(resolved: Resolved, pool: Pool) -> None:
    """Raise ConfigError if no device of the fleet can train a model of the pool."""
    method: Any = resolved.algorithm
    if hasattr(method, "selector"):
        method.selector(pool).init(check_eligible(method, fleet_of(resolved, pool), pool), pool)


def trace_sum(config: Config) -> str | None:
    """Return the sha256 of the trace files; None if the fleet has no trace file."""
    source = config.fleet.trace
    return trace_files.digest(source) if source is not None and source.files else None


def run_of(config: Config, algorithm: Algorithm, site: Site, noise_key: bytes | None = None) -> Run:
    """Return the objects and options that all rounds share. Raises ConfigError and DataError for a wrong trace."""
    source, samples = config.fleet.trace, [len(indices) for indices in site.partition.clients]
    return Run(
        algorithm,
        site,
        config.rounds,
        config.run.devices,
        noise_key,
        codecs(config),
        None if source is None else source.trace(site.fleet, samples, config.seed),
        config.fleet.wait_s,
        config.evaluate if config.evaluate.on == "clients" else None,
    )


def initial_state(resolved: Resolved, site: Site, pool_dir: Path) -> Any:
    """Return the algorithm's state before the first round. The weights are random unless the pool has initial weights.
    Raises IntegrityError if the weights file is missing or damaged, or belongs to another network."""
    weights = PoolFile.read(pool_dir / "pool.json").weights(pool_dir)
    try:
        params = None if weights is None else fitting(site.family, weights)
    except ModelError as error:
        raise IntegrityError(f"{pool_dir / WEIGHTS} does not fit this network: {error}") from error
    if params is None:
        params = initial_params(site.family, seeds.derive(resolved.config.seed, "init"))
    return resolved.algorithm.init(params, site.layout, site.fleet, site.pool, ServerSite(site))


def numerics_of(resolved: Resolved, before: Mapping[str, Any] | None = None) -> Numerics:
    """Return the configured numerics, with `auto` replaced by a value. `before`: see `choose_precision`."""
    training: Training = resolved.algorithm.training  # type: ignore[attr-defined]
    run, per_round = resolved.config.run, round_size(training.fraction, resolved.config.partition.clients)
    precision = choose_precision(run.precision, run.devices, before)
    if precision == "fp16" and training.weight_decay:
        log.warning("training.weight_decay = %g is ignored with run.precision=fp16", training.weight_decay)
    if run.strategy == "single" or training.is_own:
        return Numerics(precision=precision)
    if run.strategy == "batched":
        return strategy.batched(resolved.family, training.batch_size, per_round, precision, run.devices)
    task = resolved.data.task
    return strategy.choose(resolved.family, task, training.batch_size, per_round, precision, run.devices)


def log_unused_gpu(config: Config) -> None:
    """Log a message if a GPU is available but not used."""
    here = not config.run.apart and all(name == "cpu" for name in config.run.devices)
    if here and torch.cuda.is_available():
        log.info("a CUDA device is available but not used. Set run.devices=auto to train on the GPU")
