"""Devices that are invited: where their mailboxes and keys are stored, and who they are."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, nearest, printable
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.registry import Registry
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store, open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config
from flexfleet.pipeline import keys

log = logging.getLogger("flexfleet")

MAILBOXES, REGISTRY = ".agents", ".invited"
"""No run can have such a name."""
MOST = 1000
"""Devices that one command invites."""


def mailboxes_of(config: Config) -> Mailboxes:
    """Raises EnvironmentFailure if the S3 server does not enforce what is signed for devices."""
    home = _private(_home(config))
    verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
    return Mailboxes(home, verb, config.agents.endpoint)


def _home(config: Config, hasty: bool = False) -> Store:
    """`hasty`: does not wait long for a server that does not answer."""
    if config.run.remote is None:
        return FolderStore(Path(config.run.store).resolve() / MAILBOXES)
    patience_s = 0.0 if hasty else config.run.patience_s
    return open_store(f"{config.run.remote.rstrip('/')}/{MAILBOXES}", hasty, patience_s)


def registry_of(config: Config) -> Registry:
    return Registry(_private(keys.shared_place(config, REGISTRY)))


def _private(store: Store) -> Store:
    """A folder is for this user alone."""
    if isinstance(store, FolderStore):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.root.chmod(0o700)
    return store


def invite(config: Config, tier: str | None, count: int, out: Path) -> list[Path]:
    """Write an invitation for each of so many devices into the folder `out`, and return the files. Raises ConfigError
    for a tier that the fleet does not have, and if a file exists already; OSError if a file cannot be written."""
    tiers = [each.name for each in config.fleet.tiers]
    if tier is not None and tier not in tiers:
        raise ConfigError(f"--tier {tier!r} is not a tier of the fleet{nearest(tier, tiers)}")
    if not 1 <= count <= MOST:
        raise ConfigError(f"--count must be from 1 to {MOST}, the number of devices to invite; got {count}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a folder for the invitations, but {out} is a file. Name another one")
    mailboxes, registry, written = mailboxes_of(config), registry_of(config), list[Path]()
    if config.run.remote is not None and config.run.secrets is None:
        log.warning(
            "run.secrets is not set, so the devices' keys are only on this machine, in %s. A coordinator on another "
            "machine will not know these devices",
            registry.store.uri(),
        )
    out.mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        invitation = mailboxes.invite(registry, "device" if tier is None else _plain(tier), tier)
        path = out / f"{invitation.name}.json"
        try:
            _write(path, invitation.model_dump_json(indent=1) + "\n")
        except OSError as error:  # a device without an invitation cannot come
            mailboxes.revoke(registry, invitation.name)
            if isinstance(error, FileExistsError):
                raise ConfigError(f"{path} exists already. Name another folder by --out") from None
            raise
        written.append(path)
    return written


def _write(path: Path, text: str) -> None:
    """For this user alone. Raises OSError, and leaves no part of the file."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink()
        raise


def revoke(config: Config, name: str) -> None:
    """Raises ConfigError if the device is not invited."""
    mailboxes_of(config).revoke(registry_of(config), name)


def _plain(tier: str) -> str:
    """A tier's name as a part of devices' names."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in tier.lower()).strip("-")[:40] or "device"


def status(config: Config) -> list[dict[str, Any]]:
    """Return a row for each invited device: `state` of its last heartbeat, `answers` as the coordinator counts results,
    `seen` on the device's own clock. Raises EnvironmentFailure soon if the store does not answer."""
    registry = keys.shared_place(config, REGISTRY, hasty=True)
    if isinstance(registry, FolderStore) and not registry.root.is_dir():
        return []
    mailboxes, rows = Mailboxes(_home(config, hasty=True)), []
    for member in Registry(registry).members():
        heartbeat, wrong = None, None
        try:
            heartbeat = mailboxes.heartbeat(member)
            if heartbeat is not None and member.id not in (None, heartbeat.id):
                heartbeat, wrong = None, "another device uses its invitation"
        except IntegrityError as error:
            wrong = f"{printable(str(error))}; a device that has lost its folder needs another invitation"
        message = mailboxes.last(member)
        seen = None if heartbeat is None else datetime.fromtimestamp(heartbeat.at, timezone.utc)
        rows.append(
            {
                "name": member.name,
                "tier": member.tier,
                "state": heartbeat.state if heartbeat is not None else "unknown" if wrong else "never seen",
                "seen": None if seen is None else seen.isoformat(timespec="seconds"),
                "run": message.run if message is not None and message.run else None,
                "answers": message.account.results if message is not None else 0,
                "lost": message.account.lost if message is not None else 0,
                "last": message.account.last if message is not None and message.account.last else None,
                "version": None if heartbeat is None else printable(heartbeat.version),
                "said": wrong or (None if heartbeat is None or not heartbeat.error else printable(heartbeat.error)),
                "requests": None if heartbeat is None else heartbeat.requests,
            }
        )
    return rows
