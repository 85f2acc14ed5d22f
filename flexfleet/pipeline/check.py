"""What can be checked before the first round: parameters, data, partition, fleet, pool sizes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fl_engine.aggregation import privacy
from fl_engine.backends.in_process import check_devices
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError
from fl_engine.core.pool import pool_of
from fl_engine.core.slicing import initial_params, made_up, take
from fl_engine.core.types import OwnOptimizer, RoundPlan, TaskContext
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.fleet import devices
from fl_engine.models import export as exports
from fl_engine.preparation import assumed, preparation
from fl_engine.preparation.confusion import check_classes
from fl_engine.preparation.weights import giver
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.provisioner import check_reach
from fl_engine.rounds import at_clients, buffer
from fl_engine.rounds.checks import check_begun
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.s3 import check_place, endpoint_of, http_address
from fl_engine.training import user_code
from fl_engine.training.local import Job, train
from fl_engine.training.numerics import settled
from flexfleet.config import Config
from flexfleet.config.sources import cells, to_a_file
from flexfleet.pipeline import keys
from flexfleet.pipeline.partition import cut, held_out, most_of, simulated, site_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import need_proxy, settings_of
from flexfleet.pipeline.site import fleet_of, trace_of
from flexfleet.tracking.server import check_address


def check(resolved: Resolved, publishes: bool = True) -> dict[str, Any]:
    """Return a short description of the run. Raises BadInput. Trains nothing and writes nothing. Trials of a study set
    `publishes` to False."""
    config, algorithm, data, family = resolved.config, resolved.algorithm, resolved.data, resolved.family
    check_devices(config.run.devices)
    settled(config.run.precision, config.run.devices, None)
    parts = cut(resolved)
    if config.noise.labels:
        check_classes(data.task, data.name)
    if config.run.backend == "kubernetes":
        tiers = devices.named(config.fleet.tiers) if isinstance(config.fleet.tiers, str) else config.fleet.tiers
        jobs.check(config.kubernetes, [tier.name for tier in tiers])
    _check_places(config, algorithm)
    if publishes:
        check_loadable(config)
        check_place("publish.dvc", config.publish.dvc)
    _check_rates(config)
    giver(algorithm.preparations)
    for name in algorithm.preparations:
        kind = preparation(name)
        settings_of(resolved, name, kind)
        need_proxy(name, kind, parts)
    run, _, plan = first_round(resolved, parts)
    if config.publish.models:
        static_bn = any(member.static_bn for member in run.site.pool if member.reported)
        proxy = len(parts.proxy_train) + len(parts.proxy_test)
        exports.check(family, proxy, static_bn)
        if config.publish.onnx:
            exports.check_onnx(family, data)
        if "int8_static" in config.publish.precision and not proxy:
            raise ConfigError(
                "publish.precision: int8_static needs the server's proxy data. Set partition.proxy above 0"
            )
    if config.evaluate.on == "clients":
        at_clients.check(algorithm, family, run.site.pool)
    simulated(resolved, run.site)  # reads the clients' folders
    _try_own(config, algorithm, run.site, plan)
    return {
        "ok": True,
        "dataset": data.name,
        "train": len(data.train_y),
        "test": len(data.test_y),
        "model": config.model["name"],
        "algorithm": config.algorithm["name"],
    }


def first_round(resolved: Resolved, parts: Partition) -> tuple[Run, Any, RoundPlan]:
    """The run, the algorithm's state and the plan of the first round. Raises BadInput."""
    config, algorithm, family = resolved.config, resolved.algorithm, resolved.family
    # Nothing is prepared, so every layer has the same score. FlexFL's targets, Gamma and nesting can still be checked.
    server = ServerSite(site_of(resolved, parts), config.run.devices[0])
    pool = pool_of(algorithm, family, assumed(algorithm, family), server)
    initial = resolved.start or initial_params(family, seeds.derive(config.seed, "init"))
    trained, held = held_out(config, parts)
    most = most_of(config)
    site = Site(family, pool, fleet_of(resolved, pool), resolved.data, trained, config.seed, held=held, most=most)
    run = Run(algorithm, site, config.rounds, trace=trace_of(config, site)[0], wait_s=config.fleet.wait_s)
    start = algorithm.init(initial, site.layout, site.fleet, pool, run.server)
    check_begun(algorithm, start)
    plan = algorithm.plan(start, run.context(0, run.begins(0, 0.0)))
    buffer.check_plan(run, start, plan, ())
    return run, start, plan


def check_loadable(config: Config) -> None:
    """Raise ConfigError if a model that is to be registered is defined in a notebook or script, where another process
    cannot import it."""
    own = cells(config.model)
    if config.publish.models and config.tracking.mlflow is not None and own:
        raise ConfigError(
            f"publish.models: {to_a_file(own[0], 'those who load the registered models')}, or --set "
            "tracking.mlflow=null, with which the levels are exported and not registered, or --set publish.models=false"
        )


def _try_own(config: Config, algorithm: Algorithm, site: Site, plan: RoundPlan) -> None:
    """Where an objective or an optimiser is one's own: a step on made-up samples. Raises ConfigError where the
    algorithm does without it, ModelError for what goes wrong in it."""
    wanted = config.training
    if not wanted.is_own:
        return
    tasks = [
        algorithm.task(order, TaskContext(site.layout, site.pool, site.fleet[order.client], math.inf))
        for order in plan.orders
    ]
    for task in tasks:
        made_by = task.optimizer.name if isinstance(task.optimizer, OwnOptimizer) else None
        for what, asked, found in (
            (user_code.OBJECTIVE, wanted.objective, task.objective),
            (user_code.OPTIMIZER, wanted.optimizer, made_by),
        ):
            if asked != found:
                raise ConfigError(
                    f"{config.algorithm['name']} makes its clients' tasks without {what}: let its `task` call "
                    "self.local_task, or leave the parameter out"
                )
        user_code.check(task)
    for order, task in list(zip(plan.orders, tasks, strict=True))[:1]:
        generator = torch.Generator().manual_seed(seeds.derive(config.seed, "own"))
        count = min(task.batch_size, 8)
        x, y = made_up(site.family, count, generator), site.data.task.examples(count, generator)
        start = take(order.payload, site.layout, task.spec, have=order.spec)
        train(site.family, site.data.task, [Job(replace(task, epochs=1, batch_size=count), start, x, y)])


def _check_places(config: Config, algorithm: Algorithm) -> None:
    """Check addresses without asking a server."""
    for name, where in (("run.remote", config.run.remote), ("run.secrets", config.run.secrets)):
        check_place(name, where)
    if config.run.remote is not None and "://" in config.run.remote:
        endpoint_of()
        named = {"kubernetes": config.kubernetes.endpoint, "agents": config.agents.endpoint}.get(config.run.backend)
        if named is not None:
            http_address(f"{config.run.backend}.endpoint", named)
    if config.run.backend == "kubernetes":
        check_reach(config.run.remote or config.run.store)
    if privacy.is_private(algorithm) or config.run.apart:
        keys.check_folder(config)
    if config.tracking.mlflow is not None:
        check_address(config.tracking.mlflow)


def _check_rates(config: Config) -> None:
    """Raise ConfigError if a growing learning rate overflows in a later round."""
    try:
        config.training.sgd(config.rounds.stop - 1)
    except OverflowError:
        raise ConfigError(
            f"training.lr_decay = {config.training.lr_decay} makes the learning rate infinite by round "
            f"{config.rounds.stop}, because it is multiplied by this after each round"
        ) from None
