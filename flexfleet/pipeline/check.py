"""Check a run before its first round, and check the servers that are named in a pipeline's form."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from fl_engine.aggregation import privacy
from fl_engine.backends.in_process import check_devices
from fl_engine.core import seeds
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ConfigError, EnvironmentFailure, FlexfleetError, first_line, together
from fl_engine.core.pool import pool_of
from fl_engine.core.slicing import initial_params, made_up, random_targets, take
from fl_engine.core.types import OwnOptimizer, RoundPlan, TaskContext
from fl_engine.data.partition import Partition
from fl_engine.exchange.client import Site
from fl_engine.models import export as exports
from fl_engine.preparation import assumed, preparation
from fl_engine.preparation.confusion import check_classes
from fl_engine.preparation.weights import giver
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.objects import check_reach, image_for
from fl_engine.rounds import buffer
from fl_engine.rounds.checks import check_begun
from fl_engine.rounds.run import Run
from fl_engine.rounds.server import ServerSite
from fl_engine.storage.s3 import check_place, open_store
from fl_engine.storage.s3_settings import endpoint_of
from fl_engine.storage.store import Store
from fl_engine.training import user_code
from fl_engine.training.local import TrainingJob, train
from fl_engine.training.numerics import choose_precision
from flexfleet.config import Config
from flexfleet.config.dotted import no_passwords, place, platform_store, platform_uri
from flexfleet.config.parameters import check_space
from flexfleet.config.sources import cells, to_a_file
from flexfleet.files.run_folder import check_writable
from flexfleet.pipeline import keys
from flexfleet.pipeline.partition import cut, fleet_of, held_out, most_of, run_of, simulated, site_before_pool
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.pretrain import need_proxy, settings_of
from flexfleet.tracking import databases, dvc_remote
from flexfleet.tracking.server import Client, check_address, check_server, first_calls


def check(resolved: Resolved, publishes: bool = True) -> dict[str, Any]:
    """Check a run without executing rounds or writing files, and return a short summary. Raises BadInput. `publishes`
    is False for the trials of a study, which do not publish models."""
    config, algorithm, data, family = resolved.config, resolved.algorithm, resolved.data, resolved.family
    check_devices(config.run.devices)
    choose_precision(config.run.precision, config.run.devices, None)
    parts = cut(resolved)
    if config.noise.labels:
        check_classes(data.task, data.name)
    if config.run.backend == "kubernetes":
        jobs.check(config.kubernetes, [tier.name for tier in config.fleet.tiers])
        image_for(config.kubernetes)
    check_space(config)
    if config.tune.storage is not None:
        databases.check_url("tune.storage", config.tune.storage)
    _check_places(config, algorithm)
    if publishes:
        check_loadable(config)
        if config.publish.dvc is not None:
            dvc_remote.check(config.publish.dvc)
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


def first_round(
    resolved: Resolved, parts: Partition, prepared: Mapping[str, Any] | None = None
) -> tuple[Run, Any, RoundPlan]:
    """Plan the first round; return the run, the initial state of the algorithm, and the plan. Raises BadInput.

    With None for `prepared`, the results of the preparations, all layers get equal scores. These scores suffice to
    check the sizes of sub-models."""
    config, algorithm, family = resolved.config, resolved.algorithm, resolved.family
    server = ServerSite(site_before_pool(resolved, parts), config.run.devices[0])
    pool = pool_of(algorithm, family, {**assumed(algorithm, family), **(prepared or {})}, server)
    initial = resolved.start or initial_params(family, seeds.derive(config.seed, "init"))
    trained, held = held_out(config, parts, resolved.data)
    most = most_of(config)
    site = Site(family, pool, fleet_of(resolved, pool), resolved.data, trained, config.seed, held=held, most=most)
    run = run_of(config, algorithm, site)
    start = algorithm.init(initial, site.layout, site.fleet, pool, run.server)
    check_begun(algorithm, start)
    plan = algorithm.plan(start, run.context(0, run.begins(0, 0.0)))
    buffer.check_plan(run, start, plan, ())
    return run, start, plan


def check_loadable(config: Config) -> None:
    """Raise ConfigError if a model from a notebook or script must be registered, because other processes cannot import
    such a model."""
    own = [name for name in cells(config) if name == config.model["name"]]
    if config.publish.models and config.tracking.mlflow is not None and own:
        raise ConfigError(
            f"publish.models: {to_a_file(own[0], 'processes that load the registered models')}. Alternatively, "
            "set tracking.mlflow=null to export the levels without registering them, or set publish.models=false"
        )


def _try_own(config: Config, algorithm: Algorithm, site: Site, plan: RoundPlan) -> None:
    """Test the user's own objective or optimizer in one training step on random samples. Raises ConfigError if the
    algorithm does not use the objective or optimizer, and ModelError if the step fails."""
    wanted = config.training
    if not wanted.is_own:
        return
    for number, assignment in enumerate(plan.assignments):
        context = TaskContext(site.layout, site.pool, site.fleet[assignment.client], math.inf)
        task = algorithm.task(assignment, context)
        made_by = task.optimizer.name if isinstance(task.optimizer, OwnOptimizer) else None
        for what, wanted_name, found in (
            (user_code.OBJECTIVE, wanted.objective, task.objective),
            (user_code.OPTIMIZER, wanted.optimizer, made_by),
        ):
            if wanted_name != found:
                raise ConfigError(
                    f"{what} is not used by the algorithm {config.algorithm['name']}. Call self.local_task in the "
                    "algorithm's `task`, or remove the parameter"
                )
        user_code.check(task)
        if number == 0:
            generator = torch.Generator().manual_seed(seeds.derive(config.seed, "own"))
            count = min(task.batch_size, 8)
            x = made_up(site.family, count, generator)
            y = random_targets(site.family, site.data.task, x, generator)
            start = take(assignment.payload, site.layout, task.spec, have=assignment.spec)
            train(site.family, site.data.task, [TrainingJob(replace(task, epochs=1, batch_size=count), start, x, y)])


def _check_places(config: Config, algorithm: Algorithm) -> None:
    for name, where in (("run.remote", config.run.remote), ("run.secrets", config.run.secrets)):
        check_place(name, where)
    if any("://" in (where or "") for where in (config.run.remote, config.publish.dvc)):
        endpoint_of()
    if config.run.backend == "kubernetes":
        check_reach(config.run.remote or config.run.store)
    if privacy.is_private(algorithm) or config.run.apart:
        keys.check_folder(config)
    if config.tracking.mlflow is not None:
        check_server(config.tracking.mlflow)


def check_folders(config: Config) -> None:
    """Raise EnvironmentFailure if a folder that a run on this machine writes to is not writable."""
    dvc = None if config.publish.dvc is None else dvc_remote.place_of(config.publish.dvc)
    folders = {"run.store": config.run.store, "run.remote": config.run.remote, "run.secrets": config.run.secrets}
    for name, where in (folders | {"publish.dvc": dvc}).items():
        if where is not None and "://" not in where:
            check_writable(name, Path(where))


# ------------------------------------------------------------------------------- forms of pipelines
T = TypeVar("T")


def check_form(form: Mapping[str, Any], check: Callable[[str], T]) -> T:
    """Check the servers and folders that a pipeline's form names, and return the result of the function `check`.

    Args:
        form: Parameters of the pipeline task, including `store_uri`, `mlflow_uri` and `advanced`.
        check: Function that checks the other parameters of the form. Its argument is `store_uri`, or the platform's
            bucket if `store_uri` is empty.

    Raises:
        FlexfleetError: At least one check failed. If several checks fail, their errors are combined.
    """
    advanced = dict(form["advanced"]) if isinstance(form["advanced"], Mapping) else {}
    # Reject addresses with passwords before any address is used.
    no_passwords({name: value for name, value in form.items() if name != "advanced"} | advanced)
    store, errors = form["store_uri"] or platform_store(), list[FlexfleetError]()
    try:
        found = check(store or Config().run.store)
    except FlexfleetError as error:
        errors.append(error)
    if not store:
        message = "`store_uri` is empty. Enter s3://bucket/prefix, or a folder of a volume."
        errors.append(ConfigError(message, code="config.missing", path="store_uri"))
    dvc = next((value for name, value in advanced.items() if name.rpartition(":")[2].strip() == "publish.dvc"), None)
    if isinstance(dvc, str) and dvc and "/" not in dvc:
        message = f"publish.dvc must be s3://bucket/prefix or a folder of a volume in a pipeline, got {dvc!r}"
        errors.append(ConfigError(message, path="publish.dvc"))
        dvc = None
    errors += unusable(store, form["mlflow_uri"] or platform_uri(), dvc)
    if errors:
        raise together(errors)
    return found


def unusable(store: Any, mlflow: Any, dvc: Any) -> list[FlexfleetError]:
    """Return one error for each server or folder that cannot be used. Values that are None are not checked. Malformed
    addresses are not checked either, because `check` reports them.

    Args:
        store: Store of the runs. The check creates and deletes an object in the store.
        mlflow: Tracking URI. The check sends a request to a server. A database file is not checked.
        dvc: DVC remote. The check creates and deletes an object in the remote.
    """
    checks: dict[str, Callable[[], None]] = {}
    for name, uri in ((place("store_uri", store), store), ("publish.dvc", dvc)):
        with suppress(ConfigError):
            if isinstance(uri, str) and uri:
                check_place(name, uri)
                checks[name] = lambda uri=uri: try_store(open_store(uri, hasty=True))  # type: ignore[misc]
    with suppress(ConfigError):
        if isinstance(mlflow, str) and mlflow:
            check_address(mlflow)
            checks["tracking.mlflow"] = lambda: _list_experiments(mlflow)
    errors: list[FlexfleetError] = []
    for name, check in checks.items():
        try:
            check()
        except FlexfleetError as error:
            errors.append(type(error)(f"{name} cannot be used: {error}", path=name))
        except Exception as error:
            errors.append(EnvironmentFailure(f"{name} cannot be used: {first_line(error)}", path=name))
    return errors


def try_store(store: Store) -> None:
    """Write, read, list and delete an object. Raises EnvironmentFailure if the store cannot be used."""
    key = f"probe-{uuid.uuid4().hex[:8]}"
    store.put(key, b"flexfleet checks that it can write here")
    try:
        store.get(key)
        store.list(key)
    finally:
        store.delete(key)


def _list_experiments(uri: str) -> None:
    if uri.partition("://")[0].partition("+")[0].lower() in ("http", "https", *databases.KINDS):
        client = Client(uri)
        with first_calls(uri):
            client.search_experiments(max_results=1)
