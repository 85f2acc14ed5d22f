"""Invites, revokes and lists enrolled devices."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, nearest, printable
from fl_engine.remote.mailboxes import Mailboxes
from fl_engine.remote.messages import Account
from fl_engine.remote.registry import Registry
from fl_engine.storage import probe
from fl_engine.storage.s3 import S3Store, open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config
from flexfleet.pipeline import keys

log = logging.getLogger("flexfleet")

MAILBOXES, REGISTRY = ".agents", ".invited"
"""Folders whose names no run can have."""
MOST = 1000
"""The most devices of one command."""


def mailboxes_of(config: Config) -> Mailboxes:
    """Return the devices' mailboxes. Raises EnvironmentFailure if the S3 server does not enforce signed uploads."""
    home = _private(_home(config))
    verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
    return Mailboxes(home, verb, config.agents.endpoint)


def _home(config: Config, hasty: bool = False) -> Store:
    """`hasty`: do not wait for a server that does not answer."""
    if config.run.remote is None:
        return FolderStore(Path(config.run.store).resolve() / MAILBOXES)
    patience_s = 0.0 if hasty else config.run.patience_s
    return open_store(f"{config.run.remote.rstrip('/')}/{MAILBOXES}", hasty, patience_s)


def registry_of(config: Config) -> Registry:
    return Registry(_private(keys.shared_place(config, REGISTRY)))


def _private(store: Store) -> Store:
    """Allow only this user to read a folder."""
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
        raise ConfigError(f"--count must be from 1 to {MOST}, got {count}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a folder, got the file {out}")
    mailboxes, registry, written = mailboxes_of(config), registry_of(config), list[Path]()
    if config.run.remote is not None and config.run.secrets is None:
        log.warning(
            "run.secrets is not set, so the devices' keys are in %s. A coordinator on another machine cannot use them",
            registry.store.uri(),
        )
    out.mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        invitation = mailboxes.invite(registry, "device" if tier is None else _plain(tier), tier)
        path = out / f"{invitation.name}.json"
        try:
            _write(path, invitation.model_dump_json(indent=1) + "\n")
        except OSError as error:
            mailboxes.revoke(registry, invitation.name)
            if isinstance(error, FileExistsError):
                raise ConfigError(f"{path} exists already. Set --out to another folder") from None
            raise
        written.append(path)
    return written


def _write(path: Path, text: str) -> None:
    """Write a file that only this user can read. Raises OSError, and leaves no part of the file."""
    opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(opened, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        path.unlink()
        raise


def revoke(config: Config, name: str) -> None:
    """Revoke a device. Raises ConfigError if it is not invited."""
    mailboxes_of(config).revoke(registry_of(config), name)


def _plain(tier: str) -> str:
    """Return a tier's name as a part of devices' names."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in tier.lower()).strip("-")[:40] or "device"


def status(config: Config) -> list[dict[str, Any]]:
    """Return a row for each invited device: `state` of its last heartbeat, `answers` (number of results), `seen` (time
    on the device's clock). Raises EnvironmentFailure soon if the store does not answer."""
    registry = keys.shared_place(config, REGISTRY, hasty=True)
    if isinstance(registry, FolderStore) and not registry.root.is_dir():
        return []
    mailboxes, rows = Mailboxes(_home(config, hasty=True)), list[dict[str, Any]]()
    for member in Registry(registry).members():
        heartbeat, wrong = None, None
        try:
            heartbeat = mailboxes.heartbeat(member)
            if heartbeat is not None and member.id not in (None, heartbeat.id):
                heartbeat, wrong = None, "another device uses its invitation"
        except IntegrityError as error:
            wrong = f"{printable(str(error))}; a device that has lost its folder needs another invitation"
        message = mailboxes.last(member)
        account = Account() if message is None else message.account
        row: dict[str, Any] = {
            "name": member.name,
            "tier": member.tier,
            "state": "unknown" if wrong else "never seen",
            "seen": None,
        }
        row |= {"run": None if message is None else message.run or None}
        row |= {"answers": account.results, "lost": account.lost, "last": account.last or None}
        row |= {"version": None, "said": wrong, "requests": None}
        if heartbeat is not None:
            seen = datetime.fromtimestamp(heartbeat.at, timezone.utc).isoformat(timespec="seconds")
            row |= {"state": heartbeat.state, "seen": seen, "version": printable(heartbeat.version)}
            row |= {"said": printable(heartbeat.error) or None, "requests": heartbeat.requests}
        rows.append(row)
    return rows
