"""Executes a lease: reads the site and the assignments, trains, and uploads signed results."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import system
from fl_engine.core.allowed import check_wheel
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import BadInput, ClientError, IntegrityError, brief, masked
from fl_engine.core.types import Outcome, Pool, RoundPlan
from fl_engine.data import local_data, partition_files
from fl_engine.data.partition import as_told
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, accept_all, train
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.remote.messages import Assignment, Lease, result_key, site_files
from fl_engine.storage import code, run_files
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.store import Store, tensor_bytes
from fl_engine.training import memory
from fl_engine.training.numerics import Numerics, describe, differing
from flexfleet import config as configs
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.pipeline import own_code
from flexfleet.pipeline.partition import held_out, most_of, reads
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.site import fleet_of
from flexfleet.tracking.data_repository import is_fetched

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Prepared:
    """The part of a site that serves all leases of one run and configuration."""

    algorithm: Algorithm
    site: Site
    numerics: str
    """See `Heartbeat.numerics`."""


def prepare(given: Assignment, store: Store, pod: bool) -> Prepared:
    """Read the site.

    Args:
        given: The assignment.
        store: The run's store.
        pod: The worker is a pod of the coordinator's cluster, so the run's configuration may name any package of its
            image, and the run may bring code of its own.

    Raises:
        ClientError: Another try would fail in the same way.
        EnvironmentFailure: The store does not answer.
        IntegrityError: The store has other bytes than were assigned.
    """
    try:
        return _prepared(given, store, pod)
    except BadInput as error:
        raise ClientError(str(error)) from error


def execute(
    lease: Lease, key: str, site_sum: str, store: Store, prepared: Prepared, room: Callable[[int], int]
) -> None:
    """Execute a lease's assignment, and write the results into `store`.

    Args:
        lease: The lease.
        key: The worker's key.
        site_sum: `Message.site`.
        store: The run's store.
        prepared: What `prepare` has returned for this site.
        room: Returns the bytes that training may take, given the bytes that the process holds before.

    Raises:
        ClientError: Another try would fail in the same way, or the free memory cannot be measured.
        EnvironmentFailure: The store does not answer.
        IntegrityError: The store refuses a request, or has other bytes than were assigned.
    """
    given, site = lease.assignment, prepared.site
    signs = result_key(key, site_sum, lease.id)
    mailbox = Mailbox(store, key=lambda _: signs, lengths=given.lengths, expected=given.orders, lease=lease.id)
    turns = [given.clients]
    if given.observe == "cgroup":  # waiting assignments would hold memory that is not counted
        at_once = site.numerics.lanes if site.numerics.strategy == "batched" else 1
        turns = [given.clients[first : first + at_once] for first in range(0, len(given.clients), at_once)]
    for clients in turns:
        if given.observe == "cgroup":
            site = replace(site, free=_free(given, site.pool, len(clients), room))
        carry_out(prepared.algorithm, site, mailbox, given.round, clients, given.device, evaluates=given.evaluates)


def carry_out(
    algorithm: Algorithm,
    site: Site,
    mailbox: Mailbox,
    round: int,
    clients: Sequence[int],
    device: str,
    evaluates: bool = False,
) -> None:
    """Read these clients' assignments from the mailbox, train side by side if possible, and write the results.
    `evaluates`: the assignments are those of the round's evaluation."""
    orders = mailbox.orders(round, clients, evaluates)
    groups, failures = accept_all(algorithm, orders.values(), site)
    outcomes = chain(failures, (one for group in groups for one in train(group, site, device)))

    def put(outcome: Outcome) -> None:
        mailbox.put_outcome(RoundPlan(round, (orders[outcome.client],), evaluates=evaluates), outcome)

    state = coding.bytes_of(replace(site.rules, algorithm=algorithm).client_state)
    largest = max((tensor_bytes(order.payload) for order in orders.values()), default=0)
    # Each running upload holds an outcome and its encoded copy.
    for _ in overlapped(mailbox.store, 2 * (largest + state), put, outcomes):
        pass


def _prepared(given: Assignment, store: Store, pod: bool) -> Prepared:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.json").write_bytes(run_files.read_verified(store, "site/run.json", given.site.get("run.json")))
        run = RunFile.read(folder / "run.json")
        _import_code(given, run, store, pod)
        stored_config, algorithm = configs.parse_with_algorithm(own_code.stored(run), stored=not pod)
        resolved = Resolved(_here(stored_config), algorithm)
        config, most = resolved.config, most_of(resolved.config)
        for file in site_files(most is not None):
            if file != "run.json":
                (folder / file).write_bytes(run_files.read_verified(store, f"site/{file}", given.site.get(file)))
        if most is None:
            parts = partition_files.load(folder, resolved.data)
            data = as_told(resolved.data, parts)
        else:
            if "FLEXFLEET_DATA" not in os.environ:
                raise ClientError("FLEXFLEET_DATA must be the folder of this device's data (partition.rule=local)")
            data = local_data.Form.read(folder / local_data.FORM).normalises(
                resolved.data, "this device's folder", most
            )
            parts = local_data.of_client(data, config.partition.clients, given.clients[0])
        parts, held = held_out(config, parts)
        pool = PoolFile.read(folder / "pool.json").pool()
    numerics = _numerics(run)
    check_device(given.device, "torch_device")
    prepare_process((given.device,))
    others = differing(run.numerics, describe(numerics, (given.device,)))
    if others:
        log.warning("this machine computes other last bits than the coordinator: %s", others)
    fleet = fleet_of(resolved, pool)
    site = Site(resolved.family, pool, fleet, data, parts, config.seed, numerics, held=held, most=most)
    return Prepared(algorithm, site, others or "")


def _free(given: Assignment, pool: Pool, at_once: int, room: Callable[[int], int]) -> float:
    """Return the free memory of each of so many clients, in % of the full model's parameters. They share it equally,
    because they may train side by side."""
    peaks = given.memory
    if peaks is None or len(peaks.levels) != len(pool):
        raise ClientError("with observe=cgroup the assignment must name the memory that each level of the pool takes")
    system.trim()  # what an earlier assignment has left is free
    left = room(peaks.base) // at_once
    free = memory.free(left, peaks, pool, given.failures)
    log.info("a client has %.1f MiB of free memory, %.1f %% of the full model", left / 2**20, free)
    return free


def _import_code(given: Assignment, run: RunFile, store: Store, pod: bool) -> None:
    """Verify the run's own code, and import from it.

    Raises ClientError on an enrolled device, whose owner installs what it runs, and if the machine does not allow the
    wheel (`allowed`). Raises IntegrityError if the store has other bytes.
    """
    if given.code != run.code_sha256:
        raise ClientError(f"the assignment's code {given.code} differs from the code of the run, {run.code_sha256}")
    if given.code is None:
        return
    if not pod:
        raise ClientError(
            "run.code cannot be used with enrolled devices. Install the package on the device, and name it in the "
            "configuration"
        )
    check_wheel(given.code)
    key = code.store_key(given.code)
    code.enable(store.get(key, code.LARGEST_WHEEL), given.code, store.uri(key))


def _numerics(run: RunFile) -> Numerics:
    stored = {field.name: run.numerics.get(field.name) for field in fields(Numerics)}
    try:
        return TypeAdapter(Numerics).validate_python(stored)
    except ValidationError as error:
        raise IntegrityError(f"run.json must hold the numerics of the run: {brief(error)}") from error


def _here(config: configs.Config) -> configs.Config:
    """Return the configuration with the data's folder on this machine. Raises ClientError if the data must be fetched,
    because a worker calls no address but its store's."""
    if "FLEXFLEET_DATA" in os.environ:
        return reads(config, None)
    if is_fetched(config.dataset.root or ""):
        raise ClientError(
            f"dataset.root must be a folder, because workers do not fetch data; got "
            f"{masked(config.dataset.root or '')[:200]}. Set FLEXFLEET_DATA on this machine to the folder of its data"
        )
    return config
