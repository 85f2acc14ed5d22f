"""Invite, revoke and list enrolled devices."""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fl_engine.core.errors import ConfigError, IntegrityError, nearest, printable
from fl_engine.remote.messages import MESSAGE_BYTES, Account
from fl_engine.remote.registry import Mailboxes, Registry
from fl_engine.storage import probe
from fl_engine.storage.overlapping import overlapped
from fl_engine.storage.s3 import S3Store, open_store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config
from flexfleet.pipeline import keys

log = logging.getLogger("flexfleet")

MAILBOXES, REGISTRY = ".agents", ".invited"
"""Reserved folder names in the run store, which cannot be names of runs."""
MOST = 1000
"""Maximum number of devices that one command can invite."""


def mailboxes_of(config: Config) -> Mailboxes:
    """Return the devices' mailboxes. Raises EnvironmentFailure if the S3 server does not enforce signed uploads."""
    home = _private(_home(config))
    verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
    return Mailboxes(home, verb, config.agents.endpoint)


def _home(config: Config, hasty: bool = False) -> Store:
    """Return the store of the mailboxes. If `hasty` is True, wait only a few seconds for the server."""
    if config.run.remote is None:
        return FolderStore(Path(config.run.store).resolve() / MAILBOXES)
    patience_s = 0.0 if hasty else config.run.patience_s
    return open_store(f"{config.run.remote.rstrip('/')}/{MAILBOXES}", hasty, patience_s)


def registry_of(config: Config) -> Registry:
    return Registry(_private(keys.shared_place(config, REGISTRY)))


def _private(store: Store) -> Store:
    """Return `store`. If `store` is a folder, make it accessible only to this user."""
    if isinstance(store, FolderStore):
        keys.make_private(store.root)
    return store


def invite(config: Config, tier: str | None, count: int, out: Path) -> list[Path]:
    """Write invitations for `count` devices into the folder `out`, and return the files' paths. Raises ConfigError if
    the tier does not exist or a file already exists, and EnvironmentFailure if a file cannot be written."""
    tiers = [each.name for each in config.fleet.tiers]
    if tier is not None and tier not in tiers:
        raise ConfigError(f"--tier must be a tier of the fleet, got {tier!r}{nearest(tier, tiers)}")
    if not 1 <= count <= MOST:
        raise ConfigError(f"--count must be from 1 to {MOST}, got {count}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out must be a folder, got the file {out}")
    mailboxes, registry, written = mailboxes_of(config), registry_of(config), list[Path]()
    if config.run.remote is not None and config.run.secrets is None:
        log.warning(
            "run.secrets is not set, so the devices' keys are stored in %s. Other machines cannot read these keys",
            registry.store.uri(),
        )
    for _ in range(count):
        invitation = mailboxes.invite(registry, "device" if tier is None else _plain(tier), tier)
        file, done = f"{invitation.name}.json", False
        try:
            done = FolderStore(out, 0o600).create(file, (invitation.model_dump_json(indent=1) + "\n").encode())
        finally:
            if not done:
                mailboxes.revoke(registry, invitation.name)
        if not done:
            raise ConfigError(f"{out / file} already exists. Set --out to another folder")
        written.append(out / file)
    return written


def revoke(config: Config, name: str) -> None:
    """Revoke a device. Raises ConfigError if the device does not have an invitation."""
    mailboxes_of(config).revoke(registry_of(config), name)


def _plain(tier: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in tier.lower()).strip("-")[:40] or "device"


def status(config: Config) -> list[dict[str, Any]]:
    """Return a row for each invited device. The values `state` and `seen` (a time on the device's clock) are read from
    the last heartbeat. `answers` is the number of results. Raises EnvironmentFailure if the store does not respond."""
    registry = Registry(keys.shared_place(config, REGISTRY, hasty=True))
    mailboxes = Mailboxes(_home(config, hasty=True))

    def row(name: str) -> dict[str, Any]:
        member, heartbeat, wrong = registry.member(name), None, None
        try:
            heartbeat = mailboxes.heartbeat(member)
            if heartbeat is not None and member.id not in (None, heartbeat.id):
                heartbeat, wrong = None, "another device uses its invitation"
        except IntegrityError as error:
            wrong = printable(str(error))
        message = mailboxes.last(member)
        account = Account() if message is None else message.account
        at = None if heartbeat is None else datetime.fromtimestamp(heartbeat.at, timezone.utc)
        return {
            "name": member.name,
            "tier": member.tier,
            "state": heartbeat.state if heartbeat else "unknown" if wrong else "never seen",
            "seen": at and at.isoformat(timespec="seconds"),
            "run": None if message is None else message.run or None,
            "answers": account.results,
            "lost": account.lost,
            "last": account.last or None,
            "version": heartbeat and printable(heartbeat.version),
            "said": (printable(heartbeat.error) or None) if heartbeat else wrong,
            "requests": heartbeat and heartbeat.requests,
        }

    return list(overlapped(mailboxes.home, MESSAGE_BYTES // 4, row, registry.names()))
