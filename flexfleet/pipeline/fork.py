"""Continue a run with other settings, or without some of its clients (`flexfleet fork`).

A fork is a new run. It shares its first rounds with another run, and then continues from the state that this run had.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fl_engine.aggregation import privacy
from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.data import partition as partitions
from fl_engine.rounds import chain
from fl_engine.storage.checkpoints import FILE, Checkpoints, Row
from fl_engine.storage.store import Store
from flexfleet import config as configs
from flexfleet.config.dotted import applied
from flexfleet.config.run_names import check_name
from flexfleet.files.artifacts import Artifact, Forked, History, PoolFile, RunFile, RunResult
from flexfleet.files.run_folder import check_is_folder, folder_lock
from flexfleet.pipeline import keys, own_code
from flexfleet.pipeline.model_pool import model_pool
from flexfleet.pipeline.partition import fleet_of
from flexfleet.pipeline.prepare import Resolved
from flexfleet.pipeline.resume import Attempt, store_of
from flexfleet.pipeline.run import run as run_all

log = logging.getLogger("flexfleet")

FIXED = ("schema_version", "seed", "dataset", "partition", "noise", "model", "fleet", "pretrain", "algorithm.name")
"""Parameters that a fork cannot change, because the shared rounds depend on them."""
WITHOUT = "rounds.without"
CERTIFICATE = "forgotten.json"


def fork(
    parent: Path,
    run_id: str,
    at: int | None = None,
    settings: Mapping[str, Any] | None = None,
    without: Collection[int] = (),
    attempt: Attempt = Attempt(),
) -> RunResult:
    """Run a fork of the run in the folder `parent`, or resume it.

    Args:
        at: Number of shared rounds; None: see `shared_rounds`.
        settings: Changed parameters by dotted name.
        without: Clients that the fork never asks.

    Raises:
        ConfigError: The state after round `at` was not kept, a setting cannot be changed, or the run is private.
    """
    check_is_folder(parent)
    known = RunFile.read(parent / "run.json")
    own_code.enable(known, parent)
    given = dict(settings or {})
    if wrong := [name for name in given if name.startswith(FIXED)]:
        raise ConfigError(f"a fork cannot change {wrong[0]}, because the shared rounds depend on it", path=wrong[0])
    before = configs.parse(known.config, stored=True)
    if without:
        given[WITHOUT] = sorted({*before.rounds.without, *without})
    given.setdefault("run.store", str(parent.parent))
    config, algorithm = configs.parse_with_algorithm(applied(known.config, given), stored=True)
    resolved = Resolved(config, algorithm)
    if privacy.is_private(algorithm):
        message = "a private run cannot be forked, because two runs would spend its privacy budget. Start a new run"
        raise ConfigError(message)
    out = Path(config.run.store) / check_name(run_id, "run_id")
    if not (out / "run.json").exists():
        source = store_of(before, known.run_id, parent)
        rows = Checkpoints(source).rows()
        if at is None:
            if not without:
                raise ConfigError("a fork needs the number of shared rounds (--at) or clients to leave out", path="at")
            at = shared_rounds(Checkpoints(source).with_state(), rows, without)
        if at is None:
            raise ConfigError(f"no round asked the clients {', '.join(map(str, without))}, so nothing would change")
        if known.forked is not None and at < known.forked.round:
            base, count = known.forked.run_id, known.forked.round
            raise ConfigError(f"rounds 1 to {count} are rounds of {base}. Fork {base} instead", path="at")
        _check_shared(Checkpoints(source), rows, at, without)
        with folder_lock(out):
            for name in ("partition", "pretrain", "pool", "code"):
                if (parent / name).exists():
                    shutil.copytree(parent / name, out / name, dirs_exist_ok=True)
            _check_pool(resolved, out)
            _copy_rounds(source, store_of(config, run_id, out), at)
            record = {
                "run_id": run_id,
                "token": uuid.uuid4().hex,
                "config": configs.public(config).model_dump(mode="json"),
                "mlflow_run_id": None,
                "forked": Forked(run_id=known.run_id, round=at, link=rows[at - 1].link if at else ""),
            }
            known.model_copy(update=record).write(out / "run.json")
    elif not attempt.resume:
        raise ConfigError(f"{out} already contains a run. Continue with --resume, or choose another --run-id")
    forked = RunFile.read(out / "run.json").forked
    if forked is None or forked.run_id != known.run_id or at not in (None, forked.round):
        raise ConfigError(f"{out} contains another run, so it cannot be resumed as this fork. Choose another --run-id")
    return run_all(resolved, run_id, replace(attempt, resume=True))


def clients_of(texts: Sequence[str], parent: Path) -> list[int]:
    """Return the clients that `client=7`, `client=7,9`, `tier=NAME` or `label=3` name in a run. `label` names all
    clients with samples of this label."""
    check_is_folder(parent)
    known = RunFile.read(parent / "run.json")
    manifest = partitions.read_manifest(parent / "partition" / partitions.MANIFEST)
    found: set[int] = set()
    for text in texts:
        kind, _, value = text.partition("=")
        numbers = [int(each) for each in value.split(",") if each.isdecimal()] if kind in ("client", "label") else []
        match kind:
            case "client":
                some = {each for each in numbers if each < len(manifest.client_samples)}
            case "label":
                chosen = [manifest.class_counts[each] for each in numbers if each < len(manifest.class_counts)]
                some = {client for counts in chosen for client, count in enumerate(counts) if count}
            case "tier":
                own_code.enable(known, parent)
                resolved = Resolved(*configs.parse_with_algorithm(known.config, stored=True))
                fleet = fleet_of(resolved, PoolFile.read(parent / "pool" / "pool.json").pool())
                some = {device.client for device in fleet if device.tier == value}
            case _:
                some = set()
        if not some or (kind == "client" and len(some) != len(value.split(","))):
            forms = "client=7, client=7,9, tier=NAME or label=3"
            raise ConfigError(f"{text!r} does not name clients of the run. Use {forms}", path="without")
        found |= some
    return sorted(found)


def first_asked(rows: Iterable[Row], clients: Collection[int]) -> int | None:
    """Return the first round, from 0, that asked one of the clients; None if there is no such round."""
    # If updates wait, a client's line is in the round that merges its update.
    lines = ((row.round, line) for row in rows for line in row.clients if line["client"] in clients)
    return min((round - int(line.get("staleness", 0)) for round, line in lines), default=None)


def shared_rounds(kept: Iterable[int], rows: Iterable[Row], without: Collection[int]) -> int | None:
    """Return the number of rounds that a fork without these clients can share: all rounds until the last round with a
    `kept` state before the first round that asked one of them. None if no round asked them."""
    asked = first_asked(rows, without)
    return None if asked is None else max((round + 1 for round in kept if round < asked), default=0)


def _check_shared(checkpoints: Checkpoints, rows: Sequence[Row], at: int, without: Collection[int]) -> None:
    if not 0 <= at <= len(rows):
        raise ConfigError(f"--at must be from 0 to {len(rows)}, the number of finished rounds, got {at}", path="at")
    asked = first_asked(rows, without)
    if asked is not None and asked < at:
        raise ConfigError(f"--at must be at most {asked}, because round {asked + 1} asked these clients", path="at")
    if at and at - 1 not in (stored := checkpoints.with_state()):
        kept = ", ".join(str(each + 1) for each in stored)
        raise ConfigError(
            f"the state after round {at} was not kept; the run has the states after the rounds {kept}. Choose one of "
            "them, or train the run with run.keep=all or rounds.keep_every",
            path="at",
        )


def _check_pool(resolved: Resolved, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = model_pool(resolved, out / "pretrain", Path(folder))
        if made.read_bytes() != (out / "pool" / "pool.json").read_bytes():
            raise ConfigError("the settings change the model pool, but the fork shares rounds that used the old pool")


def _copy_rounds(source: Store, target: Store, at: int) -> None:
    """Copy the first `at` rounds without the clients' results, and the last of their states."""
    target.delete(*(key for prefix in ("rounds/", "metrics/") for key in target.list(prefix)))
    for prefix in ("rounds/", "metrics/", "states/", "pending/"):
        for key in source.list(prefix):
            match = FILE.fullmatch(key)
            wanted = match is None or (
                int(match[1]) < at
                and (match[3] in ("COMMITTED", "metrics.json") or (int(match[1]) == at - 1 and "state." in match[3]))
            )
            if wanted:
                target.put(key, source.get(key))
    Checkpoints(target).discard_after(at - 1 if at else None)


class Certificate(Artifact):
    """States that no round of a fork asked some clients. Normalisation still uses statistics of the whole data set. The
    fork's key signs all other fields."""

    run_id: str
    forgotten: tuple[int, ...]
    forked: Forked
    model_sha256: str
    public_key: str = ""
    signature: str = ""

    def content(self) -> str:
        return self.model_dump_json(exclude={"public_key", "signature"})


def forget(parent: Path, run_id: str, clients: Collection[int], attempt: Attempt = Attempt()) -> RunResult:
    """Run a fork without `clients`, and write its certificate. Raises the errors of `fork`, and ConfigError if the
    server's data may contain samples of the clients."""
    if configs.parse_schema(RunFile.read(parent / "run.json").config).partition.proxy_shared:
        message = "the server's data contain samples of the clients (partition.proxy_shared), which cannot be forgotten"
        raise ConfigError(message, path="partition.proxy_shared")
    result = fork(parent, run_id, without=clients, attempt=attempt)
    out = Path(result.report).parent
    history, file = History.read(out / "history.json"), RunFile.read(out / "run.json")
    assert file.forked is not None
    config = configs.parse_schema(file.config)
    if first_asked(Checkpoints(store_of(config, run_id, out)).each_row(), clients) is not None:
        raise IntegrityError(f"{out} merged an update of the clients, so they are not forgotten. Delete the run")
    made = Certificate(run_id=run_id, forgotten=tuple(clients), forked=file.forked, model_sha256=history.model_sha256)
    secret = keys.place(config, run_id, store_of(config, run_id, out), out).read()
    assert secret is not None, "the run that has just ended has a key"
    key, signature = chain.sign(secret, made.content(), history.model_sha256)
    made.model_copy(update={"public_key": key, "signature": signature}).write(out / CERTIFICATE)
    return result


def check_certificate(folder: Path, rows: Iterable[Row], history: History) -> Certificate | None:
    """Check the certificate of a run; return None if the run has none. Raises IntegrityError if a round asked a
    forgotten client, or if the certificate belongs to another model or was not signed with the run's key."""
    if not (folder / CERTIFICATE).exists():
        return None
    found, name = Certificate.read(folder / CERTIFICATE), str(folder / CERTIFICATE)
    chain.check_signature(history.public_key, found.signature, found.content(), history.model_sha256, name)
    if (asked := first_asked(rows, found.forgotten)) is not None:
        raise IntegrityError(f"{name}: round {asked + 1} asked a client that must be forgotten")
    return found
