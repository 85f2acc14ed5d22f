"""Stores a run's key, which only the run's coordinator reads.

A run has one random key if its clients are on other machines, or if it is private. The coordinator's signing keys
(`manifest.key_of`), the noise and the choice of clients (`privacy`) follow from it. The key is never in the bucket of
the run's ledger, because workers get URLs of that bucket.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from fl_engine.core.errors import ConfigError, IntegrityError
from fl_engine.core.text import is_meant
from fl_engine.remote.kubernetes import jobs
from fl_engine.remote.kubernetes.cluster import Cluster
from fl_engine.storage.s3 import OWN, SIGNING, S3Store, endpoint_of, setting
from fl_engine.storage.store import FolderStore, Store, sha256
from flexfleet.config import Config
from flexfleet.files.artifacts import RunFile

log = logging.getLogger("flexfleet")

SIZE = 32
"""Bytes of a key."""
IN_RUN = "secret/key"
"""The default file in the run's folder."""
SETTINGS = "FLEXFLEET_SECRETS_"
"""Prefix of the environment variables with the address and credentials of a bucket for keys."""


def address(store: Store, key: str = "") -> str:
    """Return the address of a key; a folder's includes the machine's name."""
    if not isinstance(store, FolderStore):
        return store.uri(key)
    return f"{store.root.resolve() / key} on {socket.gethostname()}"


@dataclass(frozen=True)
class InStore:
    """A file, or an object of another bucket than the run's ledger."""

    store: Store
    key: str
    advice = ""

    def __str__(self) -> str:
        return address(self.store, self.key)

    def read(self) -> bytes | None:
        """Return the key; None if there is none."""
        return self.store.get(self.key) if self.key in self.store.list(self.key) else None

    def create(self, value: bytes) -> None:
        """Store a key if there is none."""
        if isinstance(self.store, FolderStore):
            folder = (self.store.root / self.key).parent
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
        self.store.create(self.key, value)
        if isinstance(self.store, FolderStore):
            (self.store.root / self.key).chmod(0o600)


@dataclass(frozen=True)
class InSecret:
    """A Secret of the clients' namespace. It is deleted when the run has finished, unless the run is private."""

    cluster: Cluster
    run: str
    """The run's label."""

    @property
    def name(self) -> str:
        return f"{self.run}-keys"

    @property
    def advice(self) -> str:
        return f"to delete it: kubectl -n {self.cluster.namespace} delete secret {self.name}"

    def __str__(self) -> str:
        return f"the Secret {self.cluster.namespace}/{self.name}"

    def read(self) -> bytes | None:
        secret = self.cluster.get("secrets", self.name)
        try:
            return None if secret is None else base64.b64decode(secret["data"]["key"], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise IntegrityError(f"{self} must hold a run's key: {type(error).__name__} {error}") from None

    def create(self, value: bytes) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "name": self.name,
                "namespace": self.cluster.namespace,
                "labels": {jobs.RUN: self.run, "app.kubernetes.io/part-of": "flexfleet"},
            },
            "type": "Opaque",
            "immutable": True,
            "data": {"key": base64.b64encode(value).decode()},
        }
        self.cluster.create("secrets", body)

    def delete(self) -> None:
        self.cluster.delete("secrets", self.name)


Place = InStore | InSecret
"""Where a key is stored. Methods raise EnvironmentFailure if it cannot be reached."""


def place(config: Config, run_id: str, store: Store, out: Path) -> Place:
    """Return the place of a run's key. `store`: of its ledger; `out`: its folder. Raises ConfigError if clients could
    have URLs of the place."""
    where = config.run.secrets
    if where is None and config.run.backend == "kubernetes":
        return InSecret(Cluster(config.kubernetes.namespace), jobs.run_label(run_id, store.uri()))
    if where is None:
        return InStore(FolderStore(out.resolve()), IN_RUN)
    return InStore(shared_place(config, run_id), "key")


def shared_place(config: Config, name: str, hasty: bool = False) -> Store:
    """Return the store of keys of this name. `hasty`: do not wait for a server that does not answer. Raises ConfigError
    if clients could have URLs of it."""
    where = config.run.secrets
    if where is None:
        return FolderStore(Path(config.run.store).resolve() / name)
    check_folder(config)
    if not is_meant(where):
        return FolderStore(Path(where).resolve() / name)
    bucket = S3Store(f"{where.rstrip('/')}/{name}", settings=SETTINGS, hasty=hasty)
    _check_bucket(where, config.run.remote)
    return bucket


def check_folder(config: Config) -> None:
    """Raise ConfigError if clients could read the folder of the keys. Only `shared_place` checks a bucket, because
    tasks of a pipeline that run no rounds have no credentials of it."""
    where, remote = config.run.secrets, config.run.remote
    if where is None or remote is None or "://" in where or "://" in remote:
        return
    if Path(where).resolve().is_relative_to(Path(remote).resolve()):
        raise ConfigError(f"run.secrets must not be in run.remote = {remote!r}, which others read; got {where!r}")


def _check_bucket(uri: str, remote: str | None) -> None:
    missing = [n for n in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not os.environ.get(f"{SETTINGS}{n}")]
    if missing:
        names = " and ".join(f"{SETTINGS}{name}" for name in missing)
        raise ConfigError(f"run.secrets = {uri!r} needs credentials of its own: set {names}")
    others = {setting("AWS_ACCESS_KEY_ID", whose) for whose in (OWN, SIGNING)}
    if os.environ[f"{SETTINGS}AWS_ACCESS_KEY_ID"] in others:
        raise ConfigError(
            f"{SETTINGS}AWS_ACCESS_KEY_ID must differ from the coordinator's credentials and from those that sign URLs"
        )
    if remote is not None and _bucket(uri) == _bucket(remote) and _address(SETTINGS) == _address(OWN):
        raise ConfigError(
            f"run.secrets must be in another bucket than run.remote = {remote!r}, because clients get URLs of it; got "
            f"{uri!r}"
        )


def _bucket(uri: str) -> str:
    return uri.partition("://")[2].partition("/")[0]


def _address(settings: str) -> str:
    return (endpoint_of(settings) or "").rstrip("/")


def key_of_run(place: Place, known: RunFile | None, private: bool) -> bytes:
    """Return the run's key, and create it if there is none. With a new key, the clients of an uncommitted round are
    asked again.

    Raises IntegrityError if the run is private, because its noise follows from the key, and the key is missing or
    differs from the one in the run's record `known`.
    """
    expected = None if known is None or not private else known.key_sha256
    key = place.read()
    if key is None and expected is None:
        place.create(secrets.token_bytes(SIZE))
        key = place.read()
        log.info("the run's key is in %s%s", place, f"; {place.advice}" if place.advice else "")
    if key is None:
        raise IntegrityError(
            f"the run's key is not in {place}; the run's record names {known.key_at if known else place}. Restore it, "
            "or set run.secrets to its place"
        )
    if len(key) != SIZE or expected not in (None, sha256(key)):
        raise IntegrityError(
            f"{place} must hold the key with which the run has started, got {len(key)} other bytes. Restore the key, "
            "or start another run"
        )
    return key
