"""The work of a client's pod, or of a device that stays: it reads its orders and the site, trains, and uploads signed
updates."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.backends.processes import carry_out
from fl_engine.core import heap
from fl_engine.core.allowed import check_wheel
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import BadInput, ClientError, IntegrityError, brief, masked
from fl_engine.core.types import Pool
from fl_engine.data import local, partition_files
from fl_engine.data.partition import as_told
from fl_engine.exchange import code
from fl_engine.exchange.assignment import Assignment, site_files
from fl_engine.exchange.client import Site
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.fleet import faults
from fl_engine.storage import sums
from fl_engine.storage.store import Store
from fl_engine.training import cgroup, memory
from fl_engine.training.numerics import Numerics, describe, differing
from flexfleet import config as configs
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.steps import own_code
from flexfleet.steps.partition import held_out, most_of, reads
from flexfleet.steps.prepare import Resolved
from flexfleet.steps.site import fleet_of
from flexfleet.tracking.data_repository import is_fetched

log = logging.getLogger("flexfleet")


def answer(told: Assignment, failures: int = 0) -> None:
    """Answers all orders of the assignment. `failures`: how often the pods of this index have failed before.

    Raises ClientError if another try would fail in the same way; EnvironmentFailure and IntegrityError if the store
    does not answer.
    """
    store = told.open()
    carry_out_all(told, store, *prepared(told, store, in_cluster=True), failures)


def prepared(told: Assignment, store: Store, in_cluster: bool = False) -> tuple[Algorithm, Site]:
    """What all orders of a run need. `in_cluster`: this is a pod of the coordinator's, so the run's configuration may
    name any package of its image; on a device only what `core.allowed` lets it import. Raises as `answer`."""
    try:
        return _site(told, store, in_cluster)
    except BadInput as error:
        raise ClientError(str(error)) from error


def carry_out_all(
    told: Assignment,
    store: Store,
    algorithm: Algorithm,
    site: Site,
    failures: int = 0,
    room: Callable[[int], int] = cgroup.room,
) -> None:
    """Looks at the free memory, trains, and writes the answers into `store`. `room`: bytes that training may take, by
    those that a client holds before. Raises as `answer`, also where it cannot be said what is free."""
    mailbox = Mailbox(
        store,
        key=lambda order: bytes.fromhex(told.keys[order.client]),
        lengths=told.lengths,
        expected=told.orders,
    )
    turns = [told.clients]
    if told.observe == "cgroup":  # orders that wait would hold memory that nobody counts
        at_once = site.numerics.lanes if site.numerics.strategy == "batched" else 1
        turns = [told.clients[first : first + at_once] for first in range(0, len(told.clients), at_once)]
    for clients in turns:
        if told.observe == "cgroup":
            site = replace(site, free=_free(told, site.pool, len(clients), failures, room))
        carry_out(algorithm, site, mailbox, told.round, clients, told.device, True, told.evaluates)


def _site(told: Assignment, store: Store, in_cluster: bool) -> tuple[Algorithm, Site]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_bytes(sums.read(store, "site/run.json", told.site.get("run.json")))
        run = RunFile.read(folder / "run.json")
        _import_code(told, run, store)
        told_config, algorithm = configs.parse_with_algorithm(own_code.stored(run), stored=not in_cluster)
        resolved = Resolved(_here(told_config), algorithm)
        config, most = resolved.config, most_of(resolved.config)
        for file in site_files(most is not None):
            if file != "run.json":
                (folder / file).write_bytes(sums.read(store, f"site/{file}", told.site.get(file)))
        if most is None:
            parts = partition_files.load(folder, resolved.data)
            data = as_told(resolved.data, parts)
        else:
            if "FLEXFLEET_DATA" not in os.environ:
                raise ClientError(
                    "clients of this run have data of their own: set FLEXFLEET_DATA to this device's folder"
                )
            data = local.Form.read(folder / local.FORM).normalises(resolved.data, "this device's folder", most)
            parts = local.of_client(data, config.partition.clients, told.clients[0])
        family = resolved.family
        parts, held = held_out(config, parts)
        pool = PoolFile.read(folder / "pool.json").pool()
    numerics = _numerics(run)
    check_device(told.device, "torch_device")
    prepare_process((told.device,))
    here = describe(numerics, (told.device,))
    if others := differing(run.numerics, here):
        said = f"this node computes other last bits than the coordinator: {others}"
        if told.require_numerics:
            raise ClientError(f"{said} ({config.run.backend}.require_numerics)")
        log.warning(said)
    fleet = fleet_of(resolved, pool)
    struck = faults.parse(config.rounds.faults)
    site = Site(family, pool, fleet, data, parts, config.seed, numerics, None, struck, held, most)
    return algorithm, site


def _free(told: Assignment, pool: Pool, at_once: int, failures: int, room: Callable[[int], int]) -> float:
    """What each of so many clients of this pod or device has free now, in % of the full model's parameters: an equal
    share of the room, so that they may all train side by side."""
    peaks = told.memory
    if peaks is None:
        raise ClientError("observe=cgroup, but the assignment does not say how much memory training takes")
    if len(peaks.levels) != len(pool):
        raise ClientError(
            f"the assignment says how much memory {len(peaks.levels)} levels take, the run's pool has {len(pool)}: "
            "start the run anew, so that both are of one version"
        )
    heap.trim()  # what an earlier order has left is free
    left = room(peaks.base) // at_once
    free = memory.free(left, peaks, pool, failures)
    said = "%.1f MiB are free for a client, room for %.1f %% of the full model (failures before: %d)"
    log.info(said, left / 2**20, free, failures)
    return free


def _import_code(told: Assignment, run: RunFile, store: Store) -> None:
    """Verifies the run's own code, and imports from it. Raises ClientError where the coordinator did not sign it or
    this device's owner does not allow it, IntegrityError where the store has other bytes."""
    if told.code != run.code_sha256:
        raise ClientError(
            f"the coordinator has told of the code {told.code}, and the run's record names {run.code_sha256}: nothing "
            "is imported"
        )
    if told.code is None:
        return
    code.check_signed(bytes.fromhex(told.keys[told.clients[0]]), told.code, told.round, told.code_signature)
    check_wheel(told.code)
    key = code.store_key(told.code)
    code.enable(store.get(key, code.LARGEST_WHEEL), told.code, store.uri(key))


def _numerics(run: RunFile) -> Numerics:
    told = {field.name: run.numerics.get(field.name) for field in fields(Numerics)}
    try:
        return TypeAdapter(Numerics).validate_python(told)
    except ValidationError as error:
        raise IntegrityError(f"run.json does not say how the arithmetic is done: {brief(error)}") from error


def _here(config: configs.Config) -> configs.Config:
    """Return the configuration with the folder of the data on this node. Raises ClientError if the coordinator names
    data to fetch, because a client calls no address but its store's."""
    if "FLEXFLEET_DATA" in os.environ:
        return reads(config, None)
    if is_fetched(config.dataset.root or ""):
        raise ClientError(
            f"dataset.root = {masked(config.dataset.root or '')[:200]} is fetched from elsewhere, which a client does "
            "not do. Set FLEXFLEET_DATA on this device to the folder of its data"
        )
    return config
