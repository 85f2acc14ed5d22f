"""Devices that are invited: where their letters and keys are, and who they are."""

from __future__ import annotations

import logging
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fl_engine.backends.agents.post import Post
from fl_engine.backends.agents.roster import Member, Roster
from fl_engine.core.errors import ConfigError, IntegrityError, nearest, printable
from fl_engine.exchange.letters import Beat
from fl_engine.storage import probe
from fl_engine.storage.places import open_store
from fl_engine.storage.s3 import S3Store
from fl_engine.storage.store import FolderStore, Store
from flexfleet.config import Config
from flexfleet.steps import keys

log = logging.getLogger("flexfleet")

LETTERS, ROSTER = ".agents", ".invited"
"""No run can have such a name."""
MOST = 1000
"""Devices that one command invites."""


def post_of(config: Config) -> Post:
    """Raises EnvironmentFailure where the S3 server does not hold devices to what is signed for them."""
    home = _private(_home(config))
    verb = probe.upload_verb(home) if isinstance(home, S3Store) else None
    return Post(home, roster_of(config), verb, config.agents.endpoint)


def _home(config: Config, hasty: bool = False) -> Store:
    """`hasty`: does not wait long for a server that does not answer."""
    if config.run.remote is None:
        return FolderStore(Path(config.run.store).resolve() / LETTERS)
    return open_store(f"{config.run.remote.rstrip('/')}/{LETTERS}", hasty)


def roster_of(config: Config) -> Roster:
    return Roster(_private(keys.shared_place(config, ROSTER)))


def _private(store: Store) -> Store:
    """A folder is for this user alone."""
    if isinstance(store, FolderStore):
        store.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.root.chmod(0o700)
    return store


def invite(config: Config, tier: str | None, count: int, out: Path) -> list[Path]:
    """Writes an invitation for each of so many devices into the folder `out`. Raises ConfigError for a tier that the
    fleet does not have, and for a file that is there already; OSError where the file cannot be written."""
    tiers = [each.name for each in config.fleet.tiers]
    if tier is not None and tier not in tiers:
        raise ConfigError(f"--tier {tier!r} is no tier of the fleet{nearest(tier, tiers)}")
    if not 1 <= count <= MOST:
        raise ConfigError(f"--count says how many devices to invite, 1 to {MOST}; got {count}")
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out names a folder for the invitations; {out} is a file: name another one")
    post, written = post_of(config), list[Path]()
    if config.run.remote is not None and config.run.secrets is None:
        log.warning(
            "run.secrets is not set: the devices' keys are on this machine alone, in %s; a coordinator elsewhere does "
            "not know these devices",
            keys.shared_place(config, ROSTER).uri(),
        )
    out.mkdir(parents=True, exist_ok=True)
    for _ in range(count):
        invitation = post.invite("device" if tier is None else _plain(tier), tier)
        path = out / f"{invitation.name}.json"
        try:
            _write(path, invitation.model_dump_json(indent=1) + "\n")
        except OSError as error:  # a device without an invitation cannot come
            post.revoke(invitation.name)
            if isinstance(error, FileExistsError):
                raise ConfigError(f"{path} is there already: name another folder by --out") from None
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
    """Raises ConfigError where it is not invited."""
    post_of(config).revoke(name)


def _plain(tier: str) -> str:
    """A tier's name as a part of devices' names."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in tier.lower()).strip("-")[:40] or "device"


def told(config: Config) -> list[dict[str, Any]]:
    """The invited devices: `state` as they said last, `answers` as the coordinator counts them. `seen` is by the
    device's own clock, also where that is ahead. Raises EnvironmentFailure soon where the store does not answer."""
    roster = keys.shared_place(config, ROSTER, hasty=True)
    if isinstance(roster, FolderStore) and not roster.root.is_dir():
        return []
    post, rows = Post(_home(config, hasty=True), Roster(roster)), []
    for member in post.roster.members():
        letter, (beat, wrong) = post.last(member), _beat_of(post, member)
        seen = None if beat is None else datetime.fromtimestamp(beat.at, timezone.utc)
        rows.append(
            {
                "name": member.name,
                "tier": member.tier,
                "state": beat.state if beat is not None else "unknown" if wrong else "never seen",
                "seen": None if seen is None else seen.isoformat(timespec="seconds"),
                "run": letter.run if letter is not None and letter.run else None,
                "answers": letter.account.answers if letter is not None else 0,
                "lost": letter.account.lost if letter is not None else 0,
                "last": letter.account.last if letter is not None and letter.account.last else None,
                "version": None if beat is None else printable(beat.version),
                "said": wrong or (None if beat is None or not beat.said else printable(beat.said)),
                "requests": None if beat is None else beat.requests,
            }
        )
    return rows


def _beat_of(post: Post, member: Member) -> tuple[Beat | None, str | None]:
    """The device's last beat, and what is wrong with what lies in its place: a device whose folder was lost begins
    again with the key of its invitation."""
    try:
        return post.own_beat(member), None
    except IntegrityError as error:
        return None, f"{printable(str(error))}; a device that has lost its folder needs another invitation"
