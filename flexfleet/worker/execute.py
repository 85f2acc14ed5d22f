"""Execute the assignments of a lease: read the site and the assignments, train, and upload signed results."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from fl_engine.backends.in_process import check_device, prepare_process
from fl_engine.core import system
from fl_engine.core.contracts import Algorithm
from fl_engine.core.errors import ClientError, masked
from fl_engine.core.records import parsed, read_bytes
from fl_engine.core.types import ClientResult, Pool, RoundPlan
from fl_engine.data import local_data
from fl_engine.data.partition import Partition
from fl_engine.data.partitioning import with_noise
from fl_engine.exchange import coding
from fl_engine.exchange.client import Site, accept_all, train
from fl_engine.exchange.mailbox import Mailbox
from fl_engine.remote.messages import AssignmentMessage, Lease, result_key, site_files
from fl_engine.storage import code, run_files
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.store import Store, tensor_bytes
from fl_engine.training import memory
from fl_engine.training.numerics import Numerics, describe, differing
from flexfleet import config as configs
from flexfleet.files.artifacts import PoolFile, RunFile
from flexfleet.pipeline import own_code
from flexfleet.pipeline.partition import fleet_of, held_out, most_of, reads
from flexfleet.pipeline.prepare import Resolved
from flexfleet.tracking.dvc_remote import is_fetched

log = logging.getLogger("flexfleet")


@dataclass(frozen=True)
class Prepared:
    """Objects that a worker reuses for all leases of one run and configuration."""

    algorithm: Algorithm
    site: Site
    numerics: str
    """Value for `Heartbeat.numerics`."""
    epochs: int | None = None
    """Maximum number of epochs that the device's owner allows; None without a limit."""


def prepare(message: AssignmentMessage, store: Store, pod: bool) -> Prepared:
    """Read the site (data, partition, pool and fleet) from the run's store. If `pod` is True, the worker runs in the
    coordinator's cluster, so the configuration may use any package of the image, and the run may include user code.

    Raises:
        BadInput, ClientError: The assignments cannot be executed, and a retry would fail in the same way.
        EnvironmentFailure: The store does not respond.
        IntegrityError: The checksum of a file in the store differs from the checksum in the assignment.
    """
    run = RunFile.of(run_files.read_verified(store, "site/run.json", message.site.get("run.json")), "run.json")
    _import_code(message, run, store, pod)
    stored_config, algorithm = configs.parse_with_algorithm(own_code.stored(run), stored=not pod)
    resolved = Resolved(_here(stored_config), algorithm)
    config, most = resolved.config, most_of(resolved.config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in site_files(most is not None):
            if file != "run.json":
                (folder / file).write_bytes(run_files.read_verified(store, f"site/{file}", message.site.get(file)))
        if most is None:
            parts = Partition.load(folder, resolved.data)
            data = with_noise(resolved.data, parts)
        else:
            if "FLEXFLEET_DATA" not in os.environ:
                raise ClientError("FLEXFLEET_DATA must be set to this device's data folder if partition.rule=local")
            form = parsed(local_data.Form, read_bytes(folder / local_data.FORM), local_data.FORM)
            data = form.normalises(resolved.data, "this device's folder", most)
            parts = local_data.of_client(data, config.partition.clients, message.clients[0])
        parts, held = held_out(config, parts, data)
        pool = PoolFile.read(folder / "pool.json").pool()
    numerics = Numerics(**{field.name: run.numerics[field.name] for field in fields(Numerics)})
    check_device(message.device, "torch_device")
    prepare_process((message.device,))
    others = differing(run.numerics, describe(numerics, (message.device,)))
    if others:
        log.warning("results on this machine may be rounded differently than on the coordinator: %s", others)
    fleet = fleet_of(resolved, pool)
    site = Site(resolved.family, pool, fleet, data, parts, config.seed, numerics, held=held, most=most)
    return Prepared(algorithm, site, others or "")


def execute(
    lease: Lease, key: str, site_sum: str, store: Store, prepared: Prepared, room: Callable[[int], int]
) -> None:
    """Execute the assignments of a lease, and write the results into `store`. Raises the errors of `prepare`, and
    ClientError if the free memory cannot be measured.

    Args:
        key: Key of the worker.
        site_sum: Hash of the files of the site (`Message.site`).
        room: Function that returns the bytes available for training. The argument is the memory before training, in
            bytes.
    """
    message, site = lease.assignment, prepared.site
    signs = result_key(key, site_sum, lease.id)
    mailbox = Mailbox(store, key=lambda _: signs, lengths=message.lengths, expected=message.assignments, lease=lease.id)
    turns = [message.clients]
    if message.observe == "cgroup":  # Load only as many assignments as can be trained in parallel.
        at_once = site.numerics.lanes if site.numerics.strategy == "batched" else 1
        turns = [message.clients[first : first + at_once] for first in range(0, len(message.clients), at_once)]
    for clients in turns:
        if message.observe == "cgroup":
            free = _free(message, site.pool, len(clients), room)
            prepared = replace(prepared, site=replace(site, free=free))
        _train(prepared, mailbox, message, clients)


def _train(prepared: Prepared, mailbox: Mailbox, message: AssignmentMessage, clients: Sequence[int]) -> None:
    """Read the clients' assignments from the mailbox, train in parallel if possible, and write the results."""
    algorithm, site, most = prepared.algorithm, prepared.site, prepared.epochs
    assignments = mailbox.assignments(message.round, clients, message.evaluates)
    groups, failures = accept_all(algorithm, assignments.values(), site)
    epochs = max((work.task.epochs for group in groups for work in group), default=0)
    if most is not None and epochs > most:
        raise ClientError(f"the number of epochs must be at most {most} (--epochs of the device's owner), got {epochs}")
    results = chain(failures, (one for group in groups for one in train(group, site, message.device)))

    def put(result: ClientResult) -> None:
        mailbox.put_result(RoundPlan(message.round, (assignments[result.client],), evaluates=message.evaluates), result)

    state = coding.bytes_of(replace(site.rules, algorithm=algorithm).client_state)
    largest = max((tensor_bytes(assignment.payload) for assignment in assignments.values()), default=0)
    # During an upload, the result and an encoded copy are in memory.
    for _ in overlapped(mailbox.store, 2 * (largest + state), put, results):
        pass


def _free(message: AssignmentMessage, pool: Pool, at_once: int, room: Callable[[int], int]) -> float:
    """Return the size of the model that fits into each of `at_once` clients' free memory, in % of the full model."""
    peaks = message.memory
    if peaks is None or len(peaks.levels) != len(pool):
        raise ClientError("the assignment must contain the peak memory of each level if observe=cgroup")
    system.trim()  # Release memory of earlier assignments.
    left = room(peaks.base) // at_once
    free = memory.free(left, peaks, pool, message.failures)
    log.info("free memory per client: %.1f MiB, enough for %.1f %% of the full model", left / 2**20, free)
    return free


def _import_code(message: AssignmentMessage, run: RunFile, store: Store, pod: bool) -> None:
    """Make the run's code importable. Raises ClientError on an enrolled device, because only the owner may install code
    there. Raises IntegrityError if the code in the store has a wrong checksum."""
    if message.code != run.code_sha256:
        raise ClientError(f"the assignment's code must have the checksum {run.code_sha256}, got {message.code}")
    if message.code is None:
        return
    if not pod:
        raise ClientError("run.code is not supported on enrolled devices. Instead, install the package on each device")
    key = code.store_key(message.code)
    code.enable(store.get(key, code.LARGEST_WHEEL), message.code, store.uri(key))


def _here(config: configs.Config) -> configs.Config:
    """Return the configuration with the path of this machine's data folder. Raises ClientError if the data must be
    downloaded, because a worker connects only to its store."""
    if "FLEXFLEET_DATA" in os.environ:
        return reads(config, None)
    if is_fetched(config.dataset.root or ""):
        raise ClientError(
            f"dataset.root must be a folder, because workers do not download data, got "
            f"{masked(config.dataset.root or '')[:200]}. Set FLEXFLEET_DATA to the data folder on this machine"
        )
    return config
